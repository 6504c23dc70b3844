"""The collective contract: kind, group, order and shape of every collective of one forward, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spcheck.families.deepseek.rows import enters_on_shards
from spcheck.plan.dispatch import dispatched_sizes, is_dispatched
from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8}


@dataclass(frozen=True)
class Expected:
    """One collective as the table wants it; ``where`` is for messages.

    ``shape`` is the argument's on each rank; with ``by_choice`` its rows depend on what tokens choose, and are the most
    there can be. ``sizes`` are the row counts by rank that it must be told, None for those that are told none, or by
    choice.
    """

    kind: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    where: str
    sizes: tuple[int, ...] | None = None
    by_choice: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the argument on one rank, by choice at most."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def expected_collectives(plan: Plan, side: SidePlan, dp_rank: int, number: int) -> list[Expected]:
    """All collectives of forward ``number`` of a side on one data-parallel rank, in order."""
    phases = [phases[number] for phases in plan.phases]
    phase = phases[dp_rank]
    rows = phase.counts if side.plain else (phase.padded,)
    return [c for n in rows for c in _Table(plan, side, phases, dp_rank, n).forward()]


class _Table:
    """The rules for ``n`` rows. D hidden size, K experts per token, m rows of a shard."""

    def __init__(self, plan: Plan, side: SidePlan, phases: Sequence[Phase], dp_rank: int, n: int) -> None:
        self.plan, self.side, self.config = plan, side, plan.config
        self.phases, self.phase = phases, phases[dp_rank]
        self.tp, self.dp = side.tp, plan.case.dp
        self.n = n
        self.m = -(-n // self.tp)
        self.dtype = plan.dtype
        self.aux = plan.case.aux_layers
        self.pending: list[int] = []  # auxiliary states that wait as shards for the next gather

    def forward(self) -> Iterator[Expected]:
        if self.agrees:
            yield Expected("all_reduce", "dp_cpu", (3, self.dp), "int64", "the data-parallel ranks' row counts")
        yield from self.draft() if self.phase.kind == "draft" else self.target()

    @property
    def agrees(self) -> bool:
        """Draft step 0 has the rows of its target step, and runs in its context, unless drafts were verified."""
        same_rows = self.phase.kind == "draft" and self.phase.draft == 0 and not self.phase.recounted
        return not self.side.plain and self.dp > 1 and self.plan.has_moe and not same_rows

    def target(self) -> Iterator[Expected]:
        layers = self.config.num_hidden_layers
        yield self.all_reduce("model.embed_tokens")
        for layer in range(layers):
            yield from self.aux_state(layer)
            yield from self.layer(layer)
        yield from self.aux_state(layers)
        yield from self.exit(layers)
        yield self.logits("lm_head")

    def exit(self, layers: int) -> Iterator[Expected]:
        if self.side.scheme == "full-sp":
            yield self.hidden("all_gather", "tp", self.m, "model exit", width=1 + len(self.aux))
        elif self.on_shards(layers):
            yield self.border("model exit")
        else:
            yield from self.mlp_reduction(layers - 1)

    def draft(self) -> Iterator[Expected]:
        layer = self.plan.mtp_layer(self.phase.draft)
        name = f"model.layers.{layer}"
        yield self.all_reduce(f"{name}.embed_tokens")
        yield from self.layer(layer, first=True)
        if self.side.sharded:
            width = 2 if self.side.scheme == "moe-sp" else 1
            yield self.hidden("all_gather", "tp", self.m, f"{name} exit", width=width)
        else:
            yield self.all_reduce(f"{name}.shared_head.norm")
        yield self.logits(f"{name}.shared_head.head")

    def layer(self, layer: int, first: bool = False) -> Iterator[Expected]:
        """One decoder layer; a sum that is left open is the next norm's and comes with the next layer."""
        name = f"model.layers.{layer}"
        yield from self.before_attention(name, layer, first)
        scatters = self.side.scheme == "full-sp" or (self.side.sharded and self.config.is_moe_layer(layer))
        if scatters:
            yield self.hidden("reduce_scatter", "tp", self.m * self.tp, f"{name}.self_attn")
        else:
            yield self.all_reduce(f"{name}.self_attn")
        if self.config.is_moe_layer(layer) and is_dispatched(self.side, self.plan.case):
            yield from self.dispatch_and_combine(f"{name}.mlp.experts")

    def before_attention(self, name: str, layer: int, first: bool) -> Iterator[Expected]:
        if self.side.scheme == "full-sp":
            yield self.hidden("all_gather", "tp", self.m, f"{name}.self_attn")
        elif self.on_shards(layer) and not first:
            if self.config.is_moe_layer(layer):
                yield self.hidden("all_gather", "tp", self.m, f"{name}.self_attn")
            else:
                yield self.border(name)
        elif layer > 0 and not first:
            yield from self.mlp_reduction(layer - 1)

    def on_shards(self, layer: int) -> bool:
        """Whether ``moe-sp`` hands a layer (or, behind the last one, the exit) shards."""
        if self.side.scheme != "moe-sp" or layer == 0:
            return False
        return enters_on_shards(self.config, layer) or (
            layer == self.config.num_hidden_layers and self.config.is_moe_layer(layer - 1)
        )

    def border(self, where: str) -> Expected:
        """One packed gather of hidden, residual, and the auxiliary states that waited for it."""
        width, self.pending = 2 + len(self.pending), []
        return self.hidden("all_gather", "tp", self.m, where, width=width)

    def mlp_reduction(self, layer: int) -> Iterator[Expected]:
        yield self.all_reduce(f"model.layers.{layer}.mlp")

    def aux_state(self, layer: int) -> Iterator[Expected]:
        """A packed dataflow on full rows needs the sum that the norm behind it does as well; shards wait."""
        if layer not in self.aux or layer == 0 or self.side.plain or self.side.scheme == "full-sp":
            return
        if not self.on_shards(layer):
            yield self.all_reduce(f"model.aux.{layer}")
        elif layer < self.config.num_hidden_layers and self.config.is_moe_layer(layer):
            self.pending.append(layer)

    def dispatch_and_combine(self, where: str) -> Iterator[Expected]:
        """Rows to the experts and back, over the world under SP, else over the data-parallel ranks."""
        k = self.config.num_experts_per_tok
        sizes = dispatched_sizes(self.side, self.phases)
        own = self.m if self.side.sharded else self.n
        hidden = (self.config.hidden_size, self.dtype)
        tensors = [hidden, (k, "int64"), (k, self.plan.wide_dtype)]
        if self.plan.case.all2all_backend == "allgather_reducescatter":
            yield from (self.routed("all_gatherv", own, what, where, sizes) for what in tensors)
            yield self.routed("reduce_scatterv", sum(sizes), hidden, where, sizes)
        elif self.plan.case.all2all_backend == "naive":
            for what in tensors:
                yield from (self.routed("broadcast", n, what, where, (source,)) for source, n in enumerate(sizes))
            yield self.routed("all_reduce", sum(sizes), hidden, where)
        else:
            ones = (1,) * len(sizes)
            yield Expected("all_to_all", self.dispatch_group, (len(sizes),), "int64", where, ones)
            owners = min(k, len(sizes)) if self.plan.case.expert_parallel else len(sizes)
            for rows, what in (*((own * owners, what) for what in tensors), (sum(sizes), hidden)):
                yield replace(self.routed("all_to_all", rows, what, where), by_choice=True)

    def routed(
        self, kind: str, rows: int, what: tuple[int, str], where: str, sizes: tuple[int, ...] | None = None
    ) -> Expected:
        width, dtype = what
        return Expected(kind, self.dispatch_group, (rows, width), dtype, where, sizes)

    @property
    def dispatch_group(self) -> str:
        return "ep" if self.side.sharded else "dp"

    def all_reduce(self, where: str) -> Expected:
        return self.hidden("all_reduce", "tp", self.n, where)

    def hidden(self, kind: str, group: str, rows: int, where: str, width: int = 1) -> Expected:
        return Expected(kind, group, (rows, width * self.config.hidden_size), self.dtype, where)

    def logits(self, where: str) -> Expected:
        """Vocabulary-parallel: V padded to a multiple of tp, gathered along dim 0, so vocabulary first."""
        return Expected("all_gather", "tp", (-(-self.config.vocab_size // self.tp), self.n), self.dtype, where)
