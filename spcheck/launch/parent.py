"""The parent's side of a run: starts the host, reads its messages, and leaves nothing behind. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any, Protocol

import spcheck
from spcheck.case import Case
from spcheck.comm.trace import Trace
from spcheck.errors import HostFailed, UsageError
from spcheck.failure import failure_sentence, internal_error
from spcheck.launch.ending import ending, exit_code
from spcheck.launch.examine import examine, trace_file
from spcheck.launch.files import meeting_place, nameless_file
from spcheck.launch.patience import Patience, earlier, limit_text
from spcheck.launch.stacks import StackFile

__all__ = ["Progress", "RunLog", "failure_sentence", "run_case"]


class Progress(Protocol):
    """Takes a short text at each step; ``again``: the step is still the same one."""

    def __call__(self, text: str, *, again: bool = False) -> None:
        """Says it."""


_TICK = 0.25  # seconds between two looks at how far the ranks are


@dataclass
class RunLog:
    """What came back from the ranks. ``failure`` is one sentence where the run did not come to its end."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


def run_case(case: Case, progress: Progress) -> RunLog:
    """Runs one checked case in processes of its own; ``progress`` gets a short text at each step.

    Raises:
        UsageError: the machine cannot run it (GPUs, tensors of a checkpoint folder, no current or temporary folder).
        HostFailed: the host ended by itself without an answer.
    """
    began = time.monotonic()
    _check_folder()
    with (
        meeting_place() as (store, handles),
        trace_file(case.ranks) as traces,
        _host((*handles, traces)) as (host, errors),
    ):
        progress("starting ranks")
        request = {"case": case.to_json(), "store": str(store), "deadline": began + earlier(case.timeout)}
        request["traces"] = traces
        assert host.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: what it said is read below
            host.stdin.write(json.dumps(request).encode() + b"\n")
            host.stdin.close()
        seen = [Trace(traces, rank) for rank in range(case.ranks)]
        log = _listen(
            host, errors, case, Patience(began + case.timeout, case.timeout, seen), _Teller(progress, seen[0])
        )
        if log.failure is not None and not log.reports:
            _examine(log, host, errors, case, traces)
        return log


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


def _listen(
    host: subprocess.Popen[bytes], errors: IO[bytes], case: Case, patience: Patience, teller: _Teller
) -> RunLog:
    log = RunLog()
    for message in _messages(host, patience, teller.look):
        if message is None:
            log.failure = f"{limit_text(case.timeout)}: a rank hangs, or --timeout is too short"
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
            if internal := internal_error(log.reports):
                raise HostFailed(*internal)
            log.failure = failure_sentence(log.reports)
            return log
    log.failure = ending(exit_code(host), began=bool(log.environment))
    if log.failure is not None:
        return log
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip()
    last = said.splitlines()[-1] if said else "it said nothing"
    raise HostFailed(f"the host process ended without an answer: {last}", said)


def _examine(log: RunLog, host: subprocess.Popen[bytes], errors: IO[bytes], case: Case, traces: int) -> None:
    """The host cannot say what its ranks did: what they left in their traces can."""
    threads = log.environment.get("backend") == "loopback"
    log.reports = examine(traces, case.ranks, StackFile(errors) if threads else None, host, limit_text(case.timeout))
    if threads and host.returncode is None and log.reports:
        log.failure = failure_sentence(log.reports)


def _messages(
    host: subprocess.Popen[bytes], patience: Patience, look: Callable[[], None]
) -> Iterator[dict[str, Any] | None]:
    """The host's messages, then the end; None once there is no patience left."""
    assert host.stdout is not None
    data = b""
    with DefaultSelector() as selector:
        selector.register(host.stdout, EVENT_READ)
        while True:
            if not selector.select(min(patience.left(), _TICK)):
                look()
                if patience.left():
                    continue
                yield None
                return
            chunk = os.read(host.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, data = (data + chunk).split(b"\n")
            yield from map(json.loads, lines)


@contextmanager
def _host(inherited: tuple[int, ...]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The host in a session of its own, so that one kill reaches it and every rank."""
    with nameless_file() as errors, _terminable():
        host = subprocess.Popen(
            # -P: a folder named "reference" where the user stands must not shadow the installed one.
            [sys.executable, "-P", "-m", "spcheck.launch.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            pass_fds=inherited,
            env=_environment(),
        )
        try:
            yield host, errors
        finally:
            _kill_session(host)


def _environment() -> dict[str, str]:
    source = str(Path(spcheck.__file__).parents[1])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _kill_session(host: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)
    host.wait()


@contextmanager
def _terminable() -> Iterator[None]:
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
