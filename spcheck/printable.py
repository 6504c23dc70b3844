"""Text that comes from outside, made safe to print: nothing in it that a terminal would obey, and one line."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with line breaks, escape sequences, marks of direction and the like written out: ``\\n``, ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
