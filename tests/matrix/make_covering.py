"""Writes ``covering.json``: a covering array over the axes, of cases that cost as little as they can.

It is pairwise, and of the axes of ``DEEP`` it holds every three values. Greedy: of some candidates, each grown around
values that have not met, the one where most meet for the first time, for its cost, is taken. Deterministic.
Run as ``python -m tests.matrix.make_covering``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import combinations, product
from pathlib import Path

from tests.matrix.axes import AXES, DEEP, Row, Value, completions, world

FILE = Path(__file__).with_name("covering.json")
_CANDIDATES = 12
Meeting = tuple[tuple[str, Value], ...]
"""Values of two or three axes, axes in their order."""


def meeting_axes() -> list[tuple[str, ...]]:
    """The axes whose values must meet: every two, and of a deep group every three."""
    threes = {axes: None for group in DEEP for axes in combinations(group, 3)}
    return [*combinations(AXES, 2), *threes]


_MEETING_AXES = meeting_axes()


def meetings_of(row: Row) -> set[Meeting]:
    """Those that a row, maybe of some axes only, holds."""
    return {tuple((a, row[a]) for a in axes) for axes in _MEETING_AXES if row.keys() >= set(axes)}


def all_meetings() -> list[Meeting]:
    """Every one there is, whether or not a valid row holds it."""
    values = [(axes, product(*(AXES[axis] for axis in axes))) for axes in _MEETING_AXES]
    return [tuple(zip(axes, row, strict=True)) for axes, rows in values for row in rows]


def covering() -> list[Row]:
    """Rows that hold every meeting some valid row holds; cheap worlds first."""
    rng = random.Random(0)
    missing = {meeting: None for meeting in all_meetings() if _possible(dict(meeting))}  # an ordered set
    rows: list[Row] = []
    while missing:
        seeds = rng.choices(list(missing), k=_CANDIDATES)
        candidates = [_grown(dict(seed), missing, rng) for seed in seeds]
        rows.append(max(candidates, key=lambda row: len(meetings_of(row) & missing.keys()) / _cost(row)))
        held = meetings_of(rows[-1])
        missing = {meeting: None for meeting in missing if meeting not in held}
    return sorted(_thinned(rows), key=world)


def _grown(row: Row, missing: dict[Meeting, None], rng: random.Random) -> Row:
    """The row completed axis by axis, each time with the possible value that covers most."""
    for axis in rng.sample(sorted(AXES.keys() - row.keys()), len(AXES) - len(row)):
        choices = [row | {axis: value} for value in AXES[axis] if _possible(row | {axis: value})]
        row = max(choices, key=lambda longer: (len(meetings_of(longer) & missing.keys()) / _cost(longer), rng.random()))
    return row


def _possible(row: Row) -> bool:
    return next(completions(row), None) is not None


def _cost(row: Row) -> int:
    """Ranks, and two more for what a case costs whatever its size; a world not chosen yet counts as its least."""
    return int(row.get("tp", 1)) * int(row.get("dp", 1)) + 2


def _thinned(rows: list[Row]) -> list[Row]:
    """Without the rows, dear ones first, whose meetings are all held by others."""
    held = Counter(meeting for row in rows for meeting in meetings_of(row))
    kept = list(rows)
    for row in sorted(rows, key=_cost, reverse=True):
        if all(held[meeting] > 1 for meeting in meetings_of(row)):
            kept.remove(row)
            held.subtract(meetings_of(row))
    return kept


def read() -> list[Row]:
    """The committed rows."""
    rows: list[Row] = json.loads(FILE.read_text(encoding="utf-8"))
    return rows


def text(rows: list[Row]) -> str:
    """One row a line, so that a difference reads well."""
    lines = (json.dumps({axis: row[axis] for axis in AXES}) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text(covering()), encoding="utf-8")
