"""The parent's side of a run: starts the host, reads its messages, and leaves nothing behind. No torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

import spcheck
from spcheck.case import Case
from spcheck.errors import HostFailed, UsageError

Progress = Callable[[str], None]

_LAST_MOMENT = 5.0  # seconds between a closed channel and the end of the process behind it


@dataclass
class RunLog:
    """What came back from the ranks. ``failure`` is one sentence where the run did not come to its end."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


def run_case(case: Case, progress: Progress) -> RunLog:
    """Runs one checked case in processes of its own; ``progress`` gets a short text at each step.

    Raises:
        UsageError: the machine cannot run it (GPUs, tensors of a checkpoint folder).
        HostFailed: the host ended without an answer.
    """
    with _private_folder() as folder, _host(folder) as (host, errors):
        progress("starting ranks")
        assert host.stdin is not None
        host.stdin.write(json.dumps({"case": case.to_json(), "folder": str(folder)}).encode() + b"\n")
        host.stdin.close()
        return _listen(host, errors, case, progress)


def _listen(host: subprocess.Popen[bytes], errors: IO[bytes], case: Case, progress: Progress) -> RunLog:
    log = RunLog()
    for message in _messages(host, case.timeout):
        if message is None:
            log.failure = f"no answer within {case.timeout:g} s: a rank hangs, or --timeout is too short"
            return log
        if message["event"] == "refused":
            raise UsageError(message["message"])
        if message["event"] == "ready":
            log.environment = message["environment"]
            progress(f"running {case.tp} rank{'s' if case.tp > 1 else ''} on {log.environment['backend']}")
        else:
            log.reports = message["reports"]
            log.failure = failure_sentence(log.reports)
            return log
    if log.environment:  # it had begun: what runs in it, the subjects included, took it down
        log.failure = f"the process of all ranks {_ending(host)} and no report"
        return log
    errors.seek(0)
    tail = errors.read().decode(errors="replace").strip().splitlines()
    raise HostFailed(f"the host process ended without an answer: {tail[-1] if tail else 'it said nothing'}")


def _ending(host: subprocess.Popen[bytes]) -> str:
    try:
        return f"ended with exit code {host.wait(_LAST_MOMENT)}"
    except subprocess.TimeoutExpired:
        return "goes on with its channel closed"


def failure_sentence(reports: list[dict[str, Any]]) -> str | None:
    """Which rank failed first, how and where; None if every rank came to its end."""
    failed = [r for r in reports if "error" in r]
    if not failed:
        return None
    first = min(failed, key=lambda r: r.get("failed_at", float("inf")))
    error = first["error"]
    where = f" in {error['module']} of {error['subject']}" if error.get("module") else ""
    after = f", after {error['last_collective']}" if error.get("last_collective") else ""
    message = (error["message"].splitlines() or [""])[0]  # torch adds its own stack to some
    what = message if error["type"] == "RankDied" else f"raised {error['type']}: {message}"
    return f"rank {first['rank']} {what}{where}{after}"


def _messages(host: subprocess.Popen[bytes], timeout: float) -> Iterator[dict[str, Any] | None]:
    """The host's messages, then the end; None once ``timeout`` seconds have passed."""
    assert host.stdout is not None
    deadline = time.monotonic() + timeout
    data = b""
    with DefaultSelector() as selector:
        selector.register(host.stdout, EVENT_READ)
        while True:
            if not selector.select(max(deadline - time.monotonic(), 0.0)):
                yield None
                return
            chunk = os.read(host.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, data = (data + chunk).split(b"\n")
            yield from map(json.loads, lines)


@contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="spcheck-"))  # mkdtemp's mode is 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _host(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The host in a session of its own, so that one kill reaches it and every rank."""
    with (folder / "host.stderr").open("w+b") as errors, _terminable():
        host = subprocess.Popen(
            # -P: a folder named "reference" where the user stands must not shadow the installed one.
            [sys.executable, "-P", "-m", "spcheck.launch.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
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
