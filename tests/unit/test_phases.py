"""Rows and owners, against numbers counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spcheck.plan.phases import GraphPadding, Phase, layer_of, phases_of
from spcheck.plan.steps import Part, Step

UNPADDED = GraphPadding(None, (), agreed=False)
CAPTURED = (1, 2, 4, 8, 16, 24, 32)


def step(*tokens, mtp_steps=0, first=0):
    """New requests on each data-parallel rank, numbered from ``first`` on."""
    return Step("", tuple(tuple(Part(first + i, 0, n) for i, n in enumerate(here)) for here in tokens), mtp_steps, 100)


def alone(tokens, mtp_steps=0, pad_to=None):
    (phases,) = phases_of([step(tokens, mtp_steps=mtp_steps)], GraphPadding(pad_to, (), agreed=False))
    return phases


def test_one_request_of_three_tokens_over_two_ranks():
    (target,) = alone((3,))
    assert target.shard_rows(2) == 2
    assert [target.owned(r, 2) for r in range(2)] == [range(2), range(2, 3)]
    assert [target.row(i) for i in range(3)] == [(0, 0), (0, 1), (0, 2)]


def test_graph_padding_moves_the_shard_border():
    (target,) = alone((5, 1), pad_to=16)
    assert (target.real, target.padded, target.shard_rows(4)) == (6, 16, 4)
    assert [list(target.owned(r, 4)) for r in range(4)] == [[0, 1, 2, 3], [4, 5], [], []]
    assert target.row(5) == (1, 0)
    assert target.last_rows == [(0, 4), (1, 0)]


def test_draft_steps_after_the_first_have_one_row_per_request():
    _, first, second, third = alone((5, 1, 11), 3, 32)
    assert (first.counts, first.padded) == ((5, 1, 11), 32)
    assert (second.counts, second.starts, second.padded) == ((1, 1, 1), (5, 1, 11), 3)
    assert [third.row(i) for i in range(3)] == [(0, 6), (1, 2), (2, 12)]


def test_a_padded_row_has_no_request():
    (target,) = alone((2,), pad_to=4)
    with pytest.raises(IndexError):
        target.row(2)


def test_an_idle_rank_has_one_row_and_owns_none():
    busy, idle = phases_of([step((5, 1), (), mtp_steps=2)], UNPADDED)
    assert [phase.padded for phase in idle] == [1, 1, 1]
    assert [phase.real for phase in idle] == [0, 0, 0]
    assert [phase.padded for phase in busy] == [6, 6, 2]
    assert [list(idle[0].owned(r, 2)) for r in range(2)] == [[], []]


@pytest.mark.parametrize(
    ("rows", "agreed", "target", "later"),
    [
        ((17, 3, 0), False, [24, 4, 1], [24, 4, 1]),
        ((17, 3, 0), True, [24, 24, 24], [24, 24, 24]),
        ((8, 4), True, [8, 8], [8, 8]),  # both have a graph of just their rows, and must run the same one
        ((33, 3), True, [33, 33], [33, 33]),  # one row more than the largest graph
        ((33, 40), True, [33, 40], [33, 40]),  # nobody runs a graph
    ],
)
def test_captured_sizes(rows, agreed, target, later):
    padding = GraphPadding(None, CAPTURED, agreed=agreed)
    assert padding.padded(rows) == target
    assert padding.padded(rows, later_draft=True) == later


def test_a_fixed_size_is_for_the_targets_rows():
    padding = GraphPadding(20, (), agreed=True)
    assert padding.padded((17, 0)) == [20, 20]
    assert padding.padded((3, 0), later_draft=True) == [3, 1]


def test_two_steps_count_their_forwards_on():
    first = step((9,), (2, 2), mtp_steps=2, first=1)
    here, there = phases_of([first, step((4,), (), mtp_steps=2)], GraphPadding(None, CAPTURED, agreed=True))
    assert [(p.kind, p.call, p.draft) for p in here] == [
        ("target", 0, 0),
        ("draft", 0, 0),
        ("draft", 1, 1),
        ("target", 1, 0),
        ("draft", 2, 0),
        ("draft", 3, 1),
    ]
    assert [p.requests for p in here] == [(1,)] * 3 + [(0,)] * 3
    assert [p.padded for p in there] == [16, 16, 2, 4, 4, 1]


def test_a_step_of_more_rows_than_the_fixed_size_runs_unpadded():
    assert GraphPadding(20, (), agreed=False).padded((21,)) == [21]
    assert GraphPadding(20, (), agreed=True).padded((21, 3)) == [21, 21]


def test_rows_that_are_sampled():
    verifying = Step("", ((Part(0, 10, 4, 3), Part(1, 7, 1, 0)),), 2, 100, accepted=((1, 0),))
    ((target, first, second),) = phases_of([verifying], UNPADDED)
    assert target.sampled_rows == [(0, 10), (0, 11), (0, 12), (0, 13), (1, 7)]
    assert (target.samples, target.keys, target.recounted) == ([4, 1], 14, False)
    assert target.units("request") == [(0, 13), (1, 7)]
    assert (first.rows, first.recounted, first.drafts) == ([(0, 10), (0, 11), (1, 7)], True, None)
    assert second.rows == second.sampled_rows == [(0, 12), (1, 8)]


def test_of_a_step_whose_accepted_drafts_are_unknown_there_is_the_target_alone():
    verifying = Step("", ((Part(0, 10, 4, 3),),), 2, 100)
    ((target,),) = phases_of([verifying], UNPADDED)
    assert target.drafts == (3,)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 12))
def test_every_real_row_has_exactly_one_owner(requests, padding, tp):
    numbers, zeros = tuple(range(len(requests))), (0,) * len(requests)
    phase = Phase("target", 0, numbers, zeros, tuple(requests), sum(requests) + padding)
    owned = [row for rank in range(tp) for row in phase.owned(rank, tp)]
    assert owned == list(range(phase.real))
    assert len({phase.row(i) for i in owned}) == phase.real


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.3.mlp.out", 3), ("model.layers.12", 12), ("model.norm.in", None), ("lm_head.out", None)],
)
def test_layer_of(name, layer):
    assert layer_of(name) == layer
