"""Writes ``covering.json``: a pairwise covering array over the axes, of cases that cost as little as they can.

Greedy: of some candidates, each grown around a pair that is still missing, the one that covers most missing pairs for
its cost is taken. Deterministic. Run as ``python -m tests.matrix.make_covering``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import combinations
from pathlib import Path

from tests.matrix.axes import AXES, Row, Value, completions, world

FILE = Path(__file__).with_name("covering.json")
_CANDIDATES = 12
Pair = tuple[tuple[str, Value], tuple[str, Value]]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of values that a row holds, axes in their order."""
    return set(combinations(((axis, row[axis]) for axis in AXES if axis in row), 2))


def all_pairs() -> list[Pair]:
    """Every pair of values of two axes, whether or not a valid row holds it."""
    return [((a, x), (b, y)) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]]


def covering() -> list[Row]:
    """Rows that hold every pair some valid row holds; cheap worlds first."""
    rng = random.Random(0)
    missing = {pair: None for pair in all_pairs() if _possible(dict(pair))}  # an ordered set
    rows: list[Row] = []
    while missing:
        seeds = rng.choices(list(missing), k=_CANDIDATES)
        candidates = [_grown(dict(seed), missing, rng) for seed in seeds]
        rows.append(max(candidates, key=lambda row: len(pairs_of(row) & missing.keys()) / _cost(row)))
        missing = {pair: None for pair in missing if pair not in pairs_of(rows[-1])}
    return sorted(_thinned(rows), key=world)


def _grown(row: Row, missing: dict[Pair, None], rng: random.Random) -> Row:
    """The row completed axis by axis, each time with the possible value that covers most."""
    for axis in rng.sample(sorted(AXES.keys() - row.keys()), len(AXES) - len(row)):
        choices = [row | {axis: value} for value in AXES[axis] if _possible(row | {axis: value})]
        row = max(choices, key=lambda longer: (len(pairs_of(longer) & missing.keys()) / _cost(longer), rng.random()))
    return row


def _possible(row: Row) -> bool:
    return next(completions(row), None) is not None


def _cost(row: Row) -> int:
    """Ranks, and two more for what a case costs whatever its size; a world not chosen yet counts as its least."""
    return int(row.get("tp", 1)) * int(row.get("dp", 1)) + 2


def _thinned(rows: list[Row]) -> list[Row]:
    """Without the rows, dear ones first, whose pairs are all held by others."""
    held = Counter(pair for row in rows for pair in pairs_of(row))
    kept = list(rows)
    for row in sorted(rows, key=_cost, reverse=True):
        if all(held[pair] > 1 for pair in pairs_of(row)):
            kept.remove(row)
            held.subtract(pairs_of(row))
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
