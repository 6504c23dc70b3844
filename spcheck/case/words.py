"""Words of a command line, as a shell reads them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

_PRINTABLE = range(0x20, 0x7F)


def command_line(words: Iterable[str]) -> str:
    """The words on one line, quoted where a shell needs it."""
    return " ".join(map(_word, words))


def _word(text: str) -> str:
    """A name with a line break or an escape sequence is written as bash and zsh do."""
    if text.isprintable():
        return shlex.quote(text)
    letters = [chr(b) if b in _PRINTABLE and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(text)]
    return "$'" + "".join(letters) + "'"
