"""Impossible cases are refused with one sentence, before a process starts; schemes resolve with a reason."""

import os

import pytest

from spcheck.case import Case
from spcheck.errors import UsageError
from spcheck.plan.plan import make_plan

TWO_LAYERS = (("num_nextn_predict_layers", 2),)


def case(**options):
    return Case(**{"requests": ((17,),), "tp": 2, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "outliers", "numerics": "float32"}, "--weights outliers cannot be judged in float32"),
        ({"tp": 0}, "--tp must be 1 or more"),
        ({"tp": 5}, "--tp 5 does not divide num_attention_heads 12"),
        ({"tp": 2, "overrides": (("n_routed_experts", 21), ("n_group", 3), ("topk_group", 2))},
         "--tp 2 does not divide n_routed_experts 21"),
        ({"requests": ((0,),)}, "at least 1 token, not 0"),
        ({"requests": ((3, -2),)}, "at least 1 token, not -2"),
        ({"pad_to": 10**22}, "is more than spcheck counts to"),
        ({"mtp_steps": 10**8, "overrides": (("max_position_embeddings", 2**31 - 1),)}, "more than spcheck counts to"),
        ({"seed": 10**20}, "--seed must be 0 or more and less than 2^63"),
        ({"overrides": (("rope_theta", 10**400),)}, "rope_theta must be float"),
        ({"requests": ()}, "there is no request"),
        ({"pad_to": 16}, "--pad-to 16 is less than the 17 tokens"),
        ({"model": "dsv99"}, "neither a preset (dsv3-tiny, dsv32-alternating, dsv32-tiny, dsv32-two-mtp) nor a folder"),
        ({"aux_layers": (6,)}, "--aux-layers 6 is outside 0..5"),
        ({"aux_layers": (-1,)}, "--aux-layers -1 is outside 0..5"),
        ({"mtp_steps": -1}, "--mtp-steps must be 0 or more"),
        ({"overrides": (("num_nextn_predict_layers", 0),)}, "needs an MTP layer"),
        ({"requests": ((4097,),)}, "4097 positions are more than max_position_embeddings 4096"),
        ({"requests": ((1,),), "cached": ((4096,),)},
         "1 new and 4096 cached tokens are more than max_position_embeddings 4096"),
        ({"requests": ((0,),), "cached": ((40,),)}, "a request of 40 cached tokens needs at least 1 new token, not 0"),
        ({"requests": ((3,),), "cached": ((-1,),)}, "a request cannot hold -1 cached tokens (--requests 3@-1)"),
        ({"requests": ((3, 1),), "cached": ((1,),)}, "cached tokens are given for [1] requests"),
        ({"requests": ((3,),), "previous": ((5000,),)}, "5000 positions are more than max_position_embeddings 4096"),
        ({"prefill_chunk": 0}, "--prefill-chunk must be 1 or more, not 0"),
        ({"generate": -1}, "--generate must be 0 or more, not -1"),
        ({"generate": 10**7}, "10000000 is more than spcheck counts to"),
        ({"scheme": "full-sp", "tp": 1}, "--scheme full-sp cannot be: tp is 1"),
        ({"candidate": "optimized:moe-sp", "tp": 1}, "--candidate optimized:moe-sp cannot be: tp is 1"),
        ({"scheme": "full-sp", "pp": 2}, "--scheme full-sp cannot be: a pipeline stage would receive shards (--pp 2)"),
        ({"scheme": "moe-sp", "lora_rank": 8, "lora_adapters": 1}, "cannot be: LoRA adapters present"),
        ({"scheme": "full-sp", "expert_parallel": False}, "--scheme full-sp cannot be: expert parallel off"),
        ({"pp": 2}, "--pp 2 is not supported yet"),
        ({"pp": 0}, "--pp must be 1 or more"),
        ({"lora_adapters": 1}, "--lora-adapters 1 needs --lora-rank"),
        ({"lora_rank": 4}, "--lora-rank 4 needs --lora-adapters"),
        ({"lora_rank": -4, "lora_adapters": 1}, "--lora-rank must be 0 to 512"),
        ({"lora_rank": 4, "lora_adapters": 10**6}, "--lora-adapters must be 0 to 64"),
        ({"requests": ((1,),) * 1024, "tp": 12}, "--dp 1024 x --tp 12 = 12288 ranks are more than 1024"),
        ({"candidate": "reference", "reference_world": 1, "pp": 2}, "--pp 2 is not supported yet"),
        ({"reference": "optimized", "candidate": "reference", "pp": 2}, "--pp 2 is not supported yet"),
        ({"requests": ((), ())}, "there is no request"),
        ({"requests": ((3,), ()), "previous": ((3,),)}, "--previous 3 is for 1 data-parallel rank, and there are 2"),
        ({"requests": ((3,), (0,))}, "at least 1 token, not 0 (--requests 3/0)"),
        ({"requests": ((3,),) * 3, "tp": 3}, "--dp 3 x --tp 3 = 9 ranks do not divide n_routed_experts 24"),
        ({"requests": ((3,),) * 3, "tp": 3, "expert_parallel": False},
         "--dp 3 x --tp 3 = 9 ranks do not divide moe_intermediate_size 48"),
        ({"pad_to": 32, "graph_sizes": (32,)}, "give --pad-to or --graph-sizes, not both"),
        ({"graph_sizes": (8, 4)}, "--graph-sizes 8,4 must be ascending"),
        ({"graph_sizes": (0, 4)}, "--graph-sizes 0,4 must be ascending, from 1 on"),
        ({"requests": ((3,), (17,)), "pad_to": 16}, "--pad-to 16 is less than the 17 tokens"),
        ({"previous": ((17,),), "requests": ((3,),), "pad_to": 16}, "--pad-to 16 is less than the 17 tokens"),
        ({"reference": "mine"}, "--reference mine is not one of reference, optimized, optimized:tp"),
        ({"candidate": "optimized:sp"}, "--candidate optimized:sp is not one of"),
        ({"candidate": "optimized:tp", "scheme": "full-sp"}, "--scheme full-sp contradicts --candidate optimized:tp"),
        ({"candidate": "reference"}, "reference and candidate are both reference"),
        ({"candidate": "reference", "scheme": "tp"}, "is for a candidate that has schemes"),
        ({"reference": "optimized:tp", "reference_world": 1}, "--reference-world 1 is for --reference reference"),
        ({"overrides": (("no_such_key", 1),)}, "unknown config key 'no_such_key'"),
        ({"overrides": (("hidden_size", 10**21),)}, "hidden_size must be at most 2147483647"),
        ({"overrides": (("hidden_size", "wide"),)}, "hidden_size must be int, not 'wide'"),
    ],
)  # fmt: skip
def test_refused(options, words):
    with pytest.raises(UsageError) as error:
        make_plan(case(**options))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "scheme", "words"),
    [
        ({}, "full-sp", "tp 2 > 1"),
        ({"scheme": "full-sp"}, "full-sp", "tp 2 > 1"),
        ({"tp": 1}, "tp", "tp is 1"),
        ({"scheme": "tp"}, "tp", "asked for with --scheme tp"),
        ({"candidate": "optimized:tp"}, "tp", "asked for with --candidate optimized:tp"),
        ({"all2all_backend": "naive"}, "full-sp", "expert parallel on, tp 2 > 1, backend naive"),
        ({"scheme": "moe-sp"}, "moe-sp", "expert parallel on, tp 2 > 1"),
        ({"requests": ((3,), (1,))}, "full-sp", "tp 2 > 1"),  # data parallelism neither asks for it nor forbids it
        ({"expert_parallel": False}, "tp", "expert parallel off"),
        ({"lora_rank": 4, "lora_adapters": 2}, "tp", "LoRA adapters present"),
        ({"candidate": "reference", "reference": "optimized"}, "reference", "the only dataflow"),
    ],
)
def test_the_scheme_and_its_reason(options, scheme, words):
    plan = make_plan(case(**options))
    assert plan.scheme == scheme
    assert words in plan.reason


