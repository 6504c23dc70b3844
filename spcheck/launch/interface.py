"""What a host of ranks offers, whether it is a process, or the threads of this one. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from spcheck.plan.plan import Plan


class Progress(Protocol):
    """Takes a short text at each step; ``again``: the step is still the same one."""

    def __call__(self, text: str, *, again: bool = False) -> None:
        """Says it."""


def silent(text: str, *, again: bool = False) -> None:
    """The progress of which nothing is said."""


@dataclass
class RunLog:
    """What came back from the ranks. ``ending`` is one sentence where the host itself did not come to its end."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    ending: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the run did not come to its end."""
        return self.ending is not None or any("error" in report for report in self.reports)


class Host(Protocol):
    """Runs one case after the other. A case that fails never spoils the next one."""

    def run(self, plan: Plan, progress: Progress = silent) -> RunLog:
        """Runs one case on its ranks; ``progress`` gets a short text at each step.

        Raises:
            UsageError: the machine cannot run it.
            HostFailed: the tool itself is at fault.
        """
        ...
