"""Both covering arrays are complete, valid, small, and what the generator makes. No case runs here."""

from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from tests.matrix.decoding import DECODING
from tests.matrix.prompts import PROMPTS, requests_of

MOST = {"covering": 300, "decoding": 130}
SP = ("moe-sp", "full-sp")
IMPOSSIBLE_WORLDS = {
    ("tp", "scheme"): {*product([1], SP)},
    ("scheme", "expert_parallel"): {*product(SP, [False])},
    ("tp", "pair"): {*product([1], ["alone", "from-tp"])},
    ("expert_parallel", "pair"): {(False, "from-tp")},
}
IMPOSSIBLE = {
    "covering": {
        **IMPOSSIBLE_WORLDS,
        ("scheme", "lora_adapters"): {*product(SP, [1, 2])},
        ("dp", "others"): {*product([1], ["equal", "idle", "one", "other"]), (2, "alone"), (3, "alone")},
        ("dp", "first"): {(1, "-")},  # nobody would have a token; so below, where all are as idle as the first
        ("first", "others"): {*product(["-"], ["alone", "equal", "idle"])},
        ("previous", "padding_content"): {("none", "stale")},
        ("tp", "pair"): {*product([1], ["alone", "from-tp", "from-full-sp"])},
        ("scheme", "pair"): {("tp", "from-tp"), ("full-sp", "from-full-sp")},
        ("expert_parallel", "pair"): {(False, "from-full-sp"), (False, "from-tp")},
        ("lora_adapters", "pair"): {*product([1, 2], ["from-full-sp", "from-tp"])},
    },
    "decoding": {
        **IMPOSSIBLE_WORLDS,
        ("scheme", "lora_adapters"): {*product(SP, [2])},
        ("dp", "others"): {
            *product([1], ["same", "idle", "idle first", "one decode", "prefill", "other"]),
            (2, "alone"),
        },
        ("scheme", "pair"): {("tp", "from-tp")},
        ("lora_adapters", "pair"): {(2, "from-tp")},
        ("mtp_steps", "mtp_layers"): {(0, 2), (1, 2)},
        ("mtp_steps", "fused_eh_norm"): {(0, True)},
    },
}


of_each_space = pytest.mark.parametrize("space", [PROMPTS, DECODING], ids=lambda space: space.name)


def outside(space, groups):
    """((axis, value), ...) of those values of the groups of axes that meet in no row of the array."""
    rows = space.read()
    for axes in groups:
        seen = {tuple(row[axis] for axis in axes) for row in rows}
        for values in product(*(space.axes[axis] for axis in axes)):
            if values not in seen:
                yield tuple(zip(axes, values, strict=True))


@cache
def valid_rows(space):
    """By brute force whether each row of the whole product of the axes that rules read is valid, a dimension an axis.

    The other axes need no trial: no rule reads them, so whether a row is valid does not hang on them. A rule is handed
    its own axes alone.
    """
    axes = [axis for axis in space.axes if any(axis in rule.axes for rule in space.rules)]
    valid = np.ones([len(space.axes[axis]) for axis in axes], dtype=bool)
    for rule in space.rules:
        own = [axis for axis in axes if axis in rule.axes]
        rows = product(*(space.axes[axis] for axis in own))
        holds = np.array([rule.holds(dict(zip(own, row, strict=True))) for row in rows])
        valid &= holds.reshape([len(space.axes[axis]) if axis in own else 1 for axis in axes])
    return axes, valid


def can_be(space, meeting):
    axes, valid = valid_rows(space)
    fixed = {axis: space.axes[axis].index(value) for axis, value in meeting}
    return valid[tuple(fixed.get(axis, slice(None)) for axis in axes)].any()


@of_each_space
def test_the_array_is_what_the_generator_makes(space):
    assert space.file.read_text(encoding="utf-8") == space.text(space.covering())


@of_each_space
def test_the_array_is_valid_and_small(space):
    rows = space.read()
    assert len(rows) <= MOST[space.name]
    assert all(row.keys() == space.axes.keys() for row in rows)
    assert all(row[axis] in space.axes[axis] for row in rows for axis in space.axes)
    assert all(map(space.is_valid, rows))
    assert len({str(row) for row in rows}) == len(rows)


@of_each_space
def test_every_pair_is_in_the_array_but_for_those_that_cannot_be(space):
    """Against a table by hand: a rule that is too strict would leave out a pair in the generator, too."""
    table = IMPOSSIBLE[space.name].items()
    by_hand = {((a, x), (b, y)) for (a, b), values in table for x, y in values}
    assert set(outside(space, combinations(space.axes, 2))) == by_hand


@of_each_space
def test_values_outside_the_array_are_in_no_valid_row(space):
    """Of pairs, and of the deep threes: any two of three may meet where all three do."""
    groups = [*combinations(space.axes, 2), *(axes for deep in space.deep for axes in combinations(deep, 3))]
    assert not [meeting for meeting in outside(space, groups) if can_be(space, meeting)]


@of_each_space
def test_a_rule_reads_no_axis_but_its_own(space):
    """What the search above rests on: with only its axes at hand, a rule says what it says of the full row."""
    for rule in space.rules:
        for row in space.read():
            assert rule.holds({axis: row[axis] for axis in rule.axes})


@of_each_space
def test_no_case_is_in_the_array_twice(space):
    cases = [repr(sorted(space.case_of(row).items())) for row in space.read()]
    assert len(set(cases)) == len(cases)


def test_prompts_reach_what_their_array_is_for():
    """Idle ranks at either end, fewer rows than ranks, nine and twelve ranks: asked of the cases, not of the axes."""
    batches = [(row, [sum(requests) for requests in requests_of(row)]) for row in PROMPTS.read()]
    assert any(counts[0] == 0 for _, counts in batches)
    assert any(counts[-1] == 0 for _, counts in batches)
    assert any(0 < min(counts) < row["tp"] and row["scheme"] == "full-sp" for row, counts in batches)
    assert {row["tp"] * row["dp"] for row, _ in batches} == {1, 2, 3, 4, 6, 8, 9, 12}
