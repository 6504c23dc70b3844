"""Why a probe may be wrong, where its numbers tell. Every guess at a cause ends with a question mark. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spcheck.families.deepseek.guard import ROUTED
from spcheck.judge.clues import clue_texts
from spcheck.judge.forward_rows import rows_of
from spcheck.judge.matching import whose_values
from spcheck.judge.merge import ProbeResult
from spcheck.judge.separation import separation
from spcheck.plan.plan import Plan

_CLOSE = 1e-3
_ZERO = 1e-9
_ROUGH = 0.05  # a factor that is further from 1 is told with three digits


def hints(result: ProbeResult, plan: Plan) -> list[str]:
    """What is known of the wrong rows, and guesses at the cause, the most telling first."""
    return list(_hints(result, plan))


def _hints(result: ProbeResult, plan: Plan) -> Iterator[str]:
    if result.note:
        yield result.note
    if result.replica is not None:
        yield _replicas(result, plan)
    yield from _miscounts(result)
    if result.ratio is not None and abs(result.ratio) > _ZERO:
        yield f"{_number(result.ratio)} x the reference: {_scaling(result.ratio, plan)}?"
    clues = clue_texts(plan, result) if not result.miscounts else []
    yield from clues
    if result.max_rel == math.inf and not result.note and not clues and not result.miscounts:
        yield _why_infinite(result)
    if result.choices is not None and result.choices.flip_margin == 0.0 and not clues:
        yield "equal scores chosen in another order: the order of ties?"
    yield from _by_row(result, plan, clues)


def _by_row(result: ProbeResult, plan: Plan, clues: list[str]) -> Iterator[str]:
    """Whose values stand in the wrong rows, and what tells these from the right ones."""
    rows = rows_of(plan, result)
    if rows is None:
        return
    whose = whose_values(plan, result, rows) if not any("zero" in clue for clue in clues) else None
    if whose:
        yield whose
    said = bool(clues or whose or result.ratio is not None or result.miscounts)
    if separated := separation(plan, result, rows, thresholds=not said):
        yield separated


def _replicas(result: ProbeResult, plan: Plan) -> str:
    replica = result.replica or {}
    rank, tp = replica["rank"], plan.case.tp
    told = f"the replicas on rank {rank - rank % tp} and rank {rank} differ"
    if "source" not in replica:
        return told
    request, position = replica["source"]
    return f"{told}: rank {rank} holds the value of request {request} token {position}"


def _miscounts(result: ProbeResult) -> Iterator[str]:
    for rank, (rows, choices) in sorted(result.miscounts.items()):
        less = "too few" if rows < choices else "more than the tokens' choices"
        yield f"rank {rank}'s experts computed {rows} rows for {choices} choices, {less}"
        return


def _number(ratio: float) -> str:
    return f"{ratio:.3g}" if abs(ratio - 1) > _ROUGH else f"{ratio:.10g}"


def _scaling(ratio: float, plan: Plan) -> str:
    """What the factor may be: sums over groups of ranks, or a number of the config."""
    tp, dp = plan.case.tp, plan.case.dp
    for size in (size for size in (tp, dp, tp * dp) if size > 1):
        if math.isclose(ratio, size, rel_tol=_CLOSE):
            return f"summed {size} times"
        if math.isclose(ratio, 1 / size, rel_tol=_CLOSE):
            return f"not summed over the {size} ranks"
    if math.isclose(ratio, 2, rel_tol=_CLOSE):
        return "summed 2 times"
    routed = plan.config.routed_scaling_factor
    if routed != 1 and (math.isclose(ratio, routed, rel_tol=_CLOSE) or math.isclose(ratio * routed, 1, rel_tol=_CLOSE)):
        return "routed_scaling_factor"
    return "scaled"


def _why_infinite(result: ProbeResult) -> str:
    worst = result.worst or {}
    if result.probe.endswith(ROUTED):
        return "a (token, expert) pair that no rank computed, or a rank with other experts: expert placement?"
    if result.kind in ("scores", "logits", "keys") and -math.inf in (worst.get("expected"), worst.get("actual")):
        return "allowed on one side and forbidden on the other: a mask?"
    if result.reference_nan:
        return "not a number in the reference either: look at the weights"
    return "not finite, or something where the reference is zero"
