"""The pair is EQUAL over a pairwise covering array of cases, and in named corners; the array is complete."""

from itertools import combinations, product

import pytest
from tests.matrix.axes import AXES, DEEP, RULES, case_of, is_valid, requests_of

from spcheck.case import Case
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case
from tests.matrix.corners import CORNERS
from tests.matrix.make_covering import FILE, covering, read, text

ROWS = read()
CHUNKS = -(-len(ROWS) // 10)
SP, NEIGHBOURS = ("moe-sp", "full-sp"), ("equal", "idle", "one", "other")
IMPOSSIBLE = {
    ("tp", "scheme"): {*product([1], SP)},
    ("scheme", "expert_parallel"): {*product(SP, [False])},
    ("scheme", "lora_adapters"): {*product(SP, [1, 2])},
    ("dp", "others"): {*product([1], NEIGHBOURS), (2, "alone"), (3, "alone")},
    ("dp", "first"): {(1, "-")},  # nobody would have a token; so below, where all are as idle as the first
    ("first", "others"): {*product(["-"], ["alone", "equal", "idle"])},
    ("previous", "padding_content"): {("none", "stale")},
    ("tp", "pair"): {*product([1], ["alone", "from-tp", "from-full-sp"])},
    ("scheme", "pair"): {("tp", "from-tp"), ("full-sp", "from-full-sp")},
    ("expert_parallel", "pair"): {(False, "from-full-sp"), (False, "from-tp")},
    ("lora_adapters", "pair"): {*product([1, 2], ["from-full-sp", "from-tp"])},
}
PASSING = {"exact": ("EQUAL",), "float64": ("EQUAL", "EQUIVALENT"), "float32": ("EQUIVALENT",)}


def complaints(case, pool):
    """What a run did otherwise than asked, in words that begin with the case's id."""
    comparison = compare_case(case, pool=pool)
    verdict = comparison.verdict
    wrong = [] if verdict.outcome in PASSING[case.numerics] else [verdict.outcome, *map(str, verdict.findings)]
    asked = "reference" if case.candidate == "reference" else case.scheme
    wrong += [] if verdict.scheme == asked else [f"ran {verdict.scheme}"]
    for name in ("rows", "collectives", "work", "memory"):
        contract = getattr(comparison, name)
        wrong += [str(breach) for breach in contract.breaches]
        wrong += [] if contract.checked else [f"no {name} checked"]
    return ["\n  ".join([case.id, *wrong])] if wrong else []


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_covering_case_is_equal(chunk):
    """Every tenth or so, so that the chunks cost the same: the array is sorted by ranks."""
    pool = EnginePool()
    found = [c for row in ROWS[chunk::CHUNKS] for c in complaints(Case(**case_of(row)), pool)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CORNERS)
def test_a_corner_is_equal(name):
    found = complaints(Case(**CORNERS[name]), EnginePool())
    assert not found, found[0]


def test_the_array_is_what_the_generator_makes():
    assert FILE.read_text(encoding="utf-8") == text(covering())


def test_the_array_is_valid_and_small():
    assert len(ROWS) <= 300
    assert all(row.keys() == AXES.keys() for row in ROWS)
    assert all(row[axis] in AXES[axis] for row in ROWS for axis in AXES)
    assert all(map(is_valid, ROWS))
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_three_deep_values_meet_wherever_they_can():
    """By brute force over the axes that rules read, as below for pairs; for any two of the three are not enough."""
    read_by_rules = {axis for rule in RULES for axis in rule.axes}
    for axes in {axes for group in DEEP for axes in combinations(group, 3)}:
        seen = {tuple(row[axis] for axis in axes) for row in ROWS}
        for values in set(product(*(AXES[axis] for axis in axes))) - seen:
            fixed = dict(zip(axes, values, strict=True))
            free = {axis: (fixed[axis],) if axis in fixed else AXES[axis] for axis in AXES if axis in read_by_rules}
            assert not any(is_valid({**fixed, **dict(zip(free, row, strict=True))}) for row in product(*free.values()))


def pairs_outside(rows):
    """((axis, value), (axis, value)) of the pairs that no row holds."""
    for a, b in combinations(AXES, 2):
        seen = {(row[a], row[b]) for row in rows}
        yield from (((a, x), (b, y)) for x, y in product(AXES[a], AXES[b]) if (x, y) not in seen)


def test_every_pair_is_in_the_array_but_for_those_that_cannot_be():
    """Against a table by hand: a rule that is too strict would leave out a pair in the generator, too."""
    by_hand = {((a, x), (b, y)) for (a, b), values in IMPOSSIBLE.items() for x, y in values}
    assert set(pairs_outside(ROWS)) == by_hand


def test_a_pair_outside_the_array_is_in_no_valid_row():
    """By brute force over the whole product of the axes that rules read, with the pair held fixed.

    The other axes need no trial: no rule reads them, so whether a row is valid does not hang on them.
    """
    read_by_rules = {axis for rule in RULES for axis in rule.axes}
    for pair in pairs_outside(ROWS):
        fixed = {axis: (value,) for axis, value in pair}
        axes = {axis: fixed.get(axis, AXES[axis]) for axis in AXES if axis in read_by_rules | fixed.keys()}
        assert not any(is_valid(dict(zip(axes, values, strict=True))) for values in product(*axes.values())), pair


def test_a_rule_reads_no_axis_but_its_own():
    """What the search above rests on: with only its axes at hand, a rule says what it says of the full row."""
    for rule in RULES:
        for row in ROWS:
            assert rule.holds({axis: row[axis] for axis in rule.axes})


def test_no_case_is_in_the_array_twice():
    cases = [repr(sorted(case_of(row).items())) for row in ROWS]
    assert len(set(cases)) == len(cases)


def test_rows_reach_what_the_matrix_is_for():
    """Idle ranks at either end, fewer rows than ranks, nine and twelve ranks: asked of the cases, not of the axes."""
    batches = [(row, [sum(requests) for requests in requests_of(row)]) for row in ROWS]
    assert any(counts[0] == 0 for _, counts in batches)
    assert any(counts[-1] == 0 for _, counts in batches)
    assert any(0 < min(counts) < row["tp"] and row["scheme"] == "full-sp" for row, counts in batches)
    assert {row["tp"] * row["dp"] for row in ROWS} == {1, 2, 3, 4, 6, 8, 9, 12}
