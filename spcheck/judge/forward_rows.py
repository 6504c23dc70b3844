"""The rows of a probe in one forward, on all data-parallel ranks, and which of them are wrong. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spcheck.judge.merge import ProbeResult
from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan


@dataclass(frozen=True)
class ForwardRow:
    """One compared row of a forward; ``own`` is its place among those of ``rank``, ``index`` in the packed batch."""

    dp: int
    request: int
    position: int
    index: int
    rank: int
    own: int
    verified: bool = False
    decodes: bool = False
    is_first: bool = False
    is_last: bool = False
    experts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rows:
    """The rows of a probe in a forward, and which of them are wrong."""

    every: tuple[ForwardRow, ...]
    wrong: frozenset[ForwardRow]

    @property
    def right(self) -> list[ForwardRow]:
        """The others."""
        return [row for row in self.every if row not in self.wrong]


def rows_of(plan: Plan, result: ProbeResult) -> Rows | None:
    """All rows of a result's forward; None where it is not known which are wrong."""
    if any(runs is None for runs in result.wrong.values()) or not result.wrong:
        return None
    chosen = {mark["rank"]: mark["experts"] for mark in result.marks if "experts" in mark and _is_of(mark, result)}
    every = tuple(row for dp in range(plan.case.dp) for row in _rows(plan, result, dp, chosen))
    over = {(rank, row) for rank, runs in result.wrong.items() for a, b in runs or () for row in range(a, b + 1)}
    wrong = frozenset(row for row in every if (row.rank, row.own) in over)
    return Rows(every, wrong) if len(wrong) == result.rows_over and len(every) == result.rows else None


def _is_of(mark: dict[str, object], result: ProbeResult) -> bool:
    return (mark["probe"], mark["phase"], mark["call"]) == (result.probe, result.phase, result.call)


def _rows(plan: Plan, result: ProbeResult, dp: int, chosen: dict[int, list[list[int]]]) -> Iterator[ForwardRow]:
    phase = plan.cache_phase(result.probe, dp) if result.phase == "cache" else plan.phase(result.phase, result.call, dp)
    if phase is None:
        return
    unit = {"token": "sample", "logits": "sample", "accepted": "request"}.get(result.kind, "row")
    shards = _shards(plan, phase, unit, dp)
    verified, decoding = _drafted(phase), _decoding(plan, phase, dp)
    starts = dict(zip(phase.requests, phase.starts, strict=True))
    lasts = dict(phase.last_rows)
    for index, (request, position) in enumerate(phase.units(unit)):
        rank, own = shards[index]
        experts = chosen.get(rank, [])
        yield ForwardRow(
            dp, request, position, index, rank, own,
            verified=(request, position) in verified,
            decodes=request in decoding,
            is_first=position == starts[request],
            is_last=position == lasts[request],
            experts=tuple(experts[own]) if own < len(experts) else (),
        )  # fmt: skip


def _shards(plan: Plan, phase: Phase, unit: str, dp: int) -> list[tuple[int, int]]:
    """The rank that compares each row, and the row's place there."""
    tp = plan.case.tp
    if unit != "row":
        return [(dp * tp, own) for own in range(len(phase.units(unit)))]
    return [(dp * tp + rank, own) for rank in range(tp) for own in range(len(phase.owned(rank, tp)))]


def _drafted(phase: Phase) -> set[tuple[int, int]]:
    """Rows of drafted tokens that are verified."""
    drafts = phase.drafts or (0,) * len(phase.requests)
    ends = zip(phase.last_rows, drafts, strict=True)
    return {(request, last - back) for (request, last), n in ends for back in range(n)}


def _decoding(plan: Plan, phase: Phase, dp: int) -> set[int]:
    """Requests that held tokens before this forward."""
    return {request for request, start in zip(phase.requests, phase.starts, strict=True) if start > 0}
