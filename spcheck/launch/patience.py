"""How long ranks are waited for: a number of seconds for every step, and not for all of them together. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spcheck.comm.trace import Trace

_LEAD = 2.0  # seconds


def earlier(timeout: float) -> float:
    """What the host waits where its parent waits ``timeout``: it has stacks to collect, and a report to send."""
    return timeout - min(0.1 * timeout, _LEAD)


def limit_text(timeout: float) -> str:
    """What ranks have exceeded that are given up."""
    return f"no rank began a step within {timeout:g} s"


class Patience:
    """A deadline (of ``time.monotonic``) that moves while ranks get on; without ``seconds`` it stays.

    A rank gets on when it begins another step of a subject, or of the tool.
    """

    def __init__(self, deadline: float, seconds: float | None, traces: Sequence[Trace]) -> None:
        self._deadline = deadline
        self._seconds = seconds
        self._traces = traces

    def left(self) -> float:
        """Seconds that are left; 0 where there are none."""
        deadline = self._deadline
        if self._seconds is not None:
            deadline = max(deadline, max(trace.begun for trace in self._traces) + self._seconds)
        return max(deadline - time.monotonic(), 0.0)
