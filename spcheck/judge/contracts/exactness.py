"""Whether exact arithmetic was exact in this run: the guard's products, operands off the grid, silent snaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.families.deepseek.guard import ROUTED, Product, largest_norms, merge_norms, products
from spcheck.families.deepseek.rows import phases_of_probe
from spcheck.plan.grid import LIMIT, Grid
from spcheck.plan.plan import Plan

Reports = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Exactness:
    """The guard's result: each doubt is a sentence, and any of them keeps a run from passing.

    ``tightest`` is the product that had the least room. ``doubts`` are about the arithmetic, and excuse a small
    difference; ``other_doubts`` keep a run from passing and excuse nothing: a candidate's operand off the grid, weights
    of which rounding leaves nothing.
    """

    grid: str
    products: int
    tightest: Product | None
    doubts: tuple[str, ...]
    other_doubts: tuple[str, ...] = ()

    @property
    def all_doubts(self) -> tuple[str, ...]:
        """Of both kinds."""
        return (*self.doubts, *self.other_doubts)

    @property
    def overfull(self) -> bool:
        """Whether a product needs more bits than there are, and a coarser grid would need fewer."""
        return self.tightest is not None and not self.tightest.exact and math.isfinite(self.tightest.bits)


def check_exactness(plan: Plan, reports: Reports) -> Exactness | None:
    """The guard on what the ranks measured; None where nothing is rounded, or where the run did not come to its end."""
    norms = norms_by_dp_rank(plan, reports)
    weights = [r.get("weight_norms") for r in reports]
    if plan.grid is None or not reports or norms is None or not all(w is not None for w in weights):
        return None
    rounded = reference_norms(plan, reports, norms)
    merged = rounded | merge_norms([w for w in weights if w])
    made = products(plan.config, plan.grid, merged, _keys(plan))
    doubts = [_doubt(p, plan.grid) for p in made if not p.exact]
    doubts += dict.fromkeys(_operands("reference", reports, plan.grid))
    vacuous = [*_vacuous(reports, plan.grid), *(f"{name} is all zero after rounding" for name in _zeros(rounded))]
    strayed = dict.fromkeys(_operands("candidate", reports, plan.grid))
    tightest = max(made, key=lambda p: p.bits)
    return Exactness(plan.grid.name, len(made), tightest, tuple(doubts), (*vacuous, *strayed))


def _keys(plan: Plan) -> dict[int, int]:
    """The largest number of keys of a query in each layer."""
    phases = {
        layer: [phase for d in range(plan.case.dp) for phase in phases_of_probe(f"model.layers.{layer}", plan, d)]
        for layer in range(plan.config.mtp_layers.stop)
    }
    return {layer: max((phase.keys for phase in found), default=0) for layer, found in phases.items()}


def reference_norms(plan: Plan, reports: Reports, by_dp_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest norm of every value that the reference rounded, over the whole world."""
    return largest_norms(by_dp_rank) | _routed_norms(plan, reports)


def norms_by_dp_rank(plan: Plan, reports: Reports) -> list[dict[str, float]] | None:
    """What each data-parallel rank's reference measured, over its ranks; None where one of them says nothing."""
    busy = [d for d in range(plan.case.dp) if plan.prompts(d)]
    ran = [r for r in reports if plan.place(r["rank"]).tp_rank < plan.reference.tp]
    norms = [(plan.place(r["rank"]).dp_rank, r.get("reference", {}).get("norms")) for r in ran]
    logs = [[mine for dp_rank, mine in norms if dp_rank == d] for d in busy]
    if not all(norms for log in logs for norms in log) or not all(logs):
        return None
    return [merge_norms([norms for norms in log if norms]) for log in logs]


def _routed_norms(plan: Plan, reports: Reports) -> dict[str, float]:
    """Experts of a reference that dispatches compute rows of all data-parallel ranks, on idle ones too.

    Whole experts have whole values; of experts in channels every rank of the world has a part.
    """
    if plan.reference.plain:
        return {}
    logs = [r.get("reference", {}).get("norms") or {} for r in reports]
    routed = [{name: norm for name, norm in log.items() if name.endswith(ROUTED)} for log in logs]
    return largest_norms(routed) if plan.case.expert_parallel else merge_norms(routed)


def _doubt(product: Product, grid: Grid) -> str:
    if not math.isfinite(product.bits):
        return f"{product.name} could not be bounded"
    return f"{product.name} needs up to {product.bits:.1f} bits on grid {grid.name}, and a float64 holds {LIMIT}"


def _operands(side: str, reports: Reports, grid: Grid) -> Iterator[str]:
    for log in (report.get(side, {}) for report in reports):
        if log.get("off_grid"):
            yield f"{side}: {log['off_grid']} is off the grid {grid.name}"
        for name in log.get("not_rounded", ()):
            yield f"{side}: {name} never passed its rounding"


def _vacuous(reports: Reports, grid: Grid) -> list[str]:
    """The worst of the weights of which rounding leaves little."""
    lost = {name: part for report in reports for name, part in report.get("lost_weights", {}).items()}
    if not lost:
        return []
    worst = max(lost, key=lambda name: lost[name])
    more = f", and {len(lost) - 1} more weights" if len(lost) > 1 else ""
    return [f"grid {grid.name} takes {lost[worst]:.0%} of {worst}{more}: what they do was not tested"]


def _zeros(norms: Mapping[str, float]) -> list[str]:
    """Activations of the reference that were rounded to nothing everywhere."""
    return sorted(name for name, norm in norms.items() if norm == 0.0)
