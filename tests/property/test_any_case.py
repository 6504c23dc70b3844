"""Any case that can exist is found EQUAL: worlds, dataflows, row counts, padding and drafts drawn at random."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spcheck.case import ALL2ALL_BACKENDS, Case
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case

POOL = EnginePool(limit=24)
WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (1, 6)]
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def requests_of(dp):
    here = st.lists(st.integers(1, 20), max_size=4).map(tuple)
    return st.lists(here, min_size=dp, max_size=dp).map(tuple)


def pairs_of(scheme):
    """The optimized model in this dataflow on either side, and from ``tp`` to it."""
    own = f"optimized:{scheme}"
    pairs = [{"candidate": own}, {"candidate": own, "reference_world": 1}, {"reference": own, "candidate": "reference"}]
    return pairs + ([{"reference": "optimized:tp", "candidate": own}] if scheme != "tp" else [])


@st.composite
def cases(draw):
    tp, dp = draw(st.sampled_from(WORLDS))
    requests = draw(requests_of(dp).filter(any))
    previous = draw(st.none() | requests_of(dp))
    most = max(sum(here) for here in (*requests, *(previous or ())))
    padding = draw(st.sampled_from(["none", "sizes", *range(10)]))
    adapters = draw(st.sampled_from([0, 0, 0, 1, 2]))
    expert_parallel = draw(st.sampled_from([True, True, True, False]))
    sp = tp > 1 and expert_parallel and not adapters
    scheme = draw(st.sampled_from(["tp", "moe-sp", "full-sp"] if sp else ["tp"]))
    sides = draw(st.sampled_from(pairs_of(scheme)))
    return Case(
        **sides,
        requests=requests,
        tp=tp,
        previous=previous,
        expert_parallel=expert_parallel,
        all2all_backend=draw(st.sampled_from(ALL2ALL_BACKENDS)),
        lora_rank=3 if adapters else 0,
        lora_adapters=adapters,
        model=draw(st.sampled_from(["dsv32-tiny", "dsv32-alternating"])),
        mtp_steps=draw(st.integers(0, 3)),
        aux_layers=tuple(sorted(draw(st.sets(st.integers(0, 5), max_size=3)))),
        pad_to=most + padding if isinstance(padding, int) else None,
        graph_sizes=GRAPH_SIZES if padding == "sizes" else (),
        skip_padding=draw(st.booleans()),
        # Stale rows without a previous step get one that fills the padded rows, which is a case of its own.
        padding_content=draw(st.sampled_from(["zero", "random", "nan", "stale"])),
        seed=draw(st.integers(0, 5)),
        backend="loopback",
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_healthy_pair_never_diverges(case):
    comparison = compare_case(case, POOL)
    assert comparison.verdict.outcome == "EQUAL", (case.id, comparison.verdict.findings)
