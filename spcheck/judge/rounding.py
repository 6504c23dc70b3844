"""Which differences a correct candidate could show for rounding alone, and which none could. No torch."""

from __future__ import annotations

import math

from spcheck.families.deepseek.bounds import widest_rounding
from spcheck.judge.merge import ProbeResult
from spcheck.plan.plan import Plan
from spcheck.subjects.protocol import CHOICES

_MANY = 4  # rows: one or two may be wrong by half in bfloat16, most of many are not


def beyond_rounding(result: ProbeResult) -> bool:
    """Ranks that disagree, another shape, a candidate that is not finite or mostly wrong by half: never rounding."""
    gross = sum(rows for exponent, rows in result.histogram.items() if exponent >= 0)  # wrong by half and more
    most = result.kind not in CHOICES and 2 * gross > result.rows >= _MANY
    return result.replica is not None or (math.isinf(result.max_rel) and not result.reference_nan) or most


def may_be_rounding(plan: Plan, result: ProbeResult, *, exact: bool) -> bool:
    """Whether a correct candidate could differ like this in the working type; ``exact``: exactness is guaranteed."""
    if plan.case.numerics == "exact":
        # Without the guarantee the run is a plain float64 run.
        return not exact and result.kind not in CHOICES and result.max_rel <= widest_rounding("float64", 1)
    if result.kind in CHOICES:
        # A near tie: below float64 it was replayed, and is no difference at all.
        return result.choices is not None and not result.choices.beyond
    return result.max_rel <= _widest(plan)


def is_definite(plan: Plan, result: ProbeResult) -> bool:
    """Whether a difference is to be named before values that rounding may explain: a choice is, whatever its margin."""
    return result.kind in CHOICES or beyond_rounding(result) or result.max_rel > _widest(plan)


def rounding_reason(plan: Plan) -> str:
    """What to add to the sentence of a difference that may be rounding."""
    numerics, layers = plan.case.numerics, _layers(plan)
    depth = f" in {layers} layers" if numerics == "float32" else ""
    tells = "see the guard" if numerics == "exact" else "--numerics exact tells"
    return f"; a rounding difference may explain it{depth}, {tells}"


def _widest(plan: Plan) -> float:
    return widest_rounding(plan.case.numerics, _layers(plan))


def _layers(plan: Plan) -> int:
    """Layers that a value passes at most: each draft step takes the hidden states before it through one more."""
    return plan.config.num_hidden_layers + plan.case.mtp_steps
