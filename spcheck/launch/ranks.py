"""All ranks of one case, as threads or as forked processes; gives one report per rank, failed ones included."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, BinaryIO

import torch

from spcheck.comm.errors import WorldFailed
from spcheck.comm.interface import World
from spcheck.comm.loopback import run_loopback
from spcheck.launch.lifetime import die_with_parent
from spcheck.plan import Plan
from spcheck.worker.built import EnginePool
from spcheck.worker.pair import run_rank

Report = dict[str, Any]

_PATIENCE = 0.7  # of the case's timeout: a rank says what it waits for before the parent stops waiting for the ranks
_GRACE = 5.0  # seconds for the other ranks to notice that one has failed


def run_threads(plan: Plan, pool: EnginePool | None = None) -> list[Report]:
    """The case on the loopback backend, in this process; engines that the ``pool`` has are used again."""
    shared = pool or EnginePool()
    reports: list[Report] = [{"rank": rank} for rank in range(plan.case.tp)]

    def main(world: World) -> None:
        _timed(reports[world.rank], partial(run_rank, world, plan, "cpu", pool=shared))

    try:
        run_loopback(plan.case.tp, main)
    except WorldFailed as failed:
        for outcome in failed.outcomes:
            if outcome.state == "raised" and "error" not in reports[outcome.rank]:
                error = {"type": type(outcome.exception).__name__, "message": str(outcome.exception)}
                reports[outcome.rank]["error"] = {**error, "traceback": outcome.traceback}
    return reports


def run_processes(plan: Plan, backend: str, folder: Path) -> list[Report]:
    """The case on ``gloo`` or ``nccl``, one forked process per rank; ``folder`` is private and holds the rendezvous.

    No tensor may exist in this process: a fork after the first operation can inherit a locked thread pool.
    """
    pipes: dict[int, BinaryIO] = {}
    children: dict[int, int] = {}
    for rank in range(plan.case.tp):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            _be_rank(plan, backend, folder, rank, send)
        os.close(send)
        pipes[rank] = os.fdopen(receive, "rb")
        children[rank] = child
    return _Reports(pipes, children).collect()


def _be_rank(plan: Plan, backend: str, folder: Path, rank: int, send: int) -> None:
    """The life of a forked rank; never returns."""
    die_with_parent()
    report: Report = {"rank": rank}
    status = 1
    try:
        torch.set_num_threads(1)
        from spcheck.comm.process import open_world

        def run(report: Report) -> None:
            device = _device(backend, rank)
            world = open_world(backend, rank, plan.case.tp, folder, plan.case.timeout * _PATIENCE)
            run_rank(world, plan, device, report)
            _send(send, report)  # before the teardown, which a lost peer could block
            world.close()

        _timed(report, run)
        status = 0
    except BaseException as error:
        report.setdefault("error", {"type": type(error).__name__, "message": str(error)})
        _send(send, report)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _device(backend: str, rank: int) -> str:
    if backend != "nccl":
        return "cpu"
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def _timed(report: Report, run: Callable[[Report], None]) -> None:
    """Runs a rank; a failure is stamped, so that the first of several can be told."""
    try:
        run(report)
    except BaseException:
        report["failed_at"] = time.monotonic()
        raise


def _send(descriptor: int, report: Report) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as pipe:
        pipe.write(json.dumps(report).encode() + b"\n")


class _Reports:
    """What forked ranks write, read until every pipe is closed; after the first failure the others get a moment."""

    def __init__(self, pipes: dict[int, BinaryIO], children: dict[int, int]) -> None:
        self._children = children
        self._data: dict[int, bytes] = dict.fromkeys(pipes, b"")
        self._reports: dict[int, Report] = {}
        self._deadline: float | None = None
        self._selector = DefaultSelector()
        for rank, pipe in pipes.items():
            self._selector.register(pipe, EVENT_READ, rank)

    def collect(self) -> list[Report]:
        """One report per rank, in rank order."""
        with self._selector:
            while self._selector.get_map():
                self._read_some()
        return [self._reports[rank] for rank in sorted(self._reports)]

    def _read_some(self) -> None:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        ready = self._selector.select(left)
        if not ready:
            self._kill_the_rest()
        for key, _ in ready:
            chunk = os.read(key.fd, 1 << 16)
            self._data[key.data] += chunk
            if not chunk:
                self._selector.unregister(key.fileobj)
                self._end(key.data)

    def _end(self, rank: int) -> None:
        report = _finished(rank, self._data[rank], self._children[rank])
        self._reports[rank] = report
        if "error" in report and self._deadline is None:
            self._deadline = time.monotonic() + _GRACE

    def _kill_the_rest(self) -> None:
        self._deadline = None
        for rank in set(self._children) - set(self._reports):
            os.kill(self._children[rank], signal.SIGKILL)


def _finished(rank: int, data: bytes, child: int) -> Report:
    """A rank's report, or what its end says where it left none."""
    _, status = os.waitpid(child, 0)
    if data.strip():
        report: Report = json.loads(data)
        return report
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code} and no report"
    return {"rank": rank, "error": {"type": "RankDied", "message": how}, "failed_at": time.monotonic()}
