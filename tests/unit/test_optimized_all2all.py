"""Dispatch and combine alone, against experts that multiply a row by a number of their own."""

import pytest
import torch
from test_optimized_helpers import F64, Spy, on_ranks

from optimized.all2all import ALL2ALL_MANAGERS

NAN = float("nan")
WIDTH = 3
SIZES = [3, 1, 2]
OWNED = [range(2), range(4, 6), range(2, 4)]  # no rank of the group has experts 6 and 7
IDS = torch.tensor([[0, 1], [0, 4], [-1, -1], [5, 3], [6, 7], [2, 7]])
BACKENDS = sorted(ALL2ALL_MANAGERS)


def all_rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, WIDTH, dtype=F64, generator=generator), torch.rand(6, 2, dtype=F64, generator=generator)


def summands(hidden, ids, weights, experts):
    """What the holder of these experts adds: expert e multiplies by e + 1."""
    mine = (ids >= experts.start) & (ids < experts.stop)
    factors = torch.where(mine, weights * (ids + 1), 0).sum(dim=1, keepdim=True)
    return torch.where(mine.any(dim=1, keepdim=True), hidden * factors, 0)


def run(world, backend, sizes, owned, hidden, ids, weights):
    group = Spy(world.group("ep", range(world.size)), [])
    manager = ALL2ALL_MANAGERS[backend](group, owned)
    own = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
    rows, combine = manager.dispatch(hidden[own], ids[own], weights[own], sizes)
    assert all(x.dtype == y.dtype for x, y in zip(rows, (hidden, ids, weights), strict=True))
    out = combine(summands(*rows, owned[world.rank]))
    return rows, out, [(name, shape) for _, name, shape in group.calls]


def dense(hidden, ids, weights, owned):
    return sum(summands(hidden, ids, weights, experts) for experts in owned)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_comes_back_with_the_sum_of_its_experts(backend):
    hidden, weights = all_rows()
    results = on_ranks(3, lambda world: run(world, backend, SIZES, OWNED, hidden, IDS, weights))
    got = torch.cat([out for _, out, _ in results])
    assert [out.shape[0] for _, out, _ in results] == SIZES
    torch.testing.assert_close(got, dense(hidden, IDS, weights, OWNED), rtol=1e-15, atol=1e-15)
    assert not got[[2, 4]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", range(6))
def test_what_is_no_number_stays_in_its_row(backend, row):
    hidden, weights = all_rows()
    hidden[row] = NAN
    results = on_ranks(3, lambda world: run(world, backend, SIZES, OWNED, hidden, IDS, weights))
    broken = torch.cat([out for _, out, _ in results]).isnan().any(dim=1)
    assert broken.tolist() == [i == row and i not in (2, 4) for i in range(6)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_of_which_every_rank_has_a_part_get_all_rows_that_chose_any(backend):
    hidden, weights = all_rows()
    owned = [range(8)] * 3
    results = on_ranks(3, lambda world: run(world, backend, SIZES, owned, hidden, IDS, weights))
    got = torch.cat([out for _, out, _ in results])
    torch.testing.assert_close(got, dense(hidden, IDS, weights, owned), rtol=1e-14, atol=1e-14)


def test_a_row_travels_only_to_ranks_with_a_chosen_expert():
    hidden, weights = all_rows()
    results = on_ranks(3, lambda world: run(world, "all_to_all", SIZES, OWNED, hidden, IDS, weights))
    for (rows, _, _), expected in zip(results, [[0, 1], [1, 3], [3, 5]], strict=True):
        for arrived, sent in zip(rows, (hidden, IDS, weights), strict=True):
            assert torch.equal(arrived, sent[expected])


def test_collectives_and_their_shapes():
    hidden, weights = all_rows()

    def calls(backend):
        return [c for _, _, c in on_ranks(3, lambda world: run(world, backend, SIZES, OWNED, hidden, IDS, weights))]

    assert calls("allgather_reducescatter")[0] == [
        ("all_gatherv", (3, WIDTH)),
        ("all_gatherv", (3, 2)),
        ("all_gatherv", (3, 2)),
        ("reduce_scatterv", (6, WIDTH)),
    ]
    for rank_calls in calls("naive"):
        shapes = [(m, width) for width in (WIDTH, 2, 2) for m in SIZES]
        assert rank_calls == [*(("broadcast", shape) for shape in shapes), ("all_reduce", (6, WIDTH))]
    assert calls("all_to_all")[0] == [
        ("all_to_all", (3,)),
        ("all_to_all", (3, WIDTH)),  # row 0 to rank 0, row 1 to ranks 0 and 1
        ("all_to_all", (3, 2)),
        ("all_to_all", (3, 2)),
        ("all_to_all", (2, WIDTH)),
    ]


@pytest.mark.parametrize(("backend", "count"), [("allgather_reducescatter", 4), ("naive", 4), ("all_to_all", 5)])
def test_a_group_of_one_calls_the_same(backend, count):
    hidden, weights = all_rows()
    ((_, out, calls),) = on_ranks(1, lambda world: run(world, backend, [6], [range(8)], hidden, IDS, weights))
    torch.testing.assert_close(out, dense(hidden, IDS, weights, [range(8)]), rtol=1e-15, atol=1e-15)
    assert len(calls) == count


@pytest.mark.parametrize("backend", BACKENDS)
def test_announced_rows_must_be_the_rows(backend):
    def main(world):
        manager = ALL2ALL_MANAGERS[backend](world.group("ep", range(2)), [range(1), range(1, 2)])
        ids = torch.zeros(3, 1, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"rank {world.rank} announced 2 rows and dispatches 3"):
            manager.dispatch(torch.zeros(3, 4), ids, torch.zeros(3, 1), [2, 2])

    on_ranks(2, main)
