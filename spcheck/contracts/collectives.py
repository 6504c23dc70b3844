"""The collective contract: kind, group, order and shape of every collective of one forward, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from reference.config import ModelConfig
from spcheck.phases import Phase
from spcheck.plan import Plan

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8}


@dataclass(frozen=True)
class Expected:
    """One collective as the table wants it; ``shape`` is the argument's on each rank, ``where`` is for messages."""

    kind: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    where: str

    @property
    def bytes(self) -> int:
        """Bytes of the argument on one rank."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def expected_collectives(plan: Plan, dataflow: str, phase: Phase) -> list[Expected]:
    """All collectives of one forward, in order. ``dataflow``: ``"reference"``, ``"tp"`` or ``"full-sp"``."""
    if dataflow == "reference":
        counts = phase.counts
        return [c for n in counts for c in _Table(plan, phase, n, dataflow).forward()]
    return list(_Table(plan, phase, phase.padded, dataflow).forward())


class _Table:
    """The rules for ``n`` rows. D hidden size, K experts per token, m rows of a shard."""

    def __init__(self, plan: Plan, phase: Phase, n: int, dataflow: str) -> None:
        self.config: ModelConfig = plan.config
        self.plan = plan
        self.phase = phase
        self.tp = plan.reference_world if dataflow == "reference" else plan.case.tp
        self.n = n
        self.m = -(-n // self.tp)
        self.dtype = plan.dtype
        self.full_sp = dataflow == "full-sp"
        self.extra_aux = dataflow == "tp"

    def forward(self) -> Iterator[Expected]:
        return self.draft() if self.phase.kind == "draft" else self.target()

    def target(self) -> Iterator[Expected]:
        aux = self.plan.case.aux_layers
        layers = self.config.num_hidden_layers
        yield self.all_reduce("model.embed_tokens")
        for layer in range(layers):
            yield from self.aux_reduction(layer)
            yield from self.layer(layer)
        yield from self.aux_reduction(layers)
        if not self.full_sp:
            yield from self.mlp_reduction(layers - 1)
        else:
            yield self.hidden("all_gather", "tp", self.m, "model exit", width=1 + len(aux))
        yield self.logits("lm_head")

    def draft(self) -> Iterator[Expected]:
        layer = self.plan.mtp_layer(self.phase.call)
        name = f"model.layers.{layer}"
        yield self.all_reduce(f"{name}.embed_tokens")
        yield from self.layer(layer, first=True)
        if self.full_sp:
            yield self.hidden("all_gather", "tp", self.m, f"{name} exit")
        else:
            yield self.all_reduce(f"{name}.shared_head.norm")
        yield self.logits(f"{name}.shared_head.head")

    def layer(self, layer: int, first: bool = False) -> Iterator[Expected]:
        """One decoder layer; without SP the sum over its MLP is the next norm's and comes with the next layer."""
        attention = f"model.layers.{layer}.self_attn"
        if not self.full_sp:
            if layer > 0 and not first:
                yield from self.mlp_reduction(layer - 1)
            yield self.all_reduce(attention)
            return
        yield self.hidden("all_gather", "tp", self.m, attention)
        yield self.hidden("reduce_scatter", "tp", self.m * self.tp, attention)
        if self.config.is_moe_layer(layer):
            yield from self.dispatch_and_combine(f"model.layers.{layer}.mlp.experts")

    def mlp_reduction(self, layer: int) -> Iterator[Expected]:
        yield self.all_reduce(f"model.layers.{layer}.mlp")

    def aux_reduction(self, layer: int) -> Iterator[Expected]:
        """Without SP an auxiliary state needs the sum that the norm behind it does as well."""
        if self.extra_aux and layer > 0 and layer in self.plan.case.aux_layers:
            yield self.all_reduce(f"model.aux.{layer}")

    def dispatch_and_combine(self, where: str) -> Iterator[Expected]:
        k = self.config.num_experts_per_tok
        weights = "float32" if self.dtype == "bfloat16" else self.dtype
        yield self.hidden("all_gatherv", "ep", self.m, where)
        yield Expected("all_gatherv", "ep", (self.m, k), "int64", where)
        yield Expected("all_gatherv", "ep", (self.m, k), weights, where)
        yield self.hidden("reduce_scatterv", "ep", self.m * self.tp, where)

    def all_reduce(self, where: str) -> Expected:
        return self.hidden("all_reduce", "tp", self.n, where)

    def hidden(self, kind: str, group: str, rows: int, where: str, width: int = 1) -> Expected:
        return Expected(kind, group, (rows, width * self.config.hidden_size), self.dtype, where)

    def logits(self, where: str) -> Expected:
        """Vocabulary-parallel: V padded to a multiple of tp, gathered along dim 0, so vocabulary first."""
        return Expected("all_gather", "tp", (-(-self.config.vocab_size // self.tp), self.n), self.dtype, where)
