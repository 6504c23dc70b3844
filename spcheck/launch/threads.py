"""The host that is this process: ranks are threads, and what they built is kept from case to case."""

from __future__ import annotations

import time

import torch

from spcheck.launch.interface import Progress, RunLog, silent
from spcheck.launch.ranks import run_threads
from spcheck.plan.plan import Plan
from spcheck.worker.built import EnginePool


class ThreadHost:
    """Ranks as threads of this process, on the loopback backend, whatever a case asks for.

    Engines of the ``pool`` are used again. Without ``seconds`` a case that hangs hangs its caller. With them it is
    given up, but its threads stay: the caller then has to end the process.
    """

    def __init__(self, pool: EnginePool | None = None, seconds: float | None = None) -> None:
        self._pool = pool or EnginePool()
        self._seconds = seconds

    def run(self, plan: Plan, progress: Progress = silent) -> RunLog:
        """As of :class:`spcheck.launch.interface.Host`."""
        progress("running ranks")
        deadline = None if self._seconds is None else time.monotonic() + self._seconds
        reports = run_threads(plan, self._pool, deadline)
        environment = {"torch": torch.__version__, "backend": "loopback"}
        return RunLog(reports, environment)
