"""The outcomes, their exit codes, and which of several wins. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
