import pytest
import torch
from test_optimized_helpers import on_ranks

from optimized.sp import SequenceParallel


def primitives(world):
    return SequenceParallel(world.group("tp", range(world.size)))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_shards_are_contiguous_blocks_with_zero_rows_at_the_end(tp, n, shape):
    x = torch.arange(1, 1 + n * max(1, torch.Size(shape).numel())).view(n, *shape)
    shards = on_ranks(tp, lambda world: primitives(world).sp_shard(x))
    m = -(-n // tp)
    assert [s.shape for s in shards] == [(m, *shape)] * tp
    joined = torch.cat(shards)
    assert joined.dtype == torch.int64
    assert torch.equal(joined[:n], x)
    assert not joined[n:].any()


def test_shard_is_never_a_view():
    for tp, n in [(1, 4), (2, 4), (2, 3), (4, 1)]:
        x = torch.ones(n, 3)
        shards = on_ranks(tp, lambda world, x=x: primitives(world).sp_shard(x))
        before = torch.cat(shards).clone()
        x.fill_(7)
        assert torch.equal(torch.cat(shards), before)


@pytest.mark.parametrize(("tp", "n"), [(1, 3), (2, 3), (3, 1), (4, 8)])
def test_gather_gives_the_shards_back_and_does_not_trim(tp, n):
    x = torch.randn(n, 4)

    def main(world):
        sp = primitives(world)
        return sp.sp_all_gather(sp.sp_shard(x))

    for gathered in on_ranks(tp, main):
        assert gathered.shape[0] == tp * -(-n // tp)
        assert torch.equal(gathered[:n], x)


@pytest.mark.parametrize(("tp", "n"), [(1, 3), (2, 3), (2, 4), (4, 2)])
def test_reduce_scatter_sums_and_keeps_the_own_block(tp, n):
    x = torch.arange(n * 2.0).view(n, 2)

    def main(world):
        sp = primitives(world)
        return sp.sp_reduce_scatter(x * (1 + world.rank)), sp.sp_shard(x * sum(range(1, tp + 1)))

    for got, expected in on_ranks(tp, main):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("mask", [None, [False, True, False]])
def test_rows_that_sp_adds_are_padding(mask):
    given = None if mask is None else torch.tensor(mask)
    masks = on_ranks(2, lambda world: primitives(world).sp_padding_mask(given, torch.zeros(3, 5)))
    assert torch.cat(masks).tolist() == [*(mask or [False] * 3), True]


def test_a_mask_of_another_length_is_refused():
    def main(world):
        with pytest.raises(ValueError, match="shape"):
            primitives(world).sp_padding_mask(torch.zeros(2, dtype=torch.bool), torch.zeros(3, 5))

    on_ranks(2, main)