def test_a_folder_without_config(tmp_path):
    with pytest.raises(UsageError, match=r"no readable config\.json"):
        make_plan(case(model=str(tmp_path)))


def test_a_config_that_is_no_file_or_no_json(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is not JSON"):
        make_plan(case(model=str(tmp_path)))
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"no readable config\.json"):
        make_plan(case(model=str(tmp_path)))


def rows_of(step):
    return [[part.rows for part in here] for here in step.parts]


def held(plan, layer, dp_rank=0):
    """Request -> the positions that the layer's caches must hold."""
    positions = {}
    for request, position in plan.cache_phase(f"model.layers.{layer}.self_attn.cache.latent", dp_rank).rows:
        positions.setdefault(request, []).append(position)
    return {r: range(p[0], p[-1] + 1) if p == list(range(p[0], p[-1] + 1)) else p for r, p in positions.items()}


def test_what_an_mtp_cache_must_hold():
    plan = make_plan(case(requests=((5, 1),), mtp_steps=3))
    assert plan.cache_phase("model.layers.0.self_attn.cache.latent", 0).counts == (5, 1)
    assert held(plan, 5) == {0: range(7), 1: range(3)}
    assert make_plan(case(mtp_steps=0)).cache_phase("model.layers.5.self_attn.cache.latent", 0).real == 0


def test_of_several_mtp_layers_each_holds_the_rows_of_its_own_draft_steps():
    plan = make_plan(case(requests=((1, 5),), cached=((40, 0),), mtp_steps=4, overrides=TWO_LAYERS))
    assert held(plan, 0) == {0: range(41), 1: range(5)}
    assert held(plan, 5) == {0: [*range(41), 42], 1: [*range(5), 6]}
    assert held(plan, 6) == {0: [41, 43], 1: [5, 7]}


