"""Kills, stops, hangs and breaks ranks at random points, many times in one process: ``python -m tests.e2e.trials``.

One process imports torch and runs the host's own function over and over, so that a trial costs a fork and not an
import. Words: what to do, backend, seed, number of trials. Exit 0 and one line per trial if all went as they must.
"""

import gc
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch
from torch.nn.modules import module as torch_module

import spcheck.comm.process as process
from spcheck.case import Case
from spcheck.judge.failure import explain, failure_sentence
from spcheck.judge.verdict import conclude
from spcheck.launch.files import MeetingPlace
from spcheck.launch.ranks import run_processes, run_threads
from spcheck.plan.plan import make_plan
from spcheck.report.json import to_json
from spcheck.report.text import to_text

RELEASE = threading.Event()  # lets threads that hang go on, so that the next trial starts clean


def the_deed_of_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def the_deed_of_late_kill():
    """From another thread, at any moment from here on: inside a collective, in C code, in an exchange of the tool."""
    delay = random.uniform(0, 0.02)
    threading.Thread(target=lambda: (time.sleep(delay), the_deed_of_kill())).start()


def the_deed_of_exit():
    os._exit(3)


def the_deed_of_raise():
    raise ValueError("as planned")


def the_deed_of_stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def the_deed_of_hang():
    RELEASE.wait()
    raise SystemExit("released")


STATE = {
    "kill": "killed by signal 9",
    "late_kill": "killed by signal 9",
    "exit": "ended with exit code 3 and no report",
    "raise": "raised ValueError",
    "stop": "is stopped by a signal",
    "hang": "hangs",
}
OVERDUE = ("stop", "hang")


class Planned:
    """Counts what the modules of this rank do, and does the deed at the planned number. Installed before the fork.

    Number 0 is the moment before a forked rank joins the world, while the others wait for it there.
    """

    def __init__(self):
        self.rank = self.at = self.deed = None
        self._counts = {}
        self._shared = mmap.mmap(-1, 16)
        self._open_world = process.open_world
        process.open_world = self._joining
        torch_module.register_module_forward_pre_hook(lambda *_: self._step())
        torch_module.register_module_forward_hook(lambda *_: self._step())

    def plan(self, rank, at, deed):
        self.rank, self.at, self.deed = rank, at, deed
        self._counts.clear()
        self._shared[8:] = bytes(8)

    @property
    def steps(self):
        """Those of rank 0 in the last run."""
        return struct.unpack("q", self._shared[:8])[0]

    @property
    def done(self):
        """Whether the deed was come to: a rank has its own number of modules, and a slow machine its own time."""
        return any(self._shared[8:])

    def _joining(self, backend, rank, *rest):
        if (rank, 0) == (self.rank, self.at):
            self._shared[8] = 1
            self.deed()
        return self._open_world(backend, rank, *rest)

    def _step(self):
        rank = self._rank()
        self._counts[rank] = count = self._counts.get(rank, 0) + 1
        if rank == 0:
            self._shared[:8] = struct.pack("q", count)
        if rank == self.rank and count == self.at:
            self._shared[8] = 1
            self.deed()

    def _rank(self):
        name = threading.current_thread().name
        if name.startswith("rank "):
            return int(name.removeprefix("rank "))
        return torch.distributed.get_rank()


def run(plan, backend, deadline):
    if backend == "loopback":
        return run_threads(plan, deadline=deadline)
    with closing(MeetingPlace()) as meeting:
        return run_processes(plan, backend, meeting.fresh(), deadline)


def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


def handles():
    """What this process has open, by what it is; a socket or a memory file would show here."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(handle))
        except OSError:  # the one that lists the folder
            continue
    return sorted(found)


def traces_left():
    return {
        "files": sorted(os.listdir(tempfile.gettempdir())),
        "shared memory": sorted(p.name for p in Path("/dev/shm").iterdir() if p.stat().st_uid == os.getuid()),
        "handles": handles(),
        "children": children(),
        "threads": sorted(t.name for t in threading.enumerate()),
    }


@contextmanager
def nothing_left():
    before = traces_left()
    yield
    RELEASE.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank ") or thread.name == "all ranks":
            thread.join(10)
    RELEASE.clear()
    after = traces_left()
    assert after == before, f"left behind: {before} before, {after} after"


def check(plan, reports, rank, what, step):
    failure = explain(reports, plan.case.tp)
    assert failure is not None, "no rank failed"
    told = {state.rank: state for state in failure.ranks}
    assert failure.first == rank, (failure, failure_sentence(reports))
    assert told[rank].state == STATE[what], told
    assert failure.divergence is None, failure.divergence
    sentence = failure_sentence(reports)
    assert f"rank {rank} {STATE[what]}" in sentence, sentence
    if what in ("raise", "hang"):
        assert f"the_deed_of_{what}" in failure.stack, failure.stack
    if what in OVERDUE:
        others = [state.state for state in failure.ranks if state.rank != rank]
        assert all(state.startswith("waits in ") for state in others), told
    assert told[rank].step
    if step:
        between = told[rank].step == "comparison"
        assert told[rank].subject in ([""] if between else ["reference.subject", "optimized.subject"]), told
    elif what != "late_kill":
        assert told[rank].step == "start"
    comparison = conclude(plan, reports, {"backend": "test"}, sentence)
    assert comparison.verdict.outcome == "FAILED"
    assert f"rank {rank}" in to_text(comparison)
    assert json.loads(to_json(comparison))["failure"]["first"] == rank
    return sentence


def healthy(planned, plan, backend):
    """Steps of a run without a deed, and the seconds that one with a deed may take."""
    begun = time.monotonic()
    with nothing_left():
        reports = run(plan, backend, None)
    assert not any("error" in report for report in reports), reports
    return planned.steps, max(1.5, 3 * (time.monotonic() - begun))


def trial(planned, plan, backend, what, at, patience):
    """One deed; None if it was not come to."""
    rank = random.randrange(plan.case.ranks)
    planned.plan(rank, at, globals()[f"the_deed_of_{what}"])
    with nothing_left():
        begun = time.monotonic()
        reports = run(plan, backend, begun + (patience if what in OVERDUE else 60.0))
        if not planned.done:
            return None
        sentence = check(plan, reports, rank, what, at)
    return f"tp {plan.case.tp}, dp {plan.case.dp}, step {at}, {time.monotonic() - begun:.1f} s: {sentence}"


def main(what, backend, seed, trials):
    gc.freeze()
    random.seed(f"{what} {backend} {seed}")
    planned = Planned()
    worlds = [(((5,),), 2), (((5,),), 3), (((5,), (3, 2)), 2)]
    plans = [make_plan(Case(requests, tp, backend=backend)) for requests, tp in worlds]
    steps, patience = healthy(planned, plans[0], backend)
    done = 0
    while done < int(trials):
        last = steps * 3 // 4 if what == "late_kill" else steps  # a late one must not come after the end
        at = random.randrange(1, last + 1) if done or backend == "loopback" else 0
        line = trial(planned, random.choice(plans), backend, what, at, patience)
        if line is None:
            patience *= 2
            assert patience < 60, "no run comes to its deed"
        else:
            done += 1
            print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
