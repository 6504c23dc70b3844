"""How the process that holds the ranks ended, where it gave no report. No torch."""

from __future__ import annotations

import signal
import subprocess

_LAST_MOMENT = 5.0  # seconds between a closed channel and the end of the process behind it


def exit_code(host: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a host whose channel is closed, the negative of a signal's number; None while it goes on."""
    try:
        return host.wait(_LAST_MOMENT)
    except subprocess.TimeoutExpired:
        return None


def ending(code: int | None, *, began: bool) -> str | None:
    """What took the run down, in a sentence; None where only spcheck itself can be at fault.

    ``code`` is that of :func:`exit_code`; ``began``: the host had said that it starts its ranks. Before that it runs no
    code of a subject, and so only a signal from outside (for want of memory, say) is no mistake of spcheck.
    """
    who = "the process of all ranks"
    if code is not None and code < 0:
        when = ", and left no report" if began else " before its ranks started"
        return f"{who} was killed by {signal_text(-code)}{when}"
    if not began:
        return None
    if code is None:
        return f"{who} goes on with its channel closed and no report"
    return f"{who} ended with exit code {code} and no report"


def signal_text(number: int) -> str:
    """``signal 9 (SIGKILL)``; one that has no name is a number alone."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
