"""Why a probe may be wrong, where its numbers tell. Every hint is a guess and ends with a question mark."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spcheck.guard import ROUTED
from spcheck.merge import ProbeResult
from spcheck.phases import Phase
from spcheck.subject import STEERING


def hints(result: ProbeResult, tp: int, phase: Phase | None, dp: int = 1) -> list[str]:
    """Guesses at the cause, the most telling first."""
    return list(_hints(result, tp, phase, dp))


def _hints(result: ProbeResult, tp: int, phase: Phase | None, dp: int) -> Iterator[str]:
    if result.note:
        yield result.note
    if result.replica is not None:
        rank = result.replica["rank"]
        yield f"the replicas on rank {rank - rank % tp} and rank {rank} differ"
    if result.ratio is not None and tp * dp > 1:
        yield f"{result.ratio:.3g} x the reference: {_scaling(result.ratio, [tp, dp, tp * dp])}?"
    if result.max_rel == math.inf and not result.note:
        yield _why_infinite(result)
    if len(result.ranks_over) == 1 and tp > 1 and result.rows > result.rows_over > 1:
        yield f"only on rank {result.ranks_over[0]}"
    per_row = result.kind not in ("logits", *STEERING)  # else there is one of each request's last row
    if phase is not None and per_row and result.rows_over == 1 and result.first is not None and phase.real > 1:
        request, position = phase.row(phase.real - 1)
        if (result.first["request"], result.first["position"]) == (request, position):
            yield "only the last row: trimming or padding?"


def _scaling(ratio: float, groups: list[int]) -> str:
    """``groups`` are the sizes of groups over which sums are taken."""
    for size in (size for size in groups if size > 1):
        if abs(ratio - size) < 0.05 * size:
            return f"summed {size} times"
        if abs(ratio - 1 / size) < 0.05 / size:
            return f"not summed over the {size} ranks"
    return "scaled"


def _why_infinite(result: ProbeResult) -> str:
    worst = result.worst or {}
    if result.probe.endswith(ROUTED):
        return "a (token, expert) pair that no rank computed, or a rank with other experts: expert placement?"
    if -math.inf in (worst.get("expected"), worst.get("actual")):
        return "allowed on one side and forbidden on the other: a mask?"
    if result.reference_nan:
        return "not a number in the reference either: look at the weights"
    return "not finite, or something where the reference is zero: a padded row that leaks?"
