"""The parent's side of a run: a host process that serves case after case, and leaves nothing behind. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import spcheck
from spcheck.case import Case
from spcheck.comm.trace import Trace
from spcheck.errors import HostFailed, UsageError
from spcheck.launch.ending import ending, exit_code
from spcheck.launch.examine import TraceFile, examine
from spcheck.launch.files import MeetingPlace, nameless_file
from spcheck.launch.interface import Progress, RunLog, silent
from spcheck.launch.patience import Patience, earlier, limit_text
from spcheck.launch.stacks import StackFile
from spcheck.plan.plan import Plan

_TICK = 0.25  # seconds between two looks at how far the ranks are


class ProcessHost:
    """A process that holds the ranks of one case after the other; use it as a context manager.

    It is started for the first case. A case that fails, hangs or loses a rank ends it, and the next case gets a fresh
    one. So does a case whose ranks are threads behind one whose ranks are processes, and the other way round: a process
    that has computed cannot be forked safely.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None

    def __enter__(self) -> ProcessHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, plan: Plan, progress: Progress = silent) -> RunLog:
        """As of :class:`spcheck.launch.interface.Host`.

        Raises:
            UsageError: the machine cannot run it (GPUs, tensors of a folder, no current or temporary folder).
            HostFailed: the process ended by itself without an answer.
        """
        began = time.monotonic()
        _check_folder()
        threads = plan.case.backend == "loopback"
        if self._running is None or not self._running.is_for(threads=threads):
            self.close()
            self._running = _Running(threads=threads)
        try:
            log = self._running.serve(plan.case, began, progress)
        except BaseException:
            self.close()
            raise
        if log.failed:
            self.close()
        return log

    def close(self) -> None:
        """Ends the process and all ranks, if there are any."""
        if self._running is not None:
            self._running.end()
        self._running = None


def _check_folder() -> None:
    """Libraries that the host loads look for the current folder, and end the process where there is none."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder cannot be used: {error.strerror}") from error


class _Teller:
    """Says what runs, and which step of it the first rank is in."""

    def __init__(self, progress: Progress, trace: Trace) -> None:
        self._progress = progress
        self._trace = trace
        self._running = ""
        self._said = ""

    def runs(self, text: str) -> None:
        """The ranks have started."""
        self._running = text
        self._progress(text)

    def look(self) -> None:
        """Says the step, if it is another one than before."""
        subject, step = self._trace.place
        if self._running and subject and step != self._said:
            self._said = step
            self._progress(f"{self._running}: {subject.partition('.')[0]}, {step}", again=True)


class _Running:
    """A host that was started, in a session of its own, so that one kill reaches it and every rank."""

    def __init__(self, *, threads: bool) -> None:
        self._threads = threads
        self._data = b""
        with ExitStack() as made:
            self._errors = made.enter_context(nameless_file())
            self._meeting = MeetingPlace()
            made.callback(self._meeting.close)
            self._traces = TraceFile()
            made.callback(self._traces.close)
            self._process = subprocess.Popen(
                # -P: a folder named "reference" where the user stands must not shadow the installed one.
                [sys.executable, "-P", "-m", "spcheck.launch.host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                pass_fds=(*self._meeting.handles, self._traces.handle),
                env=_environment(),
            )
            made.callback(self._kill)
            self._made = made.pop_all()

    def is_for(self, *, threads: bool) -> bool:
        """Whether it goes on, and its ranks are threads or processes as asked."""
        return self._threads == threads and self._process.poll() is None

    def end(self) -> None:
        """Kills it and every rank, and gives back all that it was given."""
        self._made.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def serve(self, case: Case, began: float, progress: Progress) -> RunLog:
        """Runs one case; ``began`` is when its time limit started to count."""
        traces = self._traces.fresh(case.ranks)
        request = {
            "case": case.to_json(),
            "store": str(self._meeting.fresh()),
            "traces": self._traces.handle,
            "deadline": began + earlier(case.timeout),
        }
        progress("starting ranks")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: what it said is read below
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        patience = Patience(began + case.timeout, case.timeout, traces)
        log = self._listen(case, patience, _Teller(progress, traces[0]))
        if log.ending is not None:
            self._examine(log, case, traces)
        return log

    def _listen(self, case: Case, patience: Patience, teller: _Teller) -> RunLog:
        log = RunLog()
        for message in self._messages(patience, teller.look):
            if message is None:
                log.ending = f"{limit_text(case.timeout)}: a rank hangs, or --timeout is too short"
                return log
            if message["event"] == "refused":
                raise UsageError(message["message"])
            if message["event"] == "broken":
                last = message["traceback"].strip().splitlines()[-1]
                raise HostFailed(f"the host process broke: {last}", message["traceback"])
            if message["event"] == "ready":
                log.environment = message["environment"]
                ranks = f"{case.ranks} rank{'s' if case.ranks > 1 else ''}"
                teller.runs(f"running {ranks} on {log.environment['backend']}")
            else:
                log.reports = message["reports"]
                return log
        log.ending = ending(exit_code(self._process), began=bool(log.environment))
        if log.ending is not None:
            return log
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        raise HostFailed(f"the host process ended without an answer: {last}", said)

    def _examine(self, log: RunLog, case: Case, traces: list[Trace]) -> None:
        """The host cannot say what its ranks did: what they left in their traces can."""
        threads = log.environment.get("backend") == "loopback"
        stack = StackFile(self._errors) if threads else None
        log.reports = examine(traces, stack, self._process, limit_text(case.timeout))
        if threads and self._process.returncode is None and log.reports:
            log.ending = None  # the reports tell more

    def _messages(self, patience: Patience, look: Callable[[], None]) -> Iterator[dict[str, Any] | None]:
        """The host's messages, then the end; None once there is no patience left."""
        assert self._process.stdout is not None
        with DefaultSelector() as selector:
            selector.register(self._process.stdout, EVENT_READ)
            while True:
                if not selector.select(min(patience.left(), _TICK)):
                    look()
                    if patience.left():
                        continue
                    yield None
                    return
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, self._data = (self._data + chunk).split(b"\n")
                yield from map(json.loads, lines)


def _environment() -> dict[str, str]:
    source = str(Path(spcheck.__file__).parents[1])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and a lost terminal end like Ctrl-C meanwhile, so that the ranks and the folder go too."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # What the caller ignores stays ignored: nohup.
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
