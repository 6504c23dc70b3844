"""From measured numbers to a verdict: one table of bounds, and rules. No torch; a stored result can be judged again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.exact import exact_bound

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


PASSES = ("EQUAL", "EQUIVALENT")
EXIT_CODES = {"EQUAL": 0, "EQUIVALENT": 0, "DIVERGED": 1, "INCONCLUSIVE": 3, "FAILED": 4}
SEVERITY = ("EQUAL", "EQUIVALENT", "INCONCLUSIVE", "DIVERGED", "FAILED")
"""Over several findings the worst wins."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in a full sentence. ``at`` is the probe, call, request, position and rank it names."""

    kind: str
    outcome: str
    message: str
    at: dict[str, Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome, the scheme that ran, and what led to it."""

    outcome: str
    scheme: str
    reason: str
    findings: tuple[Finding, ...] = ()
    first_divergence: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """The command's exit code for this outcome."""
        return EXIT_CODES[self.outcome]


def worst(outcomes: Iterable[str]) -> str:
    """FAILED > DIVERGED > INCONCLUSIVE > EQUIVALENT > EQUAL."""
    return max(outcomes, key=SEVERITY.index, default="EQUAL")


def outcome_of(compared: int, bitwise_equal: int, findings: Sequence[Finding]) -> str:
    """The outcome of a run that came to its end. Nothing compared is never a pass."""
    base = "INCONCLUSIVE" if compared == 0 else "EQUAL" if bitwise_equal == compared else "EQUIVALENT"
    return worst([base, *(f.outcome for f in findings)])
