"""Exact arithmetic in float64: where values are rounded to a binary grid, and to which. No torch.

``snap(x, g) = round_half_even(x * 2^g) / 2^g``. A value is snapped when it is complete, and non-linear or about to be
multiplied by another activation. Sums of products of snapped values are then exact integers in a common unit as long as
they fit into the 53 bits of a float64, so no order of summation, no sharding and no algebraic form can change them
(docs/numerics.md). Never snapped: a partial sum, and the output of kv_b_proj, which the absorbed form does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reference.config import ModelConfig
from spcheck.plan.grid import Grid

STEP_BOUND = 2.0**-48
"""Largest error of a non-linear step before its snap, relative to the largest element: a few roundings of one step."""

SHORT_SUM = 256
"""Terms up to which a sum inside a step is within the bound; the error of a longer one grows with its terms."""


@dataclass(frozen=True)
class Point:
    """A module at which a value is snapped: elements ``indices`` of its output, or of its positional arguments.

    ``part`` is the field of :class:`Grid`. ``linear`` says that the value is an exact sum already before the snap,
    ``sums`` that each element rests on a sum over the whole last axis: of squares, or of exponentials.
    """

    module: str
    part: str
    side: str = "out"
    indices: tuple[int, ...] = (0,)
    linear: bool = False
    sums: bool = False

    @property
    def probe(self) -> str:
        """The name of the probe that shows the value before the snap."""
        return f"{self.module}.{self.side}"

    def bits(self, grid: Grid) -> int:
        """Bits behind the binary point on ``grid``."""
        bits: int = getattr(grid, self.part)
        return bits

    def at(self, prefix: str) -> Point:
        """The same point of one layer."""
        return replace(self, module=f"{prefix}.{self.module}")


# Of modules below a layer. A fused norm returns (normed, residual): only its first output is snapped.
_EVERY_LAYER = (
    Point("input_layernorm", "activation", sums=True),
    Point("post_attention_layernorm", "activation", sums=True),
    Point("self_attn.q_a_layernorm", "activation", sums=True),
    Point("self_attn.kv_a_layernorm", "activation", sums=True),
    Point("self_attn.q_split", "activation", linear=True),
    Point("self_attn.q_rope", "activation"),
    Point("self_attn.k_rope", "activation"),
    Point("self_attn.softmax", "probability", sums=True),
    Point("self_attn.o_proj", "activation", side="in", linear=True),
)
_INDEXER = (
    Point("self_attn.indexer.q_rope", "index"),
    Point("self_attn.indexer.k_rope", "index"),
    Point("self_attn.indexer.head_weights", "head_weight"),
)
_DENSE = (Point("mlp.act_fn", "activation"),)
_MOE = (
    Point("mlp.gate.score", "probability"),
    Point("mlp.gate.weigh", "routing"),
    Point("mlp.experts.act_fn", "activation"),
    Point("mlp.shared_experts.act_fn", "activation"),
)
_MTP = (Point("shared_head.norm", "activation", sums=True),)
_APART = (Point("enorm", "activation", sums=True), Point("hnorm", "activation", sums=True))
_FUSED = (Point("fused_eh_norm", "activation", indices=(0, 1)),)
_FINAL_NORM = Point("model.norm", "activation", sums=True)

_BY_PROBE = {p.probe: p for p in (*_EVERY_LAYER, *_INDEXER, *_DENSE, *_MOE, *_MTP, *_APART)}


def points(config: ModelConfig, *, fused_eh_norm: bool) -> list[Point]:
    """Every point of a model; ``fused_eh_norm``: a subject runs one module in the place of enorm and hnorm."""
    return [_FINAL_NORM, *_layer_points(config, _FUSED if fused_eh_norm else _APART)]


def point_of(probe: str) -> Point | None:
    """The point whose value before the snap a probe shows; None for a probe that shows an exact or a snapped value."""
    if probe == _FINAL_NORM.probe:
        return _FINAL_NORM
    return _BY_PROBE.get(probe.split(".", 3)[-1]) if probe.startswith("model.layers.") else None


def exact_bound(probe: str) -> float:
    """The largest error a correct candidate can have at a probe, before any snap."""
    point = point_of(probe)
    return 0.0 if point is None or point.linear else STEP_BOUND


def _layer_points(config: ModelConfig, eh_norm: tuple[Point, ...]) -> Iterator[Point]:
    for layer in range(config.mtp_layers.stop):
        parts = [*_EVERY_LAYER, *(_MOE if config.is_moe_layer(layer) else _DENSE)]
        parts += _INDEXER if config.has_indexer else ()
        parts += [*_MTP, *eh_norm] if layer in config.mtp_layers else []
        yield from (point.at(f"model.layers.{layer}") for point in parts)
