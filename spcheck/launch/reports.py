"""What forked ranks write to the host, until each has ended one way or the other."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from typing import Any, BinaryIO

from spcheck.comm.divergence import find_divergence
from spcheck.comm.trace import Trace
from spcheck.launch.patience import Patience
from spcheck.launch.stacks import StackFile

Report = dict[str, Any]

_GRACE = 5.0  # seconds for the other ranks to notice that one has failed
_TICK = 0.5  # seconds between two looks at ranks of which nothing is heard
_LAST_MOMENT = 2.0  # seconds for killed ranks to close their pipes; a child of theirs may hold them open


@dataclass
class Child:
    """One forked rank as the host sees it."""

    rank: int
    process: int
    pipe: BinaryIO
    trace: Trace
    stack: StackFile
    data: bytes = b""

    @property
    def report(self) -> Report | None:
        """What it has written, once that is whole; a second line would come from a failing teardown."""
        line, end, _ = self.data.partition(b"\n")
        return json.loads(line) if end else None


def collect(children: Sequence[Child], patience: Patience | None, limit: str, tp: int | None = None) -> list[Report]:
    """One report per rank, in rank order; ``limit`` says what a rank that is alive without patience has exceeded.

    ``tp`` of them are a data-parallel rank.

    After the first failure the others get a moment to notice. No child is left, whatever happens.
    """
    collector = _Collector(children, patience, limit, tp)
    try:
        return collector.collect()
    finally:
        collector.close()


def overdue(trace: Mapping[str, Any], why: str, *, stopped: bool = False, stack: str = "") -> Report:
    """The error of a rank that was ended because it did not end itself."""
    kind = "RankStopped" if stopped else "RankWaits" if trace["waits"] else "RankHung"
    return {"type": kind, "message": why, "traceback": stack}


class _Collector:
    def __init__(self, children: Sequence[Child], patience: Patience | None, limit: str, tp: int | None) -> None:
        self._children = children
        self._open = {child.rank: child for child in children}
        self._reports: dict[int, Report] = {}
        self._traces: dict[int, Report] = {}
        self._errors: dict[int, Report] = {}  # of ranks that were ended by the host
        self._patience = patience
        self._deadline: float | None = None  # once something has failed, or ranks were killed
        self._limit = limit
        self._tp = tp
        self._failed = False
        self._waited_in: list[int | None] = []
        self._selector = DefaultSelector()
        for child in children:
            self._selector.register(child.pipe, EVENT_READ, child)

    def collect(self) -> list[Report]:
        while self._open:
            self._read_some()
        return [self._reports[child.rank] for child in self._children]

    def close(self) -> None:
        self._selector.close()
        for child in self._children:
            child.pipe.close()
            child.stack.close()
        for child in self._open.values():  # only where collecting broke off
            _kill(child)
            os.waitpid(child.process, 0)

    def _read_some(self) -> None:
        ready = self._selector.select(min(self._left(), _TICK))
        if not ready:
            self._look()
        for key, _ in ready:
            chunk = os.read(key.fd, 1 << 16)
            key.data.data += chunk
            if not chunk:
                self._end(key.data)

    def _left(self) -> float:
        """Seconds that the ranks still have."""
        if self._deadline is None:
            return math.inf if self._patience is None else self._patience.left()
        return max(self._deadline - time.monotonic(), 0.0)

    def _look(self) -> None:
        if not self._left():
            self._out_of_time()
        elif not self._failed and not self._errors and self._wait_without_end():
            self._limit = "the ranks wait for different collectives"
            self._end_the_rest()

    def _wait_without_end(self) -> bool:
        """Whether all ranks have waited since the last look, and not in one collective: no need for the deadline."""
        before, self._waited_in = self._waited_in, [child.trace.waits_in() for child in self._open.values()]
        if None in self._waited_in or self._waited_in != before:
            return False
        return find_divergence([self._so_far(child) for child in self._children], self._tp) is not None

    def _so_far(self, child: Child) -> Report:
        """As in a report; an error, of whatever kind, says that the rank may still call more."""
        error: Report = {"error": {}} if child.rank in self._open else {}
        return {"rank": child.rank, "trace": child.trace.read(), **error}

    def _out_of_time(self) -> None:
        if self._errors:  # they are dead, and something still holds their pipes
            for child in list(self._open.values()):
                self._end(child)
        else:
            self._end_the_rest()

    def _end(self, child: Child) -> None:
        self._selector.unregister(child.pipe)
        del self._open[child.rank]
        _, status = os.waitpid(child.process, 0)
        self._reports[child.rank] = report = self._report_of(child, os.waitstatus_to_exitcode(status))
        if "error" in report and not self._failed and not self._errors:
            self._failed = True
            self._deadline = time.monotonic() + min(_GRACE, self._left())
            self._limit = "ended by the host after another rank's failure"

    def _report_of(self, child: Child, code: int) -> Report:
        """A rank's report, or what its end says where it left none."""
        if report := child.report:
            return report
        error = self._errors.get(child.rank)
        if error is None:
            how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code} and no report"
            error = {"type": "RankDied", "message": how, "traceback": child.stack.read()}
        # A rank that dies by itself is a cause; one that had to be ended after a failure is not.
        follows = self._failed and child.rank in self._errors
        report = {"rank": child.rank, "error": error, "failed_at": time.monotonic(), "lost_peer": follows}
        return report | ({"trace": self._traces[child.rank]} if child.rank in self._traces else {})

    def _end_the_rest(self) -> None:
        """First look at all of them, then ask for stacks, then kill: each step disturbs what the one before saw."""
        rest = list(self._open.values())
        traces = [child.trace.read() for child in rest]
        stopped = [_is_stopped(child) for child in rest]
        for child, still in zip(rest, stopped, strict=True):
            if not still:
                with suppress(ProcessLookupError):
                    child.stack.ask(child.process)
        for child, trace, still in zip(rest, traces, stopped, strict=True):
            if not still:
                child.stack.wait()
            self._errors[child.rank] = overdue(trace, self._limit, stopped=still, stack=child.stack.read())
            self._traces[child.rank] = trace  # asking for a stack can end a sleep, and the rank would go on
        for child in rest:
            _kill(child)
        self._deadline = time.monotonic() + _LAST_MOMENT


def _is_stopped(child: Child) -> bool:
    """Whether a signal such as SIGSTOP holds it; its state is only looked at, not consumed."""
    return os.waitid(os.P_PID, child.process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(child: Child) -> None:
    with suppress(ProcessLookupError):
        os.kill(child.process, signal.SIGKILL)
