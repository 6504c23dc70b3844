"""Rows and owners, against numbers counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spcheck.phases import Phase, layer_of, phases_of


def test_one_request_of_three_tokens_over_two_ranks():
    (target,) = phases_of((3,), 0, None)
    assert target.shard_rows(2) == 2
    assert [target.owned(r, 2) for r in range(2)] == [range(2), range(2, 3)]
    assert [target.row(i) for i in range(3)] == [(0, 0), (0, 1), (0, 2)]


def test_graph_padding_moves_the_shard_border():
    (target,) = phases_of((5, 1), 0, 16)
    assert (target.real, target.padded, target.shard_rows(4)) == (6, 16, 4)
    assert [list(target.owned(r, 4)) for r in range(4)] == [[0, 1, 2, 3], [4, 5], [], []]
    assert target.row(5) == (1, 0)


def test_draft_steps_after_the_first_have_one_row_per_request():
    _, first, second, third = phases_of((5, 1, 11), 3, 32)
    assert (first.counts, first.padded) == ((5, 1, 11), 32)
    assert (second.counts, second.starts, second.padded) == ((1, 1, 1), (5, 1, 11), 3)
    assert [third.row(i) for i in range(3)] == [(0, 6), (1, 2), (2, 12)]


def test_a_padded_row_has_no_request():
    (target,) = phases_of((2,), 0, 4)
    with pytest.raises(IndexError):
        target.row(2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 12))
def test_every_real_row_has_exactly_one_owner(requests, padding, tp):
    phase = Phase("target", 0, (0,) * len(requests), tuple(requests), sum(requests) + padding)
    owned = [row for rank in range(tp) for row in phase.owned(rank, tp)]
    assert owned == list(range(phase.real))
    assert len({phase.row(i) for i in owned}) == phase.real


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.3.mlp.out", 3), ("model.layers.12", 12), ("model.norm.in", None), ("lm_head.out", None)],
)
def test_layer_of(name, layer):
    assert layer_of(name) == layer
