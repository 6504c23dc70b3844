"""Whose value stands in a wrong row: told from sketches of rows, over all ranks and forwards. No torch.

A sketch is the norm of a row and two random sums of its elements. Rows of one value have the same; the sums of a
difference of rows are the differences of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.judge.forward_rows import ForwardRow, Rows
from spcheck.judge.merge import ProbeResult
from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan

Sketch = Sequence[float]

_CLOSE = {"exact": 1e-9, "float64": 1e-9, "float32": 1e-4}
_CANCELS = 1e-6  # of what rows are apart by: what may be left where parts of them only changed places
_CHANCE = 0.02  # of ids that match without a reason: more than that tells nothing
_MOST = 0.5  # of the wrong rows: fewer sources are no pattern


@dataclass(frozen=True)
class _Wrong:
    row: ForwardRow
    sketch: Sketch


def whose_values(plan: Plan, result: ProbeResult, rows: Rows) -> str | None:
    """``each holds the value of the row 9 before it`` and the like; None where nothing is recognised."""
    close = _CLOSE.get(plan.case.numerics)
    sketches = _wrong_sketches(result, rows)
    expected = _expected(result, rows)
    if close is None or not sketches or not expected:
        return None
    if plan.config.vocab_size == 1:  # rows of one token throughout are alike for that reason
        return None
    ids = result.kind in ("token", "set")
    if ids and (len(expected) / plan.config.vocab_size) ** len(sketches) > _CHANCE:
        return _from_before(plan, result, sketches) if _is_rare(plan, len(sketches)) else None
    sources = {x.row: _sources(x.sketch, expected, close) for x in sketches}
    matched = {row: found for row, found in sources.items() if found and row not in found}
    if len(matched) == len(sketches):
        return _pattern(plan, matched) or _example(plan, matched, len(sketches))
    if len(matched) > _MOST * len(sketches) and len(matched) > 1 and not ids:
        return _example(plan, matched, len(sketches))
    return _from_elsewhere(plan, result, sketches, close) or (None if ids else _sums(sketches, expected, close))


def _is_rare(plan: Plan, rows: int) -> bool:
    return (1 / plan.config.vocab_size) ** rows <= _CHANCE


def _wrong_sketches(result: ProbeResult, rows: Rows) -> list[_Wrong]:
    """Of every wrong row; nothing where some are missing."""
    found = []
    for rank, sketches in result.sketches.items():
        mine = sorted((row for row in rows.wrong if row.rank == rank), key=lambda row: row.own)
        found += [_Wrong(row, sketch) for row, sketch in zip(mine, sketches, strict=False)]
    return found if len(found) == len(rows.wrong) else []


def _expected(result: ProbeResult, rows: Rows) -> dict[ForwardRow, Sketch]:
    """What the reference has in all rows of the forward."""
    by_rank = {
        mark["rank"]: mark["sketches"]
        for mark in result.marks
        if "sketches" in mark and (mark["probe"], mark["phase"], mark["call"]) == _key(result)
    }
    known = [(row, by_rank.get(row.rank, [])) for row in rows.every]
    return {row: sketches[row.own] for row, sketches in known if row.own < len(sketches)}


def _key(result: ProbeResult) -> tuple[str, str, int]:
    return result.probe, result.phase, result.call


def _same(x: Sketch, y: Sketch, close: float) -> bool:
    scale = max(abs(x[0]), abs(y[0]))
    return scale > 0 and all(abs(a - b) <= close * scale for a, b in zip(x, y, strict=True))


def _sources(sketch: Sketch, expected: Mapping[ForwardRow, Sketch], close: float) -> list[ForwardRow]:
    return [row for row, other in expected.items() if _same(sketch, other, close)]


_Matched = Mapping[ForwardRow, Sequence[ForwardRow]]


def _pattern(plan: Plan, matched: _Matched) -> str | None:
    """One rule for all wrong rows."""
    if len(matched) < 2:
        return None
    shift = _constant(matched, lambda row, source: source.index - row.index if source.dp == row.dp else None)
    request = _constant(matched, lambda row, source: (source.dp, source.request) if source != row else None)
    requests = {(row.dp, row.request) for row in matched}
    if request is not None and len(requests) == 1 and request not in requests:
        return f"it holds the rows of {_request_text(plan, *request)}"
    if shift is not None:
        shard = _constant(matched, lambda row, source: source.rank - row.rank if source.own == row.own else None)
        ranks = {1: ", that of the next rank's shard", -1: ", that of the previous rank's shard"}.get(shard, "")
        return f"each row holds the value of the row {abs(shift)} {'later' if shift > 0 else 'before'}{ranks}"
    return None


def _constant(matched: _Matched, of: Callable[[ForwardRow, ForwardRow], Any]) -> Any:
    """What is the same for one source at least of every row; None where nothing is."""
    common: set[Any] | None = None
    for row, sources in matched.items():
        values = {of(row, source) for source in sources} - {None}
        common = values if common is None else common & values
    return min(common, default=None) if common else None


def _example(plan: Plan, matched: _Matched, wrong: int) -> str:
    row, sources = min(matched.items(), key=lambda both: (both[0].dp, both[0].index))
    of = "" if len(matched) == wrong else f"{len(matched)} of {wrong} wrong rows hold other rows' values: "
    return f"{of}{_text(plan, row)} holds the value of {_text(plan, sources[0])}"


def _request_text(plan: Plan, dp: int, request: int) -> str:
    return f"{f'DP rank {dp} ' if plan.case.dp > 1 else ''}request {request}"


def _text(plan: Plan, row: ForwardRow) -> str:
    return f"{_request_text(plan, row.dp, row.request)} token {row.position}"


def _from_elsewhere(plan: Plan, result: ProbeResult, sketches: Sequence[_Wrong], close: float) -> str | None:
    """Rows of the same probe in another forward."""
    others = [m for m in result.marks if "sketches" in m and m["probe"] == result.probe and m["call"] != result.call]
    if result.kind in ("token", "set"):
        return _from_before(plan, result, sketches) if _is_rare(plan, len(sketches)) else None
    for mark in others:
        if all(any(_same(x.sketch, other, close) for other in _of_call(others, mark["call"])) for x in sketches):
            return f"holds the value that it had in {plan.forward_name(mark['phase'], mark['call'])}"
    return None


def _of_call(marks: Sequence[Mapping[str, Any]], call: int) -> Iterator[Sketch]:
    return (sketch for mark in marks if mark["call"] == call for sketch in mark["sketches"])


def _from_before(plan: Plan, result: ProbeResult, sketches: Sequence[_Wrong]) -> str | None:
    """Tokens that the forward before gave to other requests."""
    given: dict[tuple[int, int], float] = {}
    for mark in result.marks:
        if "sketches" not in mark or mark["probe"] == result.probe:
            continue
        dp = mark["rank"] // plan.case.tp
        phase = plan.phase(mark["phase"], mark["call"], dp)
        given |= _last_tokens(phase, dp, mark["sketches"]) if phase is not None else {}
    sources = {
        x.row: [key for key, token in given.items() if token == x.sketch[1] and key != (x.row.dp, x.row.request)]
        for x in sketches
    }
    if not sources or not all(sources.values()):
        return None
    row, found = min(sources.items(), key=lambda both: (both[0].dp, both[0].index))
    return f"{_text(plan, row)} holds a token of {_request_text(plan, *found[0])}"


def _last_tokens(phase: Phase, dp: int, sketches: Sequence[Sketch]) -> dict[tuple[int, int], float]:
    """Each request's last sampled token, as a sketch tells it."""
    rows = zip(phase.sampled_rows, sketches, strict=False)
    return {(dp, request): sketch[1] for (request, _), sketch in rows}


