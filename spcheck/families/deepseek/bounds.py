"""The largest errors that pass, by numerics and probe. No torch."""

from __future__ import annotations

import math

from spcheck.families.deepseek.exact import exact_bound

BOUNDS = {"exact": 0.0, "float64": 1e-12, "float32": 2e-5, "bfloat16": 2.0**-4}
"""Largest error of a token row, relative to the row's largest expected element, that still passes."""


_BOUND_HOLDS_FOR = 5
"""Layers through which rounding in float32 keeps within its bound; its errors add up with depth."""


def widest_rounding(numerics: str, layers: int) -> float:
    """The largest error of a finite value, relative to its row, that a correct model of so many layers may show.

    What is over its bound and not over this proves nothing. In float32 it grows with the layers; in bfloat16 no number
    tells a bug from rounding.
    """
    if numerics == "bfloat16":
        return math.inf
    depth = max(1.0, layers / _BOUND_HOLDS_FOR) if numerics == "float32" else 1.0
    return BOUNDS[numerics] * depth


def bound_of(numerics: str, probe: str) -> float:
    """The bound at one probe; in exact numerics a step that rounds has one, relative to the largest of all elements."""
    return exact_bound(probe) if numerics == "exact" else BOUNDS[numerics]
