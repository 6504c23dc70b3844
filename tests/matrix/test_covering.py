"""The pair is EQUAL over the covering arrays of cases, and in named corners."""

import pytest

from spcheck.case import Case
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case
from tests.matrix.corners import CORNERS
from tests.matrix.decoding import DECODING
from tests.matrix.decoding_corners import DECODING_CORNERS
from tests.matrix.prompts import PROMPTS

PLAIN = ("EQUAL", "EQUIVALENT")  # whether two correct sides round alike is the processor's business
PASSING = {"exact": ("EQUAL",), "float64": PLAIN, "float32": PLAIN}
CHUNKS = {space: -(-len(space.read()) // 10) for space in (PROMPTS, DECODING)}


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


@pytest.mark.parametrize(
    ("space", "chunk"),
    [pytest.param(space, i, id=f"{space.name}-{i}") for space, count in CHUNKS.items() for i in range(count)],
)
def test_a_covering_case_is_equal(space, chunk):
    """Every tenth or so, so that the chunks cost the same: the array is sorted by cost."""
    pool = EnginePool()
    rows = space.read()[chunk :: CHUNKS[space]]
    found = [c for row in rows for c in complaints(Case(**space.case_of(row)), pool)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CORNERS)
def test_a_corner_is_equal(name):
    found = complaints(Case(**CORNERS[name]), EnginePool())
    assert not found, found[0]


@pytest.mark.parametrize("name", DECODING_CORNERS)
def test_a_corner_of_decoding_is_equal(name):
    found = complaints(Case(**DECODING_CORNERS[name]), EnginePool())
    assert not found, found[0]
