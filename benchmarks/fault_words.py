"""What a report says of a fault's cause: whether it names it, is silent, or misleads.

``fault_causes.json`` has the cause of every known fault, told from its source change alone: words that a right hint
holds (``names``), and the kinds of guesses that are true of it though they may not name it (``allows``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_CAUSES = Path(__file__).with_name("fault_causes.json")

KINDS = {
    "factor": r"x the reference",
    "cast": r": a cast\b",
    "nan": r"not a number|not finite",
    "leak": r"a padded row that leaks",
    "mask": r"a mask\?|forbidden",
    "ties": r"order of ties",
    "zero": r"\bzero\b",
    "token": r"\bholds? (the|that)|also holds|rows got other rows",
    "part": r"\bcounts? .* times|\bis missing|\bis added",
    "order": r"order of the channels",
    "rotation": r"\bturned\b",
    "channels": r"\bchannels? ",
    "keys": r"\bkeys? ",
    "placement": r"expert placement",
    "count": r"\d+ rows for \d+",
    "expert": r"chose expert|row of an expert",
    "request": r"(the rows? of|only) request",
    "adapter": r"adapter",
    "rank": r"only on rank",
    "dp": r"only on DP rank",
    "position": r"\bposition",
    "verified": r"verified",
    "decode": r"decod",
    "prefill": r"prompt|prefill",
    "first": r"first row",
    "last": r"last row",
    "border": r"border|row of (a|its|each|every) shard",
    "replicas": r"the replicas on rank",
}
"""Kinds of guesses, and the words by which one is known."""


@cache
def causes() -> dict[str, dict[str, Any]]:
    """Fault -> ``cause``, ``class``, ``names`` and ``allows``."""
    known: dict[str, dict[str, Any]] = json.loads(_CAUSES.read_text(encoding="utf-8"))
    return known


def guesses(text: Sequence[str]) -> list[str]:
    """The hints in a report's findings: what stands behind the size of a difference."""
    found = []
    for sentence in text:
        kind, _, message = sentence.partition("  ")
        if kind in ("value", "choice", "token"):
            message = re.sub(r" \(\d+ later probes differ too\)", "", message)
            found += [part for part in message.split("; ")[1:] if not _is_fact(part)]
    return found


def _is_fact(part: str) -> bool:
    return part.startswith(
        ("largest at", "expected [", "shape [", "the run goes on", "a rounding difference", "the reference ")
    )


def judged(cause: Mapping[str, Any], text: Sequence[str]) -> tuple[str, list[str]]:
    """``names``, ``silent`` or ``misleads``, and the guesses that are not true of the cause."""
    wrong = [guess for guess in guesses(text) if not _is_true(guess, cause)]
    named = any(_names(cause, words, start) for sentence in text for words, start in _telling(sentence))
    return "misleads" if wrong else "names" if named else "silent", wrong


def _telling(sentence: str) -> list[tuple[str, int]]:
    """What may name a cause, and where its own words begin: behind the name of a probe stand its guesses."""
    kind, _, message = sentence.partition("  ")
    if kind not in ("value", "choice", "token"):
        return [(message, 0)]
    probe = message.partition(": ")[0]
    return [(f"{probe} {guess}", len(probe)) for guess in guesses([sentence])]


def _names(cause: Mapping[str, Any], words: str, start: int) -> bool:
    return any(match.end() > start for match in re.finditer(cause["names"], words, re.IGNORECASE))


def _is_true(guess: str, cause: Mapping[str, Any]) -> bool:
    kinds = [kind for kind, words in KINDS.items() if re.search(words, guess)]
    return _names(cause, guess, 0) or any(kind in cause["allows"] for kind in kinds)