def test_a_step_that_verifies_leaves_rejected_drafts_in_the_main_layers_alone():
    plan = make_plan(case(requests=((5,),), generate=1, mtp_steps=3, overrides=TWO_LAYERS))
    assert [(phase.kind, phase.counts, phase.drafts) for phase in plan.phases[0]][-1] == ("target", (4,), (3,))
    plan = plan.going_on(((1,),))
    assert [(p.counts, p.starts) for p in plan.phases[0][-4:]] == [
        ((4,), (5,)),
        ((2,), (5,)),
        ((1,), (7,)),
        ((1,), (8,)),
    ]
    assert held(plan, 0) == {0: range(9)}
    assert held(plan, 5) == {0: [*range(7), 8]}
    assert held(plan, 6) == {0: range(7, 8)}
    assert plan.forward_name("draft", 4) == "generated step 1's draft step 1"


def test_cached_tokens_come_in_a_step_of_their_own_that_is_not_compared():
    plan = make_plan(case(requests=((1, 5), (2,)), cached=((40, 0), (3,)), mtp_steps=2))
    prefix, own = plan.steps
    assert (rows_of(prefix), prefix.probed, prefix.draft_steps) == ([[40], [3]], False, 2)
    assert [[(p.request, p.start, p.rows) for p in here] for here in own.parts] == [
        [(0, 40, 1), (1, 0, 5)],
        [(0, 3, 2)],
    ]
    assert plan.own_step == 1
    assert plan.lengths(0) == [42, 6]
    assert plan.forward_name("draft", 0) == "cached prefix's draft step 0"


def test_a_long_prefix_is_cut_into_several_steps():
    plan = make_plan(case(requests=((1, 2),), cached=((1200, 513),)))
    prefixes = plan.steps[:-1]
    assert [[(p.request, p.start, p.rows) for p in step.parts[0]] for step in prefixes] == [
        [(0, 0, 512), (1, 0, 512)],
        [(0, 512, 512), (1, 512, 1)],
        [(0, 1024, 176)],
    ]
    assert all(part.goes_on for step in prefixes for part in step.parts[0])
    assert plan.own_step == 3


def test_a_request_at_the_limit_stops_drafting_and_generating():
    short = (("max_position_embeddings", 10),)
    plan = make_plan(case(requests=((9, 2), (5,)), mtp_steps=3, generate=2, overrides=short))
    own = [p for p in plan.phases[0] if p.step == 0]
    assert [(p.requests, p.starts) for p in own] == [
        ((0, 1), (0, 0)),
        ((0, 1), (0, 0)),
        ((0, 1), (9, 2)),
        ((1,), (3,)),
    ]
    assert [(p.request, p.start, p.rows, p.drafts) for p in plan.steps[1].parts[0]] == [(0, 9, 1, 0), (1, 2, 4, 3)]
    plan = plan.going_on(((0, 3), (3,)))
    assert [[part.request for part in here] for here in plan.steps[2].parts] == [[1], [0]]
    assert plan.steps[2].parts[1][0].drafts == 0  # it stands at the last position
    assert plan.lengths(0) == [10, 10]


def test_requests_of_the_step_before_come_behind_the_cases_own():
    plan = make_plan(case(requests=((5, 1), ()), previous=((2,), (3, 3)), mtp_steps=2))
    parts = [[[part.request for part in here] for here in step.parts] for step in plan.steps]
    assert parts == [[[2], [0, 1]], [[0, 1], []]]
    assert plan.prompts(0) == (5, 1, 2)
    assert plan.lengths(0) == [6, 2, 3]
    assert plan.prompts(1) == (3, 3)
    names = [plan.forward_name(phase.kind, phase.call) for phase in plan.phases[0]]
    assert names == [
        "previous step's target step",
        "previous step's draft step 0",
        "previous step's draft step 1",
        "target step",
        "draft step 0",
        "draft step 1",
    ]


def test_stale_rows_need_a_step_before_and_get_one_that_fills_the_batch():
    plan = make_plan(case(requests=((17,), ()), graph_sizes=(8, 24), padding_content="stale"))
    assert rows_of(plan.steps[0]) == [[24], [24]]
    short = (("max_position_embeddings", 21),)
    plan = make_plan(case(pad_to=50, padding_content="stale", mtp_steps=2, overrides=short))
    assert rows_of(plan.steps[0]) == [[21, 21, 8]]
    assert make_plan(case(padding_content="nan")).steps == (make_plan(case()).steps[0],)


def test_requests_use_adapters_in_turn_and_then_none():
    plan = make_plan(case(requests=((5, 1), (), (3, 2, 2)), lora_rank=4, lora_adapters=2))
    assert [plan.adapters(d) for d in range(3)] == [[0, 1], [], [-1, 0, 1]]
    assert make_plan(case()).adapters(0) == [-1]
