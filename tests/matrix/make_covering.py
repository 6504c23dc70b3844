"""Writes the covering array of every space. Run as ``python -m tests.matrix.make_covering``."""

from __future__ import annotations

from tests.matrix.decoding import DECODING
from tests.matrix.prompts import PROMPTS

if __name__ == "__main__":
    for space in (PROMPTS, DECODING):
        space.file.write_text(space.text(space.covering()), encoding="utf-8")
