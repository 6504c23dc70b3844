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

_HINTED = ("value", "choice", "token")
_FACTS = ("largest at", "expected [", "shape [", "the run goes on", "a rounding difference", "the reference ")


@cache
def causes() -> dict[str, dict[str, Any]]:
    """Fault -> ``cause``, ``class``, ``names`` and ``allows``."""
    known: dict[str, dict[str, Any]] = json.loads(_CAUSES.read_text(encoding="utf-8"))
    return known


def guesses(sentence: str) -> list[str]:
    """The hints in a finding: what stands behind the size of a difference, and is no plain fact."""
    return [part for part in _parts(sentence) if not part.startswith(_FACTS)]


def _parts(sentence: str) -> list[str]:
    kind, _, message = sentence.partition("  ")
    if kind not in _HINTED:
        return []
    return re.sub(r" \(\d+ later probes differ too\)", "", message).split("; ")[1:]


def judged(cause: Mapping[str, Any], text: Sequence[str]) -> tuple[str, list[str]]:
    """``names``, ``silent`` or ``misleads``, and the guesses that are not true of the cause."""
    wrong = [guess for sentence in text for guess in guesses(sentence) if not _is_true(cause, guess, sentence)]
    return "misleads" if wrong else "names" if any(_names(cause, x) for x in text) else "silent", wrong


def _is_true(cause: Mapping[str, Any], guess: str, sentence: str) -> bool:
    kinds = [kind for kind, words in KINDS.items() if re.search(words, guess)]
    return _says(cause, guess, sentence) or any(kind in cause["allows"] for kind in kinds)


def _names(cause: Mapping[str, Any], sentence: str) -> bool:
    """Whether a finding holds the words: one of a value in its hints, any other anywhere."""
    kind, _, message = sentence.partition("  ")
    if kind not in _HINTED:
        return re.search(cause["names"], message, re.IGNORECASE) is not None
    return any(_says(cause, part, sentence) for part in _parts(sentence) if not part.startswith("largest at"))


def _says(cause: Mapping[str, Any], part: str, sentence: str) -> bool:
    """Whether a hint holds the words; they may begin in the name of the probe before it, and not end there."""
    probe = sentence.partition("  ")[2].partition(": ")[0]
    found = re.finditer(cause["names"], f"{probe} {part}", re.IGNORECASE)
    return any(match.end() > len(probe) for match in found)
