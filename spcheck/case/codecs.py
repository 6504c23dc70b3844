"""How the value of a setting is written on a command line and in JSON, and read again. No click, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from spcheck.case.choices import DEFAULT_GRAPH_SIZES, Requests

T = TypeVar("T")


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Codec:
    """The forms of one kind of value.

    ``parse`` reads what stands behind the option, and raises ValueError with a sentence for a user. ``format`` writes
    it. ``from_json`` makes a value of what JSON kept of it: JSON has no tuples. ``choices`` are all values there are,
    where they can be listed. With ``repeats`` the option may be given several times, and each has an element.
    """

    parse: Callable[[str], Any]
    format: Callable[[Any], str] = str
    from_json: Callable[[Any], Any] = _unchanged
    choices: tuple[str, ...] = ()
    repeats: bool = False


def choice(values: tuple[str, ...]) -> Codec:
    """One of these words."""
    return Codec(str, choices=values)


def requests_text(requests: Requests, cached: Requests | None = None) -> str:
    """``5,1@40/11/-``: data-parallel ranks apart by a slash, an idle one a dash; cached tokens behind an @."""
    held = cached or tuple((0,) * len(here) for here in requests)
    ranks = [zip(*both, strict=True) for both in zip(requests, held, strict=True)]
    return "/".join(",".join(f"{new}@{old}" if old else str(new) for new, old in here) or "-" for here in ranks)


def numbers_text(numbers: Iterable[int]) -> str:
    """``0,2,5``; none of them is ``none``."""
    return ",".join(map(str, numbers)) or "none"


def _graph_sizes_text(sizes: tuple[int, ...]) -> str:
    return "default" if sizes == DEFAULT_GRAPH_SIZES else numbers_text(sizes)


def override_text(override: tuple[str, Any]) -> str:
    """``key=value``, the value as JSON unless it is text."""
    key, value = override
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of whole numbers such as 5,1,11") from error


def _numbers(text: str) -> tuple[int, ...]:
    return () if text.strip() in ("", "none") else _whole_numbers(text)


def _graph_sizes(text: str) -> tuple[int, ...]:
    return DEFAULT_GRAPH_SIZES if text.strip() == "default" else _numbers(text)


def _requests(text: str) -> Requests:
    return _by_rank(text, _whole_numbers)


def _requests_and_cached(text: str) -> tuple[Requests, Requests | None]:
    pairs = _by_rank(text, _new_and_cached)
    new = tuple(tuple(pair[0] for pair in rank) for rank in pairs)
    cached = tuple(tuple(pair[1] for pair in rank) for rank in pairs)
    return new, cached if any(map(any, cached)) else None


def _new_and_cached(text: str) -> tuple[tuple[int, int], ...]:
    words = [word.partition("@") for word in text.split(",")]
    try:
        return tuple((int(new), int(held) if at else 0) for new, at, held in words)
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of new@cached tokens such as 5,1@40,3@12") from error


def _by_rank(text: str, read: Callable[[str], tuple[T, ...]]) -> tuple[tuple[T, ...], ...]:
    """What stands between slashes, each read; a dash is an empty one."""
    ranks = [rank.strip() for rank in text.split("/")]
    if "" in ranks:
        raise ValueError(f"{text!r} has an empty part: an idle data-parallel rank is a dash, as in 5,1/-")
    if mixed := [rank for rank in ranks if "-" in rank.split(",") and rank != "-"]:
        raise ValueError(f"{mixed[0]!r}: a dash stands alone, for an idle data-parallel rank, as in 5,1/-")
    return tuple(() if rank == "-" else read(rank) for rank in ranks)


def _override(text: str) -> tuple[str, Any]:
    """The value as JSON, or as text where it is none."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ValueError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value)


def _tuples(value: Any) -> tuple[tuple[Any, ...], ...] | None:
    return None if value is None else tuple(map(tuple, value))


TEXT = Codec(str)
COUNT = Codec(int)
SECONDS = Codec(float, "{:g}".format)
FLAG = Codec({"yes": True, "no": False}.__getitem__)
"""Of an option with two names, ``--yes/--no``: there is no text behind it."""

NUMBERS = Codec(_numbers, numbers_text, _tuple)
GRAPH_SIZES = Codec(_graph_sizes, _graph_sizes_text, _tuple)
REQUESTS = Codec(_requests, requests_text, _tuples)
REQUESTS_AND_CACHED = Codec(_requests_and_cached, requests_text, _tuples)
"""The text of ``--requests`` has two settings in it; ``parse`` gives both."""

OVERRIDES = Codec(_override, override_text, _tuples, repeats=True)
