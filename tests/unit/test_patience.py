"""A deadline that moves with the ranks, and no further."""

import time

from spcheck.comm.trace import Trace
from spcheck.launch.patience import Patience, earlier


def test_a_rank_that_gets_on_is_waited_for():
    traces = [Trace(), Trace()]
    patience = Patience(time.monotonic() + 0.2, 100.0, traces)
    assert 0 < patience.left() <= 0.2
    traces[1].begin("a.subject", "target step")
    assert patience.left() > 90
    before = patience.left()
    time.sleep(0.01)
    assert patience.left() < before, "and not longer because it was looked at again"


def test_one_that_does_not_is_not():
    trace = Trace()
    trace.begin("a.subject", "target step")
    patience = Patience(time.monotonic() - 1, 0.05, [trace])
    time.sleep(0.06)
    trace.module("model.layers.0")
    trace.enter("all_reduce", "tp")
    assert patience.left() == 0


def test_a_fixed_deadline_stays():
    trace = Trace()
    patience = Patience(time.monotonic() + 0.2, None, [trace])
    trace.begin("a.subject", "target step")
    assert patience.left() <= 0.2


def test_the_host_gives_up_before_its_parent_whenever_each_of_them_looks():
    assert earlier(60.0) == 58.0
    trace = Trace()
    now = time.monotonic()
    host, parent = (Patience(now, seconds, [trace]) for seconds in (earlier(2.0), 2.0))
    trace.begin("a.subject", "target step")
    first = host.left()
    time.sleep(0.05)
    assert host.left() < first
    assert 0.15 < parent.left() - host.left() < 0.25
