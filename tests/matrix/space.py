"""A space of cases: axes, which of their values may meet, and the covering array over them.

The array is pairwise, and of the axes of a deep group it holds every three values. Greedy: of some candidates, each
grown around values that have not met, the one where most meet for the first time, for its cost, is taken.
Deterministic.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

Value = int | str | bool
Row = dict[str, Value]
Meeting = tuple[tuple[str, Value], ...]
"""Values of two or three axes, axes in their order."""
_CANDIDATES = 12


class Rule(NamedTuple):
    """What a row must hold, told from the axes it reads alone."""

    axes: tuple[str, ...]
    holds: Callable[[Row], bool]


@dataclass(frozen=True, eq=False)
class Space:
    """``name`` is that of the file with the array. Of each group of axes in ``deep`` the values meet in threes.

    ``cost`` tells how dear the case of a row is; an axis that is not chosen yet counts as its cheapest value.
    ``case_of`` gives the fields of the case that a valid row stands for.
    """

    name: str
    axes: dict[str, tuple[Value, ...]]
    rules: tuple[Rule, ...]
    deep: tuple[tuple[str, ...], ...]
    cost: Callable[[Row], int]
    case_of: Callable[[Row], dict[str, Any]]

    @property
    def file(self) -> Path:
        """Where the array is kept."""
        return Path(__file__).with_name(f"{self.name}.json")

    def read(self) -> list[Row]:
        """The committed rows."""
        rows: list[Row] = json.loads(self.file.read_text(encoding="utf-8"))
        return rows

    def text(self, rows: list[Row]) -> str:
        """One row a line, so that a difference reads well."""
        lines = (json.dumps({axis: row[axis] for axis in self.axes}) for row in rows)
        return "[\n" + ",\n".join(lines) + "\n]\n"

    def is_valid(self, row: Row) -> bool:
        """Whether a full row is a case that can exist and in which every value means something."""
        return all(rule.holds(row) for rule in self.rules)

    def completions(self, fixed: Row) -> Iterator[Row]:
        """Every valid row that holds ``fixed``, depth first: a rule broken by the values so far stays broken."""
        if not all(rule.holds(fixed) for rule, axes in self._readable if axes <= fixed.keys()):
            return
        axis = next((name for name in self.axes if name not in fixed), None)
        if axis is None:
            yield fixed
            return
        for value in self.axes[axis]:
            yield from self.completions({**fixed, axis: value})

    @cached_property
    def _readable(self) -> list[tuple[Rule, frozenset[str]]]:
        return [(rule, frozenset(rule.axes)) for rule in self.rules]

    @cached_property
    def _meeting_axes(self) -> dict[tuple[str, ...], frozenset[str]]:
        threes = [axes for group in self.deep for axes in combinations(group, 3)]
        return {axes: frozenset(axes) for axes in (*combinations(self.axes, 2), *threes)}

    def _meetings_of(self, row: Row) -> set[Meeting]:
        """Those that a row, maybe of some axes only, holds."""
        held = [axes for axes, names in self._meeting_axes.items() if names <= row.keys()]
        return {tuple([(axis, row[axis]) for axis in axes]) for axes in held}

    def _all_meetings(self) -> list[Meeting]:
        """Every one there is, whether or not a valid row holds it."""
        values = [(axes, product(*(self.axes[axis] for axis in axes))) for axes in self._meeting_axes]
        return [tuple(zip(axes, row, strict=True)) for axes, rows in values for row in rows]

    def covering(self) -> list[Row]:
        """Rows that hold every meeting some valid row holds; cheap ones first."""
        rng = random.Random(0)
        missing = {meeting: None for meeting in self._all_meetings() if self._possible(dict(meeting))}  # an ordered set
        rows: list[Row] = []
        while missing:
            seeds = rng.choices(list(missing), k=_CANDIDATES)
            candidates = [self._grown(dict(seed), missing, rng) for seed in seeds]
            rows.append(max(candidates, key=lambda row: self._gain(row, missing)))
            held = self._meetings_of(rows[-1])
            missing = {meeting: None for meeting in missing if meeting not in held}
        return sorted(self._thinned(rows), key=self.cost)

    def _grown(self, row: Row, missing: dict[Meeting, None], rng: random.Random) -> Row:
        """The row completed axis by axis, each time with the possible value that covers most."""
        for axis in rng.sample(sorted(self.axes.keys() - row.keys()), len(self.axes) - len(row)):
            choices = [row | {axis: v} for v in self.axes[axis] if self._possible(row | {axis: v})]
            row = max(choices, key=lambda longer: (self._gain(longer, missing), rng.random()))
        return row

    def _possible(self, row: Row) -> bool:
        return next(self.completions(row), None) is not None

    def _gain(self, row: Row, missing: dict[Meeting, None]) -> float:
        """Meetings that the row is the first to hold, for its cost."""
        return len(self._meetings_of(row) & missing.keys()) / self.cost(row)

    def _thinned(self, rows: list[Row]) -> list[Row]:
        """Without the rows, dear ones first, whose meetings are all held by others."""
        held = Counter(meeting for row in rows for meeting in self._meetings_of(row))
        kept = list(rows)
        for row in sorted(rows, key=self.cost, reverse=True):
            if all(held[meeting] > 1 for meeting in self._meetings_of(row)):
                kept.remove(row)
                held.subtract(self._meetings_of(row))
        return kept
