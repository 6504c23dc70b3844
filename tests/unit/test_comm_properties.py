"""Laws that tie the collectives to each other, on threads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spcheck.comm.loopback import run_loopback

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def run_group(size, main):
    return run_loopback(size, lambda world: main(world.group("tp", range(size))))


def arguments(size, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 3, generator=generator) for _ in range(size)]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 4), block=st.integers(0, 3), seed=st.integers(0, 1000))
def test_scattered_sums_together_are_the_whole_sum(size, block, seed):
    xs = arguments(size, size * block, seed)
    results = run_group(size, lambda tp: (tp.reduce_scatter(xs[tp.rank]), tp.all_reduce(xs[tp.rank])))
    for _, whole in results:
        assert torch.equal(torch.cat([own for own, _ in results]), whole)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_uneven_scattered_sums_gathered_are_the_whole_sum(sizes, seed):
    xs = arguments(len(sizes), sum(sizes), seed)

    def main(tp):
        return tp.all_gatherv(tp.reduce_scatterv(xs[tp.rank], sizes), sizes), tp.all_reduce(xs[tp.rank])

    assert all(torch.equal(gathered, whole) for gathered, whole in run_group(len(sizes), main))


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_gathering_a_split_is_identity(sizes, seed):
    (x,) = arguments(1, sum(sizes), seed)
    for result in run_group(len(sizes), lambda tp: tp.all_gatherv(x.split(sizes)[tp.rank], sizes)):
        assert torch.equal(result, x)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 4), seed=st.integers(0, 1000))
def test_all_to_all_there_and_back_is_identity(data, size, seed):
    traffic = [data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)) for _ in range(size)]
    xs = [arguments(1, sum(row), seed + rank)[0] for rank, row in enumerate(traffic)]

    def main(tp):
        send, receive = traffic[tp.rank], [row[tp.rank] for row in traffic]
        return tp.all_to_all(tp.all_to_all(xs[tp.rank], send, receive), receive, send)

    for x, result in zip(xs, run_group(size, main), strict=True):
        assert torch.equal(result, x)
