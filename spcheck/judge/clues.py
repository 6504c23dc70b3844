"""Clues of :mod:`spcheck.worker.clues` in words: guesses at the cause, each with a question mark. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spcheck.judge.merge import ProbeResult
from spcheck.plan.plan import Plan

_ROUNDED = "as large as float32 rounding"


def clue_texts(plan: Plan, result: ProbeResult) -> list[str]:
    """What all ranks with wrong rows say alike, in words, the most telling first."""
    if not result.clues or set(result.clues) != set(result.ranks_over):
        return []
    by_rank = list(result.clues.values())
    common = [name for name in by_rank[0] if all(name in clues for clues in by_rank)]
    told = {name: _TEXTS[name](plan, result, [clues[name] for clues in by_rank]) for name in common}
    texts = {name: text for name, text in told.items() if text}
    weaker = {other for name in texts for other in _WEAKER.get(name, ())}
    return [text for name, text in texts.items() if name not in weaker]


def _one(values: Sequence[Any]) -> Any:
    """The value if it is the same on all ranks, else None."""
    return values[0] if all(value == values[0] for value in values) else None


def _nan(plan: Plan, result: ProbeResult, _: Sequence[Any]) -> str:
    return f"not a number{_leak(plan, result)}"


def _leak(plan: Plan, result: ProbeResult) -> str:
    """A guess where padded rows hold NaN, and such rows there are."""
    phases = [plan.phase(result.phase, result.call, dp) for dp in range(plan.case.dp)]
    padded = any(p is not None and p.shard_rows(plan.candidate.tp) * plan.candidate.tp > p.real for p in phases)
    return ": a padded row that leaks?" if plan.case.padding_content == "nan" and padded else ""


def _zero(_: Plan, result: ProbeResult, __: Sequence[Any]) -> str:
    return "zero there: rows that nobody wrote?" if result.rows_over > 1 else "zero there: a row that nobody wrote?"


def _from_zero(_: Plan, __: ProbeResult, ___: Sequence[Any]) -> str:
    return "something where the reference is zero"


def _mask(_: Plan, result: ProbeResult, values: Sequence[Any]) -> str:
    lost, gained = (sum(value[i] for value in values) for i in (0, 1))
    what = "tokens" if result.kind == "logits" else "experts or groups" if ".gate." in result.probe else "keys"
    told = [f"{lost} {what} forbidden that the reference allows"] if lost else []
    told += [f"{gained} {what} allowed that the reference forbids"] if gained else []
    return f"{' and '.join(told)}: a mask?"


def _ids(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    first = values[0]
    if first[0] == "none":
        return f"{first[1]} is no id: a placeholder?"
    return f"chooses key {first[1]} for a row at position {first[2]}, a later one: a mask?"


def _turned(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    kinds = {value[0] for value in values}
    if kinds == {"pairs"}:
        return "turned in other pairs of channels: interleaved or half-split rotary?"
    value = _one(values)
    if value is None or value[0] == "at":
        return "turned as at other positions?" if "pairs" not in kinds else None
    return f"turned as at the position {abs(value[1])} {'later' if value[1] > 0 else 'before'}?"


def _cast(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    kind = _one(values)
    if kind is None:
        return None
    if kind == "float32 rounding":
        return f"{_ROUNDED}: a cast to float32 on the way?"
    return f"all its values are {kind if 'sums' in kind else f'{kind} numbers'}: a cast?"


def _eps(_: Plan, __: ProbeResult, ___: Sequence[Any]) -> str:
    return "as with another eps in the norm?"


def _row_factors(_: Plan, result: ProbeResult, values: Sequence[Any]) -> str | None:
    if result.ratio is not None:
        return None
    least, most = min(value[0] for value in values), max(value[1] for value in values)
    return f"each row is scaled by a factor of its own, {least:.7g} to {most:.7g}: a norm's statistics or eps?"


def _channel_factors(_: Plan, result: ProbeResult, __: Sequence[Any]) -> str | None:
    return "each channel is scaled by a factor of its own: another weight of a norm?" if result.ratio is None else None


def _scores_without(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    what = _one(values)
    return f"as made without {what}?" if what else None


def _part(plan: Plan, result: ProbeResult, values: Sequence[Any]) -> str | None:
    value = _one([[v[0], float(f"{v[1]:.4g}")] for v in values])
    if value is None or result.ratio is not None:
        return None
    probe, factor = value[0], values[0][1]
    if abs(factor + 1) < _TINY:
        return f"{probe} is missing in it?"
    if abs(factor - 1) < _TINY:
        return f"{probe} is added once too often?"
    counts = 1 + factor
    scaling = plan.config.routed_scaling_factor
    why = ": the routed scaling factor?" if abs(counts * scaling - 1) < _TINY or abs(counts - scaling) < _TINY else "?"
    return f"{probe} counts {counts:.4g} times{why}"


_TINY = 1e-5


def _equals(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    probe = _one(values)
    return f"holds the value of {probe}?" if probe else None


def _order(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    kind = _one(values)
    if kind is None:
        return None
    return (
        "its halves are swapped: another order of the channels?"
        if kind == "halves"
        else "another order of the channels?"
    )


def _channels(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    value = _one(values)
    if value is None:
        return None
    block, source = value
    told = f"only in rank {block}'s part of the channels"
    return f"{told}, which holds rank {source}'s" if source >= 0 else told


def _keys(_: Plan, __: ProbeResult, values: Sequence[Any]) -> str | None:
    value = _one(values)
    if value is None:
        return None
    if value[0] == "newest":
        keys = "own key" if value[1] == 1 else f"{value[1]} newest keys"
        return f"only the scores of each row's {keys}: written to another slot?"
    _, first, last = value
    if first == last:
        return f"only the scores of key {first}: written to another slot?"
    return f"only the scores of keys {first} to {last}"


_TEXTS: Mapping[str, Callable[[Plan, ProbeResult, Sequence[Any]], str | None]] = {
    "nan": _nan,
    "zero": _zero,
    "from_zero": _from_zero,
    "mask": _mask,
    "ids": _ids,
    "turned": _turned,
    "cast": _cast,
    "eps": _eps,
    "row_factors": _row_factors,
    "channel_factors": _channel_factors,
    "scores_without": _scores_without,
    "part": _part,
    "equals": _equals,
    "order": _order,
    "channels": _channels,
    "keys": _keys,
}

_EVERYTHING = tuple(_TEXTS)
_WEAKER = {
    "nan": tuple(name for name in _EVERYTHING if name != "nan"),
    "zero": tuple(name for name in _EVERYTHING if name != "zero"),
    "from_zero": tuple(name for name in _EVERYTHING if name != "from_zero"),
    "mask": ("cast", "keys", "row_factors", "channel_factors"),
    "eps": ("row_factors", "cast", "part"),
    "turned": ("order", "part", "row_factors", "channel_factors", "channels"),
    "row_factors": ("part", "order"),
    "scores_without": ("part", "equals", "row_factors", "channel_factors"),
    "part": ("equals", "channels"),
    # A value that stands at another probe is as narrow as that one is.
    "equals": ("cast",),
    "order": ("channels",),
}
"""Clue -> those that say less of the same and are left out beside it."""
