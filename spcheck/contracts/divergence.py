"""Ranks that part: the first collective that is not the same on all of them. No torch.

All ranks issue one sequence of collectives, the tool's own exchanges among them, as every group holds all ranks. So the
n-th call of one rank is the n-th call of each, and the first pair that differs is where control flow parted: what
follows is its consequence, on some backends as garbage, on others as an error or a wait without end.
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
    """

    number: int
    before: dict[str, Any] | None
    calls: dict[int, dict[str, Any] | None]


def find_divergence(reports: Sequence[Mapping[str, Any]]) -> Divergence | None:
    """Compares the traces of all ranks; None where no two of them contradict each other."""
    calls = {r["rank"]: {c["number"]: c for c in r["trace"]["collectives"]} for r in reports if "trace" in r}
    finished = {r["rank"] for r in reports if "error" not in r}
    seen = sorted({number for by_number in calls.values() for number in by_number})
    before = None
    for number in seen:
        here = _calls_at(number, calls, finished)
        if len({_identity(call) for call in here.values()}) > 1:
            plain = {rank: None if call is None else dict(call) for rank, call in sorted(here.items())}
            return Divergence(number, before, plain)
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
