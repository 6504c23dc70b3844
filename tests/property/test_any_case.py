"""Any case that can exist is found EQUAL: row counts, padding, ranks and drafts drawn at random."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spcheck.case import Case
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case

POOL = EnginePool(limit=24)


@st.composite
def cases(draw):
    requests = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    padding = draw(st.none() | st.integers(0, 9))
    return Case(
        requests=(requests,),
        tp=draw(st.sampled_from([1, 2, 3, 4, 6])),
        scheme=draw(st.sampled_from(["auto", "tp"])),
        mtp_steps=draw(st.integers(0, 3)),
        aux_layers=tuple(sorted(draw(st.sets(st.integers(0, 5), max_size=3)))),
        pad_to=None if padding is None else sum(requests) + padding,
        skip_padding=draw(st.booleans()),
        padding_content=draw(st.sampled_from(["zero", "random", "nan"])),
        seed=draw(st.integers(0, 5)),
        reference_world=draw(st.sampled_from([None, 1])),
        backend="loopback",
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_healthy_pair_never_diverges(case):
    comparison = compare_case(case, POOL)
    assert comparison.verdict.outcome == "EQUAL", (case.id, comparison.verdict.findings)
