"""Errors in what a user gives, and how a value or name from a file is shown in their messages. No torch here."""

from __future__ import annotations

from reprlib import Repr

_LONGEST = 100  # characters of a name that are shown

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _LONGEST
_SHORT.maxlong = 30


class ConfigError(ValueError):
    """A config that cannot be run; the message is one sentence that names the key."""


def shown(value: object) -> str:
    """A value from a file for a message: short, and with nothing in it that a terminal would obey.

    A plain name stays as it is; whatever is long or has a line break, an escape sequence or a blank is quoted.
    """
    if isinstance(value, str) and value.isprintable() and " " not in value and 0 < len(value) <= _LONGEST:
        return value
    return quoted(value)


def quoted(value: object) -> str:
    """``'text'``, ``3``, ``[1, 2, ...]``: as Python writes it, but short."""
    return _SHORT.repr(value)
