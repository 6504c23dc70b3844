"""Who is to blame, and where ranks parted: from reports alone."""

import pytest

from spcheck.case import Case
from spcheck.comm.divergence import find_divergence
from spcheck.judge.failure import divergence_sentence, explain, failure_sentence
from spcheck.launch.ranks import _Threads
from spcheck.plan.plan import make_plan
from spcheck.report.failure import failure_lines


def call(number, kind="all_reduce", shape=(5, 96), module="a", group="tp"):
    fields = {"subject": "s", "step": "target step 0", "dtype": "float64"}
    return {**fields, "number": number, "kind": kind, "group": group, "shape": shape, "module": module}


def report(rank, *calls, error=None, at=0.0, lost=False, waits=False, module="m", began=True):
    trace = {"began": began, "subject": "s", "step": "target step 0", "module": module, "last_probe": "m.in"}
    out = {"rank": rank, "trace": {**trace, "waits": waits, "collectives": list(calls)}}
    if error:
        kind, message = error
        out |= {"error": {"type": kind, "message": message}, "failed_at": at, "lost_peer": lost}
    return out


LOST = ("CollectiveFailed", "connection reset")
DIED = ("RankDied", "killed by signal 9")
HUNG = ("RankHung", "no rank began a step within 60 s")
WAITS = ("RankWaits", "no rank began a step within 60 s")
STOPPED = ("RankStopped", "no rank began a step within 60 s")


def test_a_run_that_came_to_its_end():
    assert explain([report(0), report(1)]) is None
    assert failure_sentence([report(0), report(1)]) is None
    assert failure_sentence([]) is None


def test_a_rank_that_died_is_named_before_one_that_lost_it():
    reports = [report(0, error=LOST, at=1.0, lost=True), report(1, call(0), error=DIED, at=2.0)]
    said = "rank 1 killed by signal 9 in m of s, target step 0, after all_reduce [5, 96] float64 on tp"
    assert failure_sentence(reports) == said
    failure = explain(reports)
    assert failure.first == 1
    assert [s.state for s in failure.ranks] == ["raised CollectiveFailed, as another rank was lost", DIED[1]]


def test_of_two_causes_the_first_counts():
    reports = [report(0, error=("ValueError", "late"), at=2.0), report(1, error=("KeyError", "early"), at=1.0)]
    assert failure_sentence(reports) == "rank 1 raised KeyError: early in m of s, target step 0"


def test_the_rank_for_which_the_others_wait_is_to_blame():
    waiting = report(0, call(0), error=WAITS, waits=True)
    hung = report(1, error=HUNG, at=1.0)
    assert failure_sentence([waiting, hung]) == (
        "no rank began a step within 60 s: rank 1 hangs in m of s, target step 0; "
        "rank 0 waits in all_reduce [5, 96] float64 on tp in a"
    )
    stopped = report(1, call(0), error=STOPPED, waits=True)
    assert "rank 1 is stopped by a signal in m" in failure_sentence([waiting, stopped])
    assert explain([waiting, stopped]).first == 1


def test_nobody_waits():
    assert failure_sentence([report(0, error=HUNG)]).endswith("target step 0; or --timeout is too short")


def test_all_wait():
    other = report(1, call(0, "all_gather"), error=WAITS, waits=True)
    ended = report(2)
    said = failure_sentence([report(0, call(0), error=WAITS, waits=True), other, ended])
    assert said.startswith("no rank began a step within 60 s: no rank can go on: rank 0 waits in all_reduce")
    assert said.endswith("rank 1 waits in all_gather [5, 96] float64 on tp in a; rank 2 has ended")


def test_a_rank_ended_after_a_failure_is_no_cause():
    reports = [report(0, error=HUNG, at=9.0, lost=True), report(1, error=("ValueError", "no"), at=1.0)]
    assert failure_sentence(reports).startswith("rank 1 raised ValueError: no")
    assert explain(reports).ranks[0].state == "was still running"


