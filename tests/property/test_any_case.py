"""Any case that can exist is found EQUAL: worlds, dataflows, rows, padding, drafts and limits drawn at random."""

from itertools import chain

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spcheck.case import ALL2ALL_BACKENDS, Case
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case

POOL = EnginePool(limit=24)
WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (1, 6)]
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def requests_of(dp, request):
    here = st.lists(request, max_size=4).map(tuple)
    return st.lists(here, min_size=dp, max_size=dp).map(tuple)


def new_and_cached():
    """Of each request: a prompt, a token to decode, or a chunk."""
    return st.one_of(
        st.tuples(st.integers(1, 20), st.just(0)),
        st.tuples(st.just(1), st.integers(1, 20)),
        st.tuples(st.integers(1, 6), st.integers(1, 20)),
    )


def pairs_of(scheme):
    """The optimized model in this dataflow on either side, and from ``tp`` to it."""
    own = f"optimized:{scheme}"
    pairs = [{"candidate": own}, {"candidate": own, "reference_world": 1}, {"reference": own, "candidate": "reference"}]
    return pairs + ([{"reference": "optimized:tp", "candidate": own}] if scheme != "tp" else [])


def overrides(longest):
    """Config keys: among them a limit, maybe, that requests meet when they draft or generate."""
    return st.fixed_dictionaries(
        {"num_hidden_layers": st.integers(3, 5), "num_nextn_predict_layers": st.integers(1, 3)},
        optional={
            "vocab_size": st.integers(1, 4),
            "max_position_embeddings": st.integers(longest, longest + 3),
            "index_topk": st.sampled_from([2, 30]),
        },
    )


@st.composite
def cases(draw):
    tp, dp = draw(st.sampled_from(WORLDS))
    batches = draw(requests_of(dp, new_and_cached()).filter(any))
    requests, cached = (tuple(tuple(tokens[i] for tokens in here) for here in batches) for i in (0, 1))
    previous = draw(st.none() | requests_of(dp, st.integers(1, 20)))
    most = max(sum(here) for here in (*requests, *(previous or ())))
    longest = max(chain(map(sum, chain(*batches)), *(previous or ())))
    padding = draw(st.sampled_from(["none", "sizes", *range(10)]))
    adapters = draw(st.sampled_from([0, 0, 0, 1, 2]))
    expert_parallel = draw(st.sampled_from([True, True, True, False]))
    sp = tp > 1 and expert_parallel and not adapters
    scheme = draw(st.sampled_from(["tp", "moe-sp", "full-sp"] if sp else ["tp"]))
    settings_of_config = draw(overrides(longest))
    # More draft steps than the model has positions are refused.
    most_drafts = min(3, settings_of_config.get("max_position_embeddings", 3))
    sides = draw(st.sampled_from(pairs_of(scheme)))
    return Case(
        **sides,
        requests=requests,
        cached=cached,
        generate=draw(st.integers(0, 2)),
        prefill_chunk=draw(st.none() | st.integers(1, 9)),
        overrides=tuple(settings_of_config.items()),
        tp=tp,
        previous=previous,
        expert_parallel=expert_parallel,
        all2all_backend=draw(st.sampled_from(ALL2ALL_BACKENDS)),
        lora_rank=3 if adapters else 0,
        lora_adapters=adapters,
        model=draw(st.sampled_from(["dsv32-tiny", "dsv32-alternating"])),
        weights=draw(st.sampled_from(["plain", "plain", "ties"])),
        mtp_steps=draw(st.integers(0, most_drafts)),
        aux_layers=tuple(sorted(draw(st.sets(st.integers(0, 3), max_size=3)))),
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
