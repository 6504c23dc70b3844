"""All ranks of one case, as threads or as forked processes; gives one report per rank, failed ones included."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import torch

from spcheck.comm.errors import CollectiveFailed, RankLost, WorldFailed
from spcheck.comm.interface import World
from spcheck.comm.loopback import run_loopback
from spcheck.comm.trace import Trace
from spcheck.launch.lifetime import die_with_parent
from spcheck.launch.patience import Patience, limit_text
from spcheck.launch.reports import Child, Report, collect, overdue
from spcheck.launch.stacks import StackFile, thread_stack
from spcheck.plan.plan import Plan
from spcheck.worker.built import EnginePool
from spcheck.worker.pair import run_rank

_TICK = 0.25  # seconds between two looks at how far threads are
_LATER = 60.0  # seconds behind the host's deadline: a backend must not give up before the host has looked at all ranks


def run_threads(
    plan: Plan,
    pool: EnginePool | None = None,
    deadline: float | None = None,
    traces: int = -1,
    patience: float | None = None,
) -> list[Report]:
    """The case on the loopback backend, in this process; ``traces`` is a file that others can read them in.

    Engines that the ``pool`` has are used again. With a ``deadline`` (of ``time.monotonic``) threads that have not
    ended by then are reported and left behind: no thread can be killed, so the caller has to end the process. With
    ``patience``, in seconds, it moves on with every step that a rank begins.
    """
    ranks = _Threads(plan, traces, pool)
    if deadline is None:
        ranks.run()
    else:
        # Not the main thread's own work: it must be able to look at the ranks while they hang.
        runner = Thread(target=ranks.run, name="all ranks", daemon=True)
        runner.start()
        waiting = Patience(deadline, patience, ranks.traces)
        while runner.is_alive() and (left := waiting.left()):
            runner.join(min(left, _TICK))
        if runner.is_alive():
            ranks.give_up()
    return _with_traces(ranks.reports, ranks.traces)


class _Threads:
    """One loopback run. ``reports`` grow while it runs."""

    def __init__(self, plan: Plan, traces: int = -1, pool: EnginePool | None = None) -> None:
        self._pool = pool or EnginePool()
        self.reports: list[Report] = [{"rank": rank} for rank in range(plan.case.ranks)]
        self.traces = _traces(plan, traces)
        self._plan = plan
        self._ended: set[int] = set()

    def run(self) -> None:
        try:
            run_loopback(self._plan.case.ranks, self._main, self.traces)
        except WorldFailed as failed:
            for outcome in failed.outcomes:
                if outcome.exception is not None and "error" not in self.reports[outcome.rank]:
                    error = _error(outcome.exception)
                    self.reports[outcome.rank]["error"] = {**error, "traceback": outcome.traceback}
        except BaseException as error:  # no room for more threads, say: a thread would lose it
            self.reports[0].setdefault("error", _error(error))

    def give_up(self) -> None:
        """Replaces the reports of ranks that go on: their threads may write to them at any moment."""
        for rank, trace in enumerate(self.traces):
            if rank not in self._ended:
                error = overdue(trace.read(), limit_text(self._plan.case.timeout), stack=thread_stack(f"rank {rank}"))
                self.reports[rank] = {"rank": rank, "error": error, "failed_at": time.monotonic()}

    def _main(self, world: World) -> None:
        report = self.reports[world.rank]
        try:
            world.trace.thread()
            world.trace.begin("", "start")
            _timed(report, lambda report: run_rank(world, self._plan, "cpu", report, self._pool))
        finally:
            self._ended.add(world.rank)


def run_processes(
    plan: Plan,
    backend: str,
    store: Path,
    deadline: float | None = None,
    traces: int = -1,
    patience: float | None = None,
) -> list[Report]:
    """The case on ``gloo`` or ``nccl``, one forked process per rank, which meet in ``store``.

    Ranks that have not ended by the ``deadline``, which moves on as in :func:`run_threads`, are reported and killed. No
    tensor may exist in this process: a fork after the first operation can inherit a locked thread pool.
    """
    children: list[Child] = []
    for rank, trace in enumerate(_traces(plan, traces)):
        stack = StackFile()
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            _Rank(plan, backend, rank, trace).live(store, stack, send, deadline)
        os.close(send)
        children.append(Child(rank, child, os.fdopen(receive, "rb"), trace, stack))
    seen = [child.trace for child in children]
    waiting = None if deadline is None else Patience(deadline, patience, seen)
    return _with_traces(collect(children, waiting, limit_text(plan.case.timeout), plan.case.tp), seen)


class _Rank:
    """One forked rank, in its own process."""

    def __init__(self, plan: Plan, backend: str, rank: int, trace: Trace) -> None:
        self._plan = plan
        self._backend = backend
        self._rank = rank
        self._trace = trace

    def live(self, store: Path, stack: StackFile, send: int, deadline: float | None) -> None:
        """The whole life of the process; never returns."""
        report: Report = {"rank": self._rank}
        status = 1
        try:
            die_with_parent()
            stack.answer_here()
            self._trace.begin("", "start")
            torch.set_num_threads(1)
            _timed(report, lambda report: self._run(report, store, send, deadline))
            status = 0
        except BaseException as error:
            report.setdefault("error", {**_error(error), "traceback": traceback.format_exc()})
            _send(send, report)
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _run(self, report: Report, store: Path, send: int, deadline: float | None) -> None:
        from spcheck.comm.process import open_world

        device = _device(self._backend, self._rank)
        left = self._plan.case.timeout if deadline is None else max(deadline - time.monotonic(), 0.0)
        world = open_world(self._backend, self._rank, self._plan.case.ranks, store, left + _LATER, self._trace)
        run_rank(world, self._plan, device, report)
        _send(send, report)  # before the teardown, which a lost peer could block
        world.close()


def _traces(plan: Plan, file: int) -> list[Trace]:
    return [Trace(file, index if file >= 0 else 0) for index in range(plan.case.ranks)]


def _with_traces(reports: list[Report], traces: Sequence[Trace]) -> list[Report]:
    """Where a rank failed, what each of them did last."""
    if any("error" in report for report in reports):
        for report, trace in zip(reports, traces, strict=True):
            report.setdefault("trace", trace.read())
    return reports


def _error(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


def _device(backend: str, rank: int) -> str:
    if backend != "nccl":
        return "cpu"
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def _timed(report: Report, run: Callable[[Report], None]) -> None:
    """Runs a rank; a failure is stamped, so that the first of several can be told, and those that follow from it."""
    try:
        run(report)
    except BaseException as error:
        report["failed_at"] = time.monotonic()
        report["lost_peer"] = _is_lost_peer(error)
        raise


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether a rank failed because another did: the backend's error, or one that was raised from it."""
    while error is not None:
        if isinstance(error, CollectiveFailed | RankLost):
            return True
        error = error.__cause__ or error.__context__
    return False


def _send(descriptor: int, report: Report) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as pipe:
        pipe.write(json.dumps(report).encode() + b"\n")