def test_a_thread_that_never_had_its_turn():
    reports = [report(0, error=HUNG), report(1, error=HUNG, began=False)]
    assert explain(reports).ranks[1].state == "has not begun"


SAME = [call(0), call(1, module="b")]


@pytest.mark.parametrize(
    ("mine", "its", "number"),
    [
        ([*SAME, call(2)], [*SAME, call(2, "all_gather")], 2),
        ([*SAME, call(2)], [*SAME, call(2, shape=(4, 96))], 2),
        ([*SAME, call(2)], [*SAME, call(2, module="c")], 2),
        ([*SAME, call(2)], [*SAME, call(2, group="ep")], 2),
        ([*SAME, call(2, "all_gatherv")], [*SAME, call(2, "all_gatherv", shape=(4, 96))], None),
        ([*SAME, call(2, "all_gatherv")], [*SAME, call(2, "all_gatherv", shape=(4, 95))], 2),
        ([*SAME, call(2)], SAME, None),  # behind, and nothing says that it goes another way
        ([], [], None),
    ],
)
def test_where_ranks_part(mine, its, number):
    found = find_divergence([report(0, *mine, error=WAITS), report(1, *its, error=WAITS)])
    assert (found and found.number) == number
    if found:
        assert found.before == SAME[-1]
        assert found.calls == {0: mine[2], 1: its[2]}


def test_a_rank_that_ended_too_early_has_parted():
    found = find_divergence([report(0, *SAME, error=WAITS), report(1, SAME[0])])
    assert (found.number, found.before, found.calls) == (1, SAME[0], {0: SAME[1], 1: None})
    assert divergence_sentence(found).endswith("rank 1 calls nothing more: it ended")


def test_equal_ranks_are_told_together():
    reports = [report(rank, call(0, shape=(3 + (rank == 1),)), error=WAITS) for rank in range(3)]
    assert divergence_sentence(find_divergence(reports)) == (
        "the ranks part at collective 1 of the run: ranks 0, 2 call all_reduce [3] float64 on tp in a; "
        "rank 1 calls all_reduce [4] float64 on tp in a"
    )


def test_what_a_ring_no_longer_holds_is_not_compared():
    old, new = [call(0), call(1), call(2)], [call(2), call(3)]
    assert find_divergence([report(0, *old, error=WAITS), report(1, *new, error=WAITS)]) is None


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "requests": ((5,),)},
        {"tp": 3, "requests": ((5, 1, 11),), "mtp_steps": 3, "aux_layers": (0, 2), "pad_to": 32},
        {"tp": 4, "requests": ((3,),), "mtp_steps": 2, "skip_padding": False},
        {"tp": 4, "requests": ((2,),), "scheme": "tp", "aux_layers": (1, 5)},
    ],
)
def test_healthy_ranks_never_part(options):
    """Down to the module of every collective, with idle ranks and experts without rows."""
    ranks = _Threads(make_plan(Case(**{"backend": "loopback", **options})))
    ranks.run()
    traces = [{"rank": rank, "trace": trace.read(), "error": {}} for rank, trace in enumerate(ranks.traces)]
    assert len(traces[0]["trace"]["collectives"]) > 30
    assert find_divergence(traces) is None


def test_calls_that_differ_only_in_their_step_are_told_with_it():
    later = {**call(0), "step": "draft step 0"}
    reports = [report(0, call(0), error=WAITS), report(1, later, error=WAITS), report(2, later, error=WAITS)]
    divergence = find_divergence(reports)
    assert divergence_sentence(divergence) == (
        "the ranks part at collective 1 of the run: "
        "rank 0 calls all_reduce [5, 96] float64 on tp in a, s, target step 0; "
        "ranks 1, 2 call all_reduce [5, 96] float64 on tp in a, s, draft step 0"
    )
    lines = list(failure_lines(explain(reports)))
    assert lines[2].split(maxsplit=3)[3] != lines[3].split(maxsplit=3)[3]
    assert "draft step 0" in lines[3]
