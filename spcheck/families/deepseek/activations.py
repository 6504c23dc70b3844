"""How large the tensors of token rows are that one rank holds: a table from the sizes, the rows and the collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spcheck.families.deepseek.collectives import ITEM_BYTES, Expected, expected_collectives
from spcheck.families.deepseek.parameters import mlp_ranks
from spcheck.families.deepseek.rows import expected_rows, phases_of_probe
from spcheck.plan.dispatch import dispatched_sizes, is_by_choice, is_dispatched
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan


@dataclass(frozen=True)
class Width:
    """One row of a probed value on one rank: its elements and their type."""

    elements: int
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of the row."""
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Activation:
    """A tensor of token rows: ``name`` is a probe's, or a module's and its collective's. ``at_most``: by choice."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    at_most: bool = False


def largest_activations(plan: Plan, side: SidePlan) -> dict[str, Activation]:
    """The largest tensor that a rank holds in one forward, over all ranks and forwards, for each part of the model.

    What counts: every probe of kind ``value``; the argument of every collective and the result of every gather, so the
    rows that experts receive, the packed exit and the padded logits as well; and what experts give, a row for each
    dispatched row and choice. What does not: values per key position, which are made in pieces, and what else is made
    and dropped inside one module. A plain subject holds a request's rows, and one expert's at a time.
    """
    largest: dict[str, Activation] = {}
    for activation in (*_probed(plan, side), *_communicated(plan, side), *_summands(plan, side)):
        part = _part(activation.name)
        if part not in largest or activation.bytes > largest[part].bytes:
            largest[part] = activation
    return largest


def _part(name: str) -> str:
    for part, word in (("attention", ".self_attn"), ("MLP, experts", ".mlp"), ("residual stream, norms", "layernorm")):
        if word in name:
            return part
    return "entry, exit, logits"


def _probed(plan: Plan, side: SidePlan) -> Iterator[Activation]:
    for probe, width in row_widths(plan, side).items():
        phases = [phase for dp_rank in range(plan.case.dp) for phase in phases_of_probe(probe, plan, dp_rank)]
        rows = max((n for phase in phases for n in expected_rows(probe, side, plan.config, phase)), default=0)
        yield Activation(probe, (rows, width.elements), rows * width.bytes)


def _communicated(plan: Plan, side: SidePlan) -> Iterator[Activation]:
    for dp_rank, phases in enumerate(plan.phases):
        for number in range(len(phases)):
            for call in expected_collectives(plan, side, dp_rank, number):
                rows = _rows_held(call, side)
                held = (rows, *call.shape[1:])
                yield Activation(f"{call.where} {call.kind}", held, call.bytes // call.shape[0] * rows, call.by_choice)


def _summands(plan: Plan, side: SidePlan) -> Iterator[Activation]:
    """[R * K, D] of R dispatched rows and K choices, in the type of routing weights; all-to-all brings R at most."""
    layers = [layer for layer in range(plan.config.mtp_layers.stop) if plan.config.is_moe_layer(layer)]
    if side.plain or not layers:
        return
    for phases in zip(*plan.phases, strict=True):
        sizes = dispatched_sizes(side, phases)
        rows = (sum(sizes) if is_dispatched(side, plan.case) else max(sizes)) * plan.config.num_experts_per_tok
        shape = (rows, plan.config.hidden_size)
        size = math.prod(shape) * ITEM_BYTES[plan.wide_dtype]
        yield Activation(f"model.layers.{layers[0]}.mlp.experts summands", shape, size, is_by_choice(side, plan.case))


def _rows_held(call: Expected, side: SidePlan) -> int:
    """Those of the argument, or of a gather's result."""
    if call.kind == "all_gather":
        return call.shape[0] * side.tp
    if call.kind == "all_gatherv" and call.sizes is not None:
        return sum(call.sizes)
    return call.shape[0]


def row_widths(plan: Plan, side: SidePlan) -> dict[str, Width]:
    """The row of every probe of kind ``value`` of one side, by the probe's name; the same on every rank."""
    return dict(_Widths(plan, side).all())


class _Widths:
    """D hidden size; what belongs to heads and channels is divided over the ranks."""

    def __init__(self, plan: Plan, side: SidePlan) -> None:
        self.plan, self.side, self.config = plan, side, plan.config
        self.D = plan.config.hidden_size

    def all(self) -> Iterator[tuple[str, Width]]:
        ends = ["embed_tokens.out", "norm.in", "norm.out", "out", *(f"aux.{i}" for i in self.plan.case.aux_layers)]
        yield from ((f"model.{name}", self.of(self.D)) for name in ends)
        yield "lm_head.out", self.of(self.config.vocab_size)
        for layer in range(self.config.mtp_layers.stop):
            values = {**self.attention(), **self.norms(), **self.mlp(layer)}
            if layer in self.config.mtp_layers:
                values |= self.mtp()
            yield from ((f"model.layers.{layer}.{name}", width) for name, width in values.items())

    def of(self, elements: int) -> Width:
        return Width(elements, self.plan.dtype)

    def norms(self) -> dict[str, Width]:
        names = (f"{norm}_layernorm.{side}" for norm in ("input", "post_attention") for side in ("in", "out"))
        return dict.fromkeys(names, self.of(self.D))

    def attention(self) -> dict[str, Width]:
        c, heads = self.config, self.config.num_attention_heads // self.side.tp
        widths = {
            "q_a_layernorm.out": self.of(c.q_lora_rank),
            "kv_a_layernorm.out": self.of(c.kv_lora_rank),
            "k_rope.out": self.of(c.qk_rope_head_dim),
            "q_split.out": self.of(heads * c.qk_nope_head_dim),
            "q_rope.out": self.of(heads * c.qk_rope_head_dim),
            "o_proj.in": self.of(heads * c.v_head_dim),
            "out": self.of(self.D),
        }
        return {f"self_attn.{name}": width for name, width in (widths | self.indexer()).items()}

    def indexer(self) -> dict[str, Width]:
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        if heads is None or width is None:
            return {}
        return {
            "indexer.q_rope.out": self.of(heads * width),
            "indexer.k_rope.out": self.of(width),
            "indexer.k_norm.in": self.of(width),
            "indexer.head_weights.out": Width(heads, self.plan.wide_dtype),
        }

    def mlp(self, layer: int) -> dict[str, Width]:
        c, moe = self.config, self.config.is_moe_layer(layer)
        ranks = mlp_ranks(self.side, moe=moe)
        if not moe:
            return {"mlp.act_fn.out": self.of(c.intermediate_size // ranks), "mlp.out": self.of(self.D)}
        return {
            "mlp.gate.score.out": Width(c.n_routed_experts, self.plan.wide_dtype),
            "mlp.shared_experts.act_fn.out": self.of(c.n_shared_experts * c.moe_intermediate_size // ranks),
            **dict.fromkeys(("mlp.shared_experts.out", "mlp.experts.out", "mlp.out"), self.of(self.D)),
        }

    def mtp(self) -> dict[str, Width]:
        names = ["embed_tokens.out", "enorm.out", "hnorm.out", "eh_proj.out", "out"]
        widths = dict.fromkeys([*names, "shared_head.norm.in", "shared_head.norm.out"], self.of(self.D))
        return widths | {"eh_proj.in": self.of(2 * self.D), "shared_head.head.out": self.of(self.config.vocab_size)}
