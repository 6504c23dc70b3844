"""What a rank leaves behind for others to read, whatever became of it."""

import os
import signal

from spcheck.comm.trace import _FIRST, _SLOT, RING, Trace, collective_text, last_collective


def collectives(trace):
    return [(c["number"], c["step"], c["kind"], c["shape"], c["module"]) for c in trace.read()["collectives"]]


def test_a_rank_that_never_began():
    trace = Trace().read()
    assert trace == {
        "began": False,
        "subject": "",
        "step": "",
        "module": "",
        "last_probe": None,
        "waits": False,
        "collectives": [],
    }
    assert last_collective(trace) is None


def test_another_process_reads_what_a_killed_one_wrote():
    trace = Trace()
    child = os.fork()
    if child == 0:
        trace.begin("some.subject", "target step 0")
        trace.module("model.layers.0")
        trace.probe("model.layers.0.in")
        trace.enter("all_reduce", "tp", (5, 96), "float64", "model.layers.0")
        trace.leave()
        trace.enter("barrier", "spcheck")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    seen = trace.read()
    assert seen["subject"], seen["step"] == ("some.subject", "target step 0")
    assert (seen["module"], seen["last_probe"]) == ("model.layers.0", "model.layers.0.in")
    assert (seen["waits"], trace.waits_in()) == (True, 1)
    assert [collective_text(c) for c in seen["collectives"]] == [
        "all_reduce [5, 96] float64 on tp",
        "barrier (spcheck's own)",
    ]
    assert last_collective(seen)["kind"] == "all_reduce"


def test_the_ring_keeps_the_last_ones():
    trace = Trace()
    trace.begin("s", "step")
    for i in range(RING + 3):
        trace.enter("all_reduce", "tp", (i,))
        trace.leave()
    assert [c[0] for c in collectives(trace)] == list(range(3, RING + 3))
    assert trace.waits_in() is None


def test_a_torn_entry_is_skipped():
    trace = Trace()
    trace.begin("s", "step")
    for kind in ("all_reduce", "all_gather", "barrier"):
        trace.enter(kind, "tp")
    trace._memory[_FIRST + _SLOT + 9] ^= 1  # the second, half written
    assert [c[2] for c in collectives(trace)] == ["all_reduce", "barrier"]
    trace._memory[_FIRST + 2 * _SLOT : _FIRST + 2 * _SLOT + 2] = b"\xff\xff"  # a length beyond its slot
    assert [c[2] for c in collectives(trace)] == ["all_reduce"]


def test_what_is_too_long_loses_its_end():
    trace = Trace()
    trace.begin("subject", "step")
    trace.module("m" * 400)
    trace.enter("all_reduce", "tp", (1, 2), "float64", "ü" * 300)
    trace.enter("k" * 400, "tp")  # nothing of use is left of it
    assert trace.read()["module"] == "m" * (_SLOT - 6)
    ((number, step, kind, shape, module),) = collectives(trace)
    assert (number, step, kind, shape) == (0, "step", "all_reduce", (1, 2))
    assert module.startswith("üüü")


def test_an_exchange_that_raises_is_never_left():
    trace = Trace()
    try:
        with trace.waiting("exchange"):
            raise ValueError
    except ValueError:
        pass
    assert trace.waits_in() == 0
