"""Cutting the rows of a batch so that what a kernel materialises per row stays bounded."""

from __future__ import annotations

MAX_ELEMENTS = 1 << 24


def row_chunks(rows: slice, elements_per_row: int) -> list[slice]:
    """``rows`` in pieces of at most ``MAX_ELEMENTS`` elements, but one row at least."""
    step = max(1, MAX_ELEMENTS // max(1, elements_per_row))
    return [slice(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step)]
