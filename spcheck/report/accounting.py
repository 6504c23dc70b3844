"""What a dataflow costs, side by side with the reference: what ``--collectives`` adds to the report, and its JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from spcheck.judge.contracts.accounting import Forward, SideAccount, Traffic
from spcheck.plan.plan import Plan

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_NUMBERED = re.compile(r"(layer|draft step) (\d+)(.*)")


def accounting_lines(plan: Plan, sides: Mapping[str, SideAccount]) -> Iterator[str]:
    """A table for each side, of the case's own step on its fullest data-parallel rank; then both sides' totals."""
    yield ""
    yield "collectives of one rank and the bytes of their arguments (of layers: of each)"
    for side in sides.values():
        yield ""
        yield from _side(plan, side)
    yield ""
    yield from _totals(sides["reference"], sides["candidate"])


def accounting_json(sides: Mapping[str, SideAccount]) -> dict[str, Any]:
    """Everything in bytes, of all forwards on all data-parallel ranks."""
    return {subject: _document(side) for subject, side in sides.items()}


def _document(side: SideAccount) -> dict[str, Any]:
    largest = asdict(side.largest_activation)
    return {**asdict(side), "parameter_bytes": side.parameter_bytes, "largest_activation": largest}


def _side(plan: Plan, side: SideAccount) -> Iterator[str]:
    yield _row(f"{side.name}, rank {side.dp_rank * plan.case.tp}", "collective", "group", "calls", "expected", "seen")
    steps = [f for f in side.forwards if f.dp_rank == side.dp_rank and f.step == plan.own_step]
    for title, rows in _merged(steps):
        for row in rows:
            size = _at_most(_size(row.bytes), row.at_most)
            seen = "-" if row.seen_bytes is None else _size(row.seen_bytes)
            yield _row(title, row.kind, row.group, str(row.count), size, seen)
            title = ""


def _row(place: str, kind: str, group: str, count: str, size: str, seen: str) -> str:
    return f"{place:<28} {kind:<15} {group:<6} {count:>5} {size:>12} {seen:>9}"


def _merged(forwards: Sequence[Forward]) -> list[tuple[str, list[Traffic]]]:
    """Places by title; layers, or draft steps, that follow each other with the same figures are one."""
    places = [(name, list(rows)) for f in forwards for name, rows in groupby(f.traffic, key=lambda row: row.place)]
    merged = []
    for _, alike in groupby(places, key=lambda place: (_NUMBERED.sub(r"\1\3", place[0]), _figures(place[1]))):
        run = list(alike)
        merged.append((_title(run[0][0], run[-1][0]), run[0][1]))
    return merged


def _figures(rows: Sequence[Traffic]) -> list[tuple[object, ...]]:
    return [(row.kind, row.group, row.count, row.bytes, row.seen_count, row.seen_bytes) for row in rows]


def _title(first: str, last: str) -> str:
    """``layers 2-4 moe``."""
    start, end = _NUMBERED.match(first), _NUMBERED.match(last)
    if first == last or start is None or end is None:
        return first
    return f"{start[1]}s {start[2]}-{end[2]}{start[3]}"


def _totals(reference: SideAccount, candidate: SideAccount) -> Iterator[str]:
    both = (reference, candidate)
    yield _total("", reference.name, candidate.name, "ratio")
    calls, more = reference.collectives, candidate.collectives
    yield _total("collectives, target step", str(calls), str(more), _ratio(calls, more))
    yield _compared("bytes per step", [s.bytes_per_step for s in both], [s.at_most for s in both])
    yield _compared("bytes per token", [s.bytes_per_token for s in both], [s.at_most for s in both])
    if None not in (seen := [side.seen_bytes_per_token for side in both]):
        yield _compared("bytes per token, seen", [size or 0 for size in seen])
    yield _compared("parameters per rank", [side.parameter_bytes for side in both])
    for part in reference.parameters:
        sizes = [side.parameters[part] for side in both]
        if any(sizes):
            yield _compared(f"  {part}", sizes)
    yield from _activations(both)


def _activations(both: tuple[SideAccount, SideAccount]) -> Iterator[str]:
    largest = [side.largest_activation for side in both]
    yield _compared("largest activation", [a.bytes for a in largest], [a.at_most for a in largest])
    for part in both[0].activations:
        held = [side.activations[part] for side in both]
        yield _compared(f"  {part}", [a.bytes for a in held], [a.at_most for a in held])
    for side, a in zip(both, largest, strict=True):
        yield f"{side.name}: {a.name} {list(a.shape)}"


def _compared(what: str, sizes: Sequence[float], at_most: Sequence[bool] = (False, False)) -> str:
    first, second = (_at_most(_size(size), by_choice) for size, by_choice in zip(sizes, at_most, strict=True))
    return _total(what, first, second, _ratio(*sizes))


def _total(what: str, reference: str, candidate: str, ratio: str) -> str:
    return f"{what:<27} {reference:>18} {candidate:>18} {ratio:>7}"


def _ratio(reference: float, candidate: float) -> str:
    return f"{candidate / reference:.2f}" if reference else "-"


def _at_most(size: str, by_choice: bool) -> str:
    return f"<= {size}" if by_choice else size


def _size(count: float) -> str:
    """``816 B``, ``12.8 KiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    power = max(p for p in range(1, len(_UNITS) + 1) if count >= 1024**p)
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"
