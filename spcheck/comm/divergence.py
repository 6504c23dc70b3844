"""Ranks that part: the first collective that is not the same on all of them. No torch.

The ranks of a data-parallel rank issue one sequence of collectives, the tool's own exchanges among them. So the n-th
call of one is the n-th call of each, and the first pair that differs is where control flow parted: what follows is its
consequence, on some backends as garbage, on others as an error or a wait without end. Between data-parallel ranks that
holds for the calls that join them: their tensor-parallel groups do as many as they have requests, in a plain subject.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]

_ROWS_DIFFER = ("all_gatherv", "reduce_scatterv", "all_to_all")  # ranks may hold different numbers of rows there


@dataclass(frozen=True)
class Divergence:
    """Collective ``number`` (from 0, of a whole run) is not the same on all ranks.

    ``before`` is the last one that was, None where the trace does not reach back that far. ``calls`` has what each rank
    called instead, None for a rank that ended without another call; ranks that did not get there are not in it.
    ``across``: only calls that join data-parallel ranks are counted.
    """

    number: int
    before: dict[str, Any] | None
    calls: dict[int, dict[str, Any] | None]
    across: bool = False


def find_divergence(reports: Sequence[Mapping[str, Any]], tp: int | None = None) -> Divergence | None:
    """Compares the traces of all ranks, ``tp`` of them in a data-parallel rank; None where none contradict each other.

    What parts ranks of one data-parallel rank comes before what parts these.
    """
    width = tp or len(reports)
    by_dp_rank = [reports[at : at + width] for at in range(0, len(reports), width)]
    found = [d for d in (_first_apart(group, "number") for group in by_dp_rank) if d]
    return min(found, key=lambda d: d.number, default=None) or _across(by_dp_rank)


def _across(by_dp_rank: Sequence[Sequence[Mapping[str, Any]]]) -> Divergence | None:
    if len(by_dp_rank) == 1:
        return None
    return _first_apart([report for group in by_dp_rank for report in group], "across")


def _first_apart(reports: Sequence[Mapping[str, Any]], count: str) -> Divergence | None:
    """``count`` is the field of a call by which those that belong together are found."""
    calls: dict[int, dict[int, Entry]] = {}
    for report in (r for r in reports if "trace" in r):
        counted = [c for c in report["trace"]["collectives"] if c[count] is not None]
        calls[report["rank"]] = {c[count]: c for c in counted}
    finished = {r["rank"] for r in reports if "error" not in r}
    seen = sorted({number for by_number in calls.values() for number in by_number})
    before = None
    for number in seen:
        here = _calls_at(number, calls, finished)
        if len({_identity(call) for call in here.values()}) > 1:
            plain = {rank: None if call is None else dict(call) for rank, call in sorted(here.items())}
            return Divergence(number, before, plain, across=count == "across")
        before = next((dict(call) for call in here.values() if call is not None), None)
    return None


def _calls_at(number: int, calls: Mapping[int, Mapping[int, Entry]], finished: set[int]) -> dict[int, Entry | None]:
    """What each rank called there; a rank that finished with fewer calls than that called nothing."""
    here: dict[int, Entry | None] = {}
    for rank, by_number in calls.items():
        if number in by_number:
            here[rank] = by_number[number]
        elif rank in finished and number > max(by_number, default=-1):
            here[rank] = None
    return here


def _identity(call: Entry | None) -> tuple[object, ...]:
    """What must be the same on all ranks; the module too, since a skipped call is followed by one of the same kind."""
    if call is None:
        return ()
    shape = tuple(call["shape"])
    if call["kind"] in _ROWS_DIFFER:
        shape = shape[1:]
    return call["subject"], call["step"], call["kind"], call["group"], shape, call["dtype"], call["module"]