def _sums(sketches: Sequence[_Wrong], expected: Mapping[ForwardRow, Sketch], close: float) -> str | None:
    """What is too much in each row is another row's value; or all that is missing somewhere is elsewhere too much."""
    if len(sketches) < 2 or any(x.row not in expected for x in sketches):
        return None
    if shift := _added(sketches, expected, close):
        return f"the row {abs(shift)} {'later' if shift > 0 else 'before'} is added to each"
    apart = [[x.sketch[i] - expected[x.row][i] for x in sketches] for i in (1, 2)]
    # Against what the rows are apart by, not against their size: small differences would cancel in any sum.
    if all(abs(math.fsum(gaps)) <= _CANCELS * math.fsum(map(abs, gaps)) for gaps in apart):
        return "their sum is right: parts of rows went to other rows?"
    return None


def _added(sketches: Sequence[_Wrong], expected: Mapping[ForwardRow, Sketch], close: float) -> int | None:
    """The distance of the rows that are added to the wrong ones, in the batch; the first may have wrapped around."""
    by_index = {(row.dp, row.index): sketch for row, sketch in expected.items()}
    votes: dict[int, int] = {}
    for x in sketches:
        gap = [a - b for a, b in zip(x.sketch[1:], expected[x.row][1:], strict=True)]
        for (dp, index), other in by_index.items():
            fits = all(abs(g - o) <= close * max(other[0], x.sketch[0]) for g, o in zip(gap, other[1:], strict=True))
            if dp == x.row.dp and index != x.row.index and fits and other[0] > 0:
                votes[index - x.row.index] = votes.get(index - x.row.index, 0) + 1
    shift = max(votes, key=lambda d: votes[d], default=None)
    return shift if shift is not None and votes[shift] > _MOST * len(sketches) else None
