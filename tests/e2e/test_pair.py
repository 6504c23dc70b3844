"""The healthy pair, over worlds, row counts, draft steps, padding and numerics: EQUAL in exact arithmetic."""

import itertools

import pytest

import optimized.chunks
import optimized.router
from fixtures.seams import edited
from spcheck.case import Case
from spcheck.judge.merge import total_choices
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case

PASSES = ("EQUAL", "EQUIVALENT")
POOL = EnginePool(limit=40)


def case(**options):
    return Case(**{"backend": "loopback", **options})


def assert_passes(case):
    comparison = compare_case(case, pool=POOL)
    passing = ("EQUAL",) if case.numerics == "exact" else PASSES
    assert comparison.verdict.outcome in passing, (case.id, comparison.verdict.findings)
    assert comparison.verdict.scheme == ("full-sp" if case.tp > 1 and case.scheme == "auto" else "tp")
    for contract in (comparison.rows, comparison.collectives, comparison.work):
        assert contract.checked > 0, case.id
        assert not contract.breaches, case.id
    return comparison


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 33])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_worlds_tokens_drafts_and_skipping(tp, tokens):
    for steps, skip in itertools.product((0, 1, 2, 3), (True, False)):
        comparison = assert_passes(case(tp=tp, requests=((tokens,),), mtp_steps=steps, skip_padding=skip))
        # 21 probes of a dense layer, 30 of a MoE layer, 42 of an MTP layer and draft step, 8 outside, 3 caches a layer;
        # 3 less a layer where no row has more than the 8 keys that are chosen, and nothing is scored.
        expected = 2 * 21 + 3 * 30 + 8 + 42 * steps + 3 * (6 if steps else 5)
        keys = [tokens] * 5 + [tokens + max(step, 0) for step in range(steps)]
        expected -= 3 * sum(n <= 8 for n in keys)
        assert comparison.compared == expected


@pytest.mark.parametrize("scheme", ["auto", "tp"])
@pytest.mark.parametrize("content", ["zero", "random", "nan"])
@pytest.mark.parametrize("skip", [True, False])
def test_graph_padding_never_reaches_a_real_row(scheme, content, skip):
    options = {"padding_content": content, "skip_padding": skip, "scheme": scheme, "mtp_steps": 2}
    for tp, requests, pad_to in ((2, (17,), 32), (4, (1,), 16), (3, (5, 1, 11), 24), (2, (3, 3), 6)):
        assert_passes(case(tp=tp, requests=(requests,), pad_to=pad_to, **options))


@pytest.mark.parametrize("requests", [(1, 1, 1), (5, 1, 11), (40,), (2, 9)])
@pytest.mark.parametrize("scheme", ["auto", "tp"])
def test_several_requests_and_auxiliary_states(requests, scheme):
    for aux in ((), (0,), (1, 3), (0, 1, 2, 3, 4, 5), (5,)):
        comparison = assert_passes(case(tp=2, requests=(requests,), aux_layers=aux, mtp_steps=2, scheme=scheme))
        assert {r.probe for r in comparison.results if r.probe.startswith("model.aux")} == {
            f"model.aux.{i}" for i in aux
        }


@pytest.mark.parametrize("tp", [6, 12])
def test_more_ranks_than_rows(tp):
    assert_passes(case(tp=tp, requests=((5,),), mtp_steps=2))


@pytest.mark.parametrize(
    "overrides",
    [
        (("model_type", "deepseek_v3"),),
        (("n_group", 1), ("topk_group", 1)),
        (("norm_topk_prob", False),),
        (("n_shared_experts", 2),),
        (("index_topk", 3),),
        (("index_topk", 64),),
        (("vocab_size", 251),),
        (("moe_layer_freq", 2),),
        (("first_k_dense_replace", 0),),
        (("mtp_zero_first_embedding", True),),
        (("fused_eh_norm", True),),
        (("latent_norm_eps", 1e-5), ("rms_norm_eps", 1e-5)),
    ],
    ids=lambda pairs: ",".join(f"{k}={v}" for k, v in pairs),
)
def test_other_models(overrides):
    for scheme in ("auto", "tp"):
        assert_passes(case(tp=2, requests=((17, 2),), mtp_steps=2, overrides=overrides, scheme=scheme))


def test_deepseek_v3_has_no_indexer():
    comparison = assert_passes(case(tp=2, requests=((17,),), overrides=(("model_type", "deepseek_v3"),)))
    assert not [r.probe for r in comparison.results if "indexer" in r.probe or "index_key" in r.probe]


def test_float32_within_its_bound():
    """Seeds whose values are well conditioned: the error stays below half of the bound, whatever the kernels."""
    for seed in range(2, 8):
        comparison = assert_passes(case(tp=2, requests=((17,),), numerics="float32", seed=seed))
        assert 1e-9 < max(r.max_rel for r in comparison.results) < 2e-5


def test_bfloat16_is_inconclusive_where_a_value_differs_and_replays_choices():
    """The candidate's odd experts score a tenth higher: more than any rounding, and less than half of a row."""
    tenth = "logits.sigmoid() * (1 + 0.1 * (torch.arange(logits.shape[-1]) % 2))"
    with edited(optimized.router.Score, "forward", "logits.sigmoid()", tenth) as calls:
        comparison = compare_case(case(tp=2, requests=((17,),), numerics="bfloat16"))
    assert calls.count
    choices = total_choices(comparison.results)
    assert choices.within > 0
    assert choices.beyond == 0
    assert choices.compared == choices.agreeing + choices.within
    assert comparison.verdict.outcome == "INCONCLUSIVE"
    assert comparison.verdict.exit_code == 3


def test_plain_float64_really_differs_and_by_rounding_only():
    """The two sides are not one computation seen twice."""
    comparison = assert_passes(case(tp=2, requests=((17,),), numerics="float64"))
    assert comparison.bitwise_equal < comparison.compared / 4
    assert 1e-16 < max(r.max_rel for r in comparison.results) < 1e-13


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_against_a_reference_on_one_rank(tp):
    for scheme, requests in itertools.product(("auto", "tp"), ((17,), (1,), (5, 1, 11))):
        assert_passes(case(tp=tp, requests=(requests,), mtp_steps=3, scheme=scheme, reference_world=1))
    assert_passes(case(tp=tp, requests=((17,),), mtp_steps=2, reference_world=1, numerics="float32", seed=5))


def test_attention_in_many_chunks_of_rows(monkeypatch):
    monkeypatch.setattr(optimized.chunks, "MAX_ELEMENTS", 1 << 10)
    for overrides in ((), (("model_type", "deepseek_v3"),)):
        assert_passes(case(tp=2, requests=((33, 5),), mtp_steps=2, overrides=overrides))
