"""What threads do when ranks disagree, raise, end early or wait in a circle: an error at once, and no thread left."""

import contextvars
import pickle
import threading
import time

import pytest
import torch

from spcheck.comm.errors import CollectiveArgumentError, CollectiveMismatch, Deadlock, RankLost, WorldFailed
from spcheck.comm.loopback import run_loopback

ONES = torch.ones(4, 2)


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def fail(size, main):
    """How the world of `main(world, communicator over all ranks)` fails; at once, or the test does."""
    began = time.perf_counter()
    with pytest.raises(WorldFailed) as caught:
        run_loopback(size, lambda world: main(world, world.group("tp", range(size))))
    assert time.perf_counter() - began < 2
    return caught.value


MISMATCHES = {
    "kind": (lambda c: c.all_reduce(ONES), lambda c: c.all_gather(ONES), "all_reduce", "all_gather"),
    "shape": (lambda c: c.all_reduce(ONES), lambda c: c.all_reduce(ONES[:3]), "float32[4, 2]", "float32[3, 2]"),
    "dtype": (lambda c: c.all_gather(ONES), lambda c: c.all_gather(ONES.int()), "float32[4, 2]", "int32[4, 2]"),
    "sizes": (
        lambda c: c.reduce_scatterv(ONES, [1, 3]),
        lambda c: c.reduce_scatterv(ONES, [2, 2]),
        "sizes=[1, 3]",
        "sizes=[2, 2]",
    ),
    "gathered sizes": (
        lambda c: c.all_gatherv(ONES, [4, 3]),
        lambda c: c.all_gatherv(ONES, [3, 4]),
        "sizes=[4, 3]",
        "sizes=[3, 4]",
    ),
    "columns": (
        lambda c: c.all_gatherv(ONES, [4, 4]),
        lambda c: c.all_gatherv(ONES[:, :1], [4, 4]),
        "float32[4, 2]",
        "float32[4, 1]",
    ),
    "splits": (
        lambda c: c.all_to_all(ONES, [2, 2], [2, 2]),
        lambda c: c.all_to_all(ONES, [1, 3], [2, 3]),
        "send=[2, 2], receive=[2, 2]",
        "send=[1, 3], receive=[2, 3]",
    ),
    "source": (lambda c: c.broadcast(ONES, 0), lambda c: c.broadcast(ONES, 1), "source=0", "source=1"),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(ONES), "barrier()", "all_reduce(float32[4, 2])"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_names_both_ranks(name):
    first, second, *parts = MISMATCHES[name]
    failure = fail(2, lambda world, tp: (first, second)[world.rank](tp))
    assert [type(outcome.exception) for outcome in failure.outcomes] == [CollectiveMismatch] * 2
    assert failure.__cause__ is failure.primary.exception
    for part in ("rank 0 waits for", "rank 1 calls", "group 'tp' [0, 1]", *parts):
        assert part in str(failure.primary.exception)
    assert [outcome.state for outcome in failure.outcomes] == ["stopped", "raised"]


def test_a_mismatch_is_seen_before_the_last_rank_comes():
    def main(world, tp):
        return tp.all_reduce(ONES) if world.rank else tp.all_gather(ONES)

    failure = fail(3, main)
    assert isinstance(failure.primary.exception, CollectiveMismatch)
    assert [outcome.state for outcome in failure.outcomes] == ["stopped", "raised", "never started"]


def test_two_groups_in_another_order():
    def main(world, tp):
        groups = [tp, world.group("ep", (0, 1))]
        for group in groups if world.rank else reversed(groups):
            group.all_reduce(ONES)

    message = str(fail(2, main).primary.exception)
    assert "group 'ep'" in message
    assert "group 'tp'" in message


def test_a_deadlock_over_three_groups_lists_who_waits_for_what():
    def main(world, tp):
        pairs = [world.group(f"pair {i}", sorted((i, (i + 1) % 3))) for i in range(3)]
        pairs[world.rank].all_reduce(ONES)  # each waits for the next one round the circle

    failure = fail(3, main)
    assert all(isinstance(outcome.exception, Deadlock) for outcome in failure.outcomes)
    for rank in range(3):
        assert f"rank {rank} waits for all_reduce(float32[4, 2]) in group 'pair {rank}'" in str(failure)


def test_a_deadlock_is_seen_when_the_last_rank_outside_it_returns():
    def main(world, tp):
        pairs = [world.group(f"pair {i}", sorted((i, (i + 1) % 3))) for i in range(3)]
        if world.rank < 3:
            pairs[world.rank].barrier()

    failure = fail(4, main)
    assert isinstance(failure.primary.exception, Deadlock)
    assert failure.outcomes[3].state == "returned"


def test_a_raising_rank_is_the_primary_one_and_the_others_say_what_they_waited_for():
    def main(world, tp):
        tp.barrier()
        if world.rank == 1:
            raise ZeroDivisionError("by zero")
        tp.all_reduce(ONES)

    failure = fail(3, main)
    assert failure.primary.rank == 1
    assert isinstance(failure.__cause__, ZeroDivisionError)
    assert 'raise ZeroDivisionError("by zero")' in failure.primary.traceback
    for outcome in (failure.outcomes[0], failure.outcomes[2]):
        assert isinstance(outcome.exception, RankLost)
        assert outcome.state == "stopped"
        assert outcome.waited_for == "all_reduce(float32[4, 2]) in group 'tp' [0, 1, 2]"
        assert "rank 1 raised ZeroDivisionError: by zero" in str(outcome.exception)
    assert str(failure).startswith("rank 1 raised ZeroDivisionError: by zero; rank 0 stopped, waiting for all_reduce")


def test_a_rank_that_swallows_the_error_is_stopped_again():
    def main(world, tp):
        if world.rank == 1:
            raise ZeroDivisionError
        for _ in range(3):
            with pytest.raises(RankLost):
                tp.barrier()
        tp.barrier()

    assert fail(2, main).outcomes[0].state == "stopped"


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_returned_is_missed(early):
    failure = fail(2, lambda world, tp: None if world.rank == early else tp.all_reduce(ONES))
    assert failure.outcomes[early].state == "returned"
    assert failure.primary.rank == 1 - early
    assert f"rank {early} returned from its main; rank {1 - early} waited for" in str(failure)


def test_a_rank_that_returned_is_not_missed_by_other_groups():
    def main(world):
        pair = world.group("pair", (0, 2))
        return pair.all_reduce(torch.ones(1)).item() if pair else None

    assert run_loopback(3, main) == [2.0, None, 2.0]


def test_the_error_survives_pickling():
    failure = fail(2, lambda world, tp: None if world.rank else tp.all_reduce(ONES))
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)


