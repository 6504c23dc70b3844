"""Impossible cases are refused with one sentence, before a process starts; schemes resolve with a reason."""

import os

import pytest

from spcheck.case import Case
from spcheck.errors import UsageError
from spcheck.plan import make_plan


def case(**options):
    return Case(**{"requests": (17,), "tp": 2, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "--tp must be 1 or more"),
        ({"tp": 5}, "--tp 5 does not divide num_attention_heads 12"),
        ({"tp": 2, "overrides": (("n_routed_experts", 21), ("n_group", 3), ("topk_group", 2))},
         "--tp 2 does not divide n_routed_experts 21"),
        ({"requests": (0,)}, "at least 1 token, not 0"),
        ({"requests": (3, -2)}, "at least 1 token, not -2"),
        ({"pad_to": 10**22}, "is more than spcheck counts to"),
        ({"mtp_steps": 10**8, "overrides": (("max_position_embeddings", 2**31 - 1),)}, "more than spcheck counts to"),
        ({"seed": 10**20}, "--seed must be 0 or more and less than 2^63"),
        ({"overrides": (("rope_theta", 10**400),)}, "rope_theta must be float"),
        ({"requests": ()}, "there is no request"),
        ({"pad_to": 16}, "--pad-to 16 is less than the 17 tokens"),
        ({"model": "dsv99"}, "neither a preset (dsv32-alternating, dsv32-tiny) nor a folder"),
        ({"aux_layers": (6,)}, "--aux-layers 6 is outside 0..5"),
        ({"aux_layers": (-1,)}, "--aux-layers -1 is outside 0..5"),
        ({"mtp_steps": -1}, "--mtp-steps must be 0 or more"),
        ({"overrides": (("num_nextn_predict_layers", 0),)}, "needs an MTP layer"),
        ({"overrides": (("num_nextn_predict_layers", 2),)}, "2 MTP layers are not supported yet"),
        ({"requests": (4097,)}, "4097 positions are more than max_position_embeddings 4096"),
        ({"scheme": "full-sp", "tp": 1}, "--scheme full-sp cannot be: sequence parallelism needs tp > 1"),
        ({"scheme": "full-sp", "overrides": (("pipeline_parallel_size", 2),)}, "a pipeline stage would receive shards"),
        ({"scheme": "full-sp", "overrides": (("lora_rank", 8),)}, "a LoRA adapter is chosen per row"),
        ({"overrides": (("pipeline_parallel_size", 2),)}, "pipeline_parallel_size 2 is not supported yet"),
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
        ({"scheme": "tp"}, "tp", "asked for"),
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


def test_what_an_mtp_cache_must_hold():
    plan = make_plan(case(requests=(5, 1), mtp_steps=3))
    assert plan.cache_phase("model.layers.0.self_attn.cache.latent").counts == (5, 1)
    assert plan.cache_phase("model.layers.5.self_attn.cache.latent").counts == (7, 3)
    assert make_plan(case(mtp_steps=0)).cache_phase("model.layers.5.self_attn.cache.latent").real == 0
