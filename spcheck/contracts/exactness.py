"""Whether exact arithmetic was exact in this run: the guard's products, operands off the grid, silent snaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.exact import LIMIT, Grid
from spcheck.guard import Product, merge_norms, products
from spcheck.plan import Plan

Reports = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Exactness:
    """The guard's result: each doubt is a sentence, and any of them keeps a run from passing.

    ``tightest`` is the product that had the least room.
    """

    grid: str
    products: int
    tightest: Product | None
    doubts: tuple[str, ...]

    @property
    def overfull(self) -> bool:
        """Whether a product needs more bits than there are, and a coarser grid would need fewer."""
        return self.tightest is not None and not self.tightest.exact and math.isfinite(self.tightest.bits)


def check_exactness(plan: Plan, reports: Reports) -> Exactness | None:
    """The guard on what the ranks measured; None where nothing is rounded, or where the run did not come to its end."""
    norms = [r.get("reference", {}).get("norms") for r in reports[: plan.reference_world]]
    weights = [r.get("weight_norms") for r in reports]
    if plan.grid is None or not all(norms) or not all(w is not None for w in weights):
        return None
    merged = merge_norms([n for n in norms if n]) | merge_norms([w for w in weights if w])
    longest = max(plan.case.requests) + max(plan.case.mtp_steps - 1, 0)
    made = products(plan.config, plan.grid, merged, longest)
    doubts = [_doubt(p, plan.grid) for p in made if not p.exact]
    tightest = max(made, key=lambda p: p.bits)
    return Exactness(plan.grid.name, len(made), tightest, (*doubts, *dict.fromkeys(_operands(plan, reports))))


def _doubt(product: Product, grid: Grid) -> str:
    if not math.isfinite(product.bits):
        return f"{product.name} could not be bounded"
    return f"{product.name} needs up to {product.bits:.1f} bits on grid {grid.name}, and a float64 holds {LIMIT}"


def _operands(plan: Plan, reports: Reports) -> Iterator[str]:
    for report in reports:
        for side in ("reference", "candidate"):
            log = report.get(side, {})
            if log.get("off_grid"):
                yield f"{side}: {log['off_grid']} is off the grid {plan.grid and plan.grid.name}"
            for name in log.get("not_rounded", ()):
                yield f"{side}: {name} never passed its rounding"
