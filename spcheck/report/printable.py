"""Text that comes from outside, made safe to print: nothing in it that a terminal would obey, and one line."""

from __future__ import annotations

_LONGEST = 600  # characters of a message


def printable(text: str) -> str:
    """The text with line breaks, escape sequences, marks of direction and the like written out: ``\\n``, ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def sentence(text: str) -> str:
    """A message on one printable line. Where a name in it is endless, its beginning and its end are kept."""
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[:400]} ... {text[-190:]}"
