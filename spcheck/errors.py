"""Every error spcheck raises on purpose, and the exit code each one ends with.

SpcheckError
├── UsageError        2   a mistake in the call, or a case that cannot exist
├── RunFailed         4   a rank died, hung or disagreed
└── HostFailed       70   the machinery around the ranks broke: spcheck's own fault
"""

from __future__ import annotations


class SpcheckError(Exception):
    """Ends the command with ``exit_code``; the message is one sentence for the user."""

    exit_code = 70


class UsageError(SpcheckError):
    """The user asked for something impossible; nothing was started, or nothing ran."""

    exit_code = 2


class RunFailed(SpcheckError):
    """The pair did not run to its end."""

    exit_code = 4


class HostFailed(SpcheckError):
    """The process that holds the ranks ended without an answer; ``details`` are what it said, for a bug report."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message, details)
        self.details = details

    def __str__(self) -> str:
        return str(self.args[0])