BAD_ARGUMENTS = {
    "scalar": lambda c: c.all_gather(torch.tensor(1.0)),
    "indivisible": lambda c: c.reduce_scatter(ONES[:3]),
    "rows": lambda c: c.all_gatherv(ONES, [1, 2]),
    "sum": lambda c: c.reduce_scatterv(ONES, [1, 2]),
    "ranks": lambda c: c.all_gatherv(ONES, [4]),
    "negative": lambda c: c.reduce_scatterv(ONES, [5, -1]),
    "send": lambda c: c.all_to_all(ONES, [1, 1], [1, 1]),
    "own rows": lambda c: c.all_to_all(ONES, [2, 2], [1, 1]),
    "source": lambda c: c.broadcast(ONES, 2),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_an_argument_that_cannot_be_right(name):
    failure = fail(2, lambda world, tp: BAD_ARGUMENTS[name](tp))
    assert isinstance(failure.primary.exception, CollectiveArgumentError)


@pytest.mark.parametrize("ranks", [(), (0, 0), (1, 0), (0, 2), (-1, 0)])
def test_groups_that_cannot_be(ranks):
    failure = fail(2, lambda world, tp: world.group("bad", ranks))
    assert isinstance(failure.primary.exception, CollectiveArgumentError)


def test_only_one_rank_runs_at_a_time():
    running = []

    def main(world):
        for _ in range(20):
            running.append(world.rank)
            time.sleep(0.0005)
            assert running == [world.rank]
            running.clear()
            world.barrier()

    run_loopback(3, main)


def test_sums_are_taken_in_rank_order():
    addends = torch.tensor([1e8, 1.0, -1e8, 1.0])
    results = run_loopback(4, lambda world: world.group("tp", range(4)).all_reduce(addends[world.rank]).item())
    assert results == [((addends[0] + addends[1]) + addends[2] + addends[3]).item()] * 4


def test_settings_stay_inside():
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("given")
    threads = torch.get_num_threads()

    def main(world):
        seen = (variable.get(), torch.get_num_threads())
        variable.set(str(world.rank))
        world.barrier()
        return (*seen, variable.get())

    assert run_loopback(2, main) == [("given", 1, "0"), ("given", 1, "1")]
    assert variable.get() == "given"
    assert torch.get_num_threads() == threads


def test_swap_hands_over_references():
    mine = [{"x": torch.ones(1)} for _ in range(2)]
    received = run_loopback(2, lambda world: world.swap(mine))
    assert all(received[receiver][sender]["x"] is mine[receiver]["x"] for receiver in range(2) for sender in range(2))


def test_gradients_do_not_flow():
    x = torch.ones(2, requires_grad=True)
    assert not run_loopback(1, lambda world: world.group("tp", [0]).all_reduce(x))[0].requires_grad
