"""A host serves one case after the other; one that fails costs its host, and no other case."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spcheck.case import Case
from spcheck.launch.parent import ProcessHost
from spcheck.launch.threads import ThreadHost
from spcheck.plan.plan import make_plan
from spcheck.run import run, run_once
from spcheck.worker.built import EnginePool

SMALL = Case(requests=((3,),), tp=2, mtp_steps=0)
LONG = replace(SMALL, requests=((300,),), mtp_steps=3)
BACKENDS = ("gloo", "loopback")


def process(host):
    return host._running._process.pid


def resident(pid):
    """KiB."""
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
    return int(line.split()[1])


def numbers(comparison):
    return [(r.probe, r.call, r.rows, r.max_rel, r.worst) for r in comparison.results]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_process_serves_cases_of_other_sizes(backend):
    cases = [
        replace(SMALL, requests=((n,),), tp=tp, seed=n, backend=backend) for n, tp in ((3, 2), (1, 3), (5, 1), (3, 2))
    ]
    with ProcessHost() as host:
        seen = []
        for case in cases:
            seen.append(run(case, host))
            assert host._running is not None
        pids = {process(host)}
        assert [c.verdict.outcome for c in seen] == ["EQUAL"] * 4
        assert numbers(seen[0]) == numbers(seen[3])
        run(cases[0], host)
        assert {process(host)} == pids
    alone = run_once(make_plan(cases[1]), ThreadHost())
    assert numbers(alone) == numbers(seen[1])


def killed_soon(host, pick):
    """Kills a process of a host that runs, a moment later."""

    def kill():
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.01)
            running = host._running
            if running is not None and (target := pick(running._process.pid)):
                time.sleep(0.3)
                os.kill(target, signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def first_rank(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if len(children) == 2 else None


@pytest.mark.parametrize(
    ("backend", "pick"), [("gloo", first_rank), ("gloo", lambda pid: pid), ("loopback", lambda pid: pid)]
)
def test_a_process_that_is_killed_costs_its_case_and_no_other(backend, pick):
    with ProcessHost() as host:
        assert run(replace(SMALL, backend=backend), host).verdict.outcome == "EQUAL"
        before = process(host)
        killer = killed_soon(host, pick)
        verdict = run(replace(LONG, backend=backend), host).verdict
        killer.join()
        assert verdict.outcome == "FAILED"
        assert "killed by signal 9" in verdict.findings[0].message
        assert run(replace(SMALL, backend=backend), host).verdict.outcome == "EQUAL"
        assert process(host) != before
        last = process(host)
    assert not Path(f"/proc/{last}").exists()


def test_a_host_that_died_between_two_cases_costs_none():
    with ProcessHost() as host:
        run(SMALL, host)
        os.kill(process(host), signal.SIGKILL)
        os.waitid(os.P_PID, process(host), os.WEXITED | os.WNOWAIT)
        assert run(SMALL, host).verdict.outcome == "EQUAL"


def test_threads_and_processes_never_share_a_process():
    """A process that has computed may hold a lock of a thread pool that a fork would inherit."""
    with ProcessHost() as host:
        pids = []
        for backend in ("loopback", "gloo", "loopback"):
            assert run(replace(SMALL, backend=backend), host).verdict.outcome == "EQUAL"
            pids.append(process(host))
    assert len(set(pids)) == 3


def test_the_memory_of_a_host_does_not_grow_with_its_cases():
    with ProcessHost() as host:
        case = replace(SMALL, backend="loopback")
        for seed in range(8):  # until the allocator has what it needs
            run(replace(case, seed=seed), host)
        before = resident(process(host))
        for seed in range(8, 20):
            run(replace(case, seed=seed), host)
        assert resident(process(host)) - before < 40_000, "twelve cases whose engines take about 28 MiB each"


def test_the_coarser_grid_is_tried_by_every_host():
    host = ThreadHost(EnginePool())
    assert run(SMALL, host).plan.grid.name == "A"
    wide = replace(SMALL, weights="outliers")
    once = run_once(make_plan(wide), host)
    assert once.wants_coarser_grid
    again = run(wide, host)
    assert (again.plan.grid.name, again.verdict.outcome) == ("B", "EQUAL")
