"""Which keys of a config.json are read, checked, passed over or refused, and what an override does to the file."""

import json
from pathlib import Path

import pytest

from reference.config import ConfigError, YarnConfig, parse_config
from tests.unit.published import FP8, KIMI_K2, PUBLISHED, V3, V32, YARN

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
SHARED = ROOT.parent / "shared"
FILES = [*SHARED.glob("spec/model_configs/*.json"), *SHARED.glob("oracle/*/config.json")]
OTHER_MODELS = {"deepseek_v2", "glm_moe_dsa", "gpt_oss"}


@pytest.fixture
def raw():
    return json.loads(PRESET.read_text())


def without_quantization(raw):
    return {key: value for key, value in raw.items() if key != "quantization_config"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave True is not supported"),
        ({"indexer_types": ["full"] * 3 + ["shared"] * 2}, "indexer_types with the entry 'shared' is not supported"),
        ({"indexer_types": 3}, "indexer_types must have an entry for each layer, not be 3"),
        ({"index_topk_freq": 4}, "index_topk_freq 4 is not supported"),
        ({"index_topk_pattern": "FFSFS"}, "index_topk_pattern with the entry 'S' is not supported"),
        ({"index_share_for_mtp_iteration": True}, "index_share_for_mtp_iteration True is not supported"),
        ({"layer_types": ["indexed_attention", "full_attention"]}, "layer_types with the entry 'full_attention'"),
        ({"sliding_window": 128}, r"sliding_window 128 is not supported \(only null\)"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"ep_size": 8}, "ep_size 8 is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype 'bfloat16' is not supported"),
        ({"swiglu_limit": 7.0}, "unknown key 'swiglu_limit', which may change the model"),
        ({"rope_thetas": 7.0}, r"unknown key 'rope_thetas', which may change the model \(did you mean rope_theta\?\)"),
        ({"yarn": {}}, "unknown key 'yarn'"),
        ({"rope_scaling": YARN | {"attention_factor": 2.0}}, "rope_scaling has the unknown key 'attention_factor'"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate False of rope_scaling is not supported"),
        ({"rope_scaling": {"factor": 40}}, "factor of rope_scaling is for the type yarn, and the type is default"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters contradicts rope_scaling"),
    ],
)
def test_a_key_that_changes_the_model_is_refused(raw, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config(raw | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "indexer_types": ["full"] * 5,
            "index_topk_freq": 1,
            "index_topk_pattern": "FFFFF",
            "index_skip_topk_offset": 3,
        },
        {"index_topk_pattern": None, "indexer_rope_interleave": False, "layer_types": ["indexed_attention"] * 5},
        {"_note": "mine", "_name_or_path": "", "head_dim": 192, "dtype": "float32", "use_cache": False},
        {"swiglu_limit": None, "rope_scaling": {**YARN, "attention_factor": None, "truncate": True}},
    ],
)
def test_keys_that_change_nothing(raw, changes):
    assert parse_config(raw | changes).num_hidden_layers == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    published = PUBLISHED[name]
    config = parse_config(without_quantization(published))
    assert config.n_routed_experts == published["n_routed_experts"]
    assert config.has_indexer == (name == "V3.2")
    with pytest.raises(ConfigError, match="quantized checkpoints"):
        parse_config(published)


def test_kimi_k2_is_read_as_v3():
    config = parse_config(without_quantization(KIMI_K2))
    assert config.model_type == "deepseek_v3"
    assert config.yarn == YarnConfig(32.0, 4096, 1.0, 1, 1.0, 1.0)
    assert parse_config(without_quantization(KIMI_K2 | {"model_type": "deepseek_v3"})) == config
    with pytest.raises(ConfigError, match="index_topk cannot be set: model_type kimi_k2 has no indexer"):
        parse_config(without_quantization(KIMI_K2), {"index_topk": 4})


@pytest.mark.skipif(not FILES, reason="the configs are not part of the project")
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_configs_beside_the_project(file):
    published = without_quantization(json.loads(file.read_text()))
    if published["model_type"] in OTHER_MODELS:
        with pytest.raises(ConfigError, match=r"model_type .* is not supported"):
            parse_config(published)
    else:
        assert parse_config(published).hidden_size == published["hidden_size"]


@pytest.mark.parametrize("kind", ["DeepseekV3Config", "DeepseekV32Config"])
def test_what_transformers_writes(kind):
    transformers = pytest.importorskip("transformers")
    written = getattr(transformers, kind)()
    for use_diff in (False, True):
        raw = json.loads(written.to_json_string(use_diff=use_diff))
        assert parse_config(raw).num_hidden_layers == 61


def test_an_override_of_a_nested_key(raw):
    assert parse_config(raw, {"rope_scaling.mscale_all_dim": 0.5}).yarn == YarnConfig(6, 512, 32, 1, 0.9, 0.5)
    assert raw["rope_scaling"]["mscale_all_dim"] == 1.2
    block = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 512}
    newer = {k: v for k, v in raw.items() if not k.startswith("rope_")} | {"rope_parameters": block}
    config = parse_config(newer, {"rope_parameters.factor": 4, "rope_parameters.rope_theta": 700.0})
    assert (config.yarn.factor, config.rope_theta) == (4, 700.0)
    assert parse_config(newer, {"rope_theta": 300.0}).rope_theta == 300.0


def test_an_override_of_a_whole_block(raw):
    assert parse_config(raw, {"rope_scaling": None}).yarn is None
    assert parse_config(raw, {"rope_scaling": YARN}).yarn == YarnConfig(40, 4096, 32, 1, 1.0, 1.0)
    config = parse_config(raw, {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})
    assert (config.yarn, config.rope_theta) == (None, 9.0)


def test_a_block_is_made_where_there_is_none(raw):
    del raw["rope_scaling"]
    settings = {"rope_scaling.type": "yarn", "rope_scaling.factor": 4}
    config = parse_config(raw, settings | {"rope_scaling.original_max_position_embeddings": 64})
    assert config.yarn == YarnConfig(4, 64)


def test_quantization_may_be_taken_away():
    assert parse_config(V32, {"quantization_config": None}).index_topk == 2048
    with pytest.raises(ConfigError, match="quantized checkpoints"):
        parse_config(without_quantization(V3), {"quantization_config": FP8})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rope_scaling.mscal": 1}, r"unknown config key 'rope_scaling.mscal' \(did you mean rope_scaling.mscale\?\)"),
        ({"rope_scaling.factor.x": 1}, "unknown config key 'rope_scaling.factor.x'"),
        ({"hidden_size.x": 1}, "unknown config key 'hidden_size.x'"),
        ({"rope_parameters.factor": 2}, "cannot be set: this config's rotary settings are in rope_scaling"),
        ({"rope_parameters": None}, "rope_parameters cannot be set: this config's rotary settings are in rope_scaling"),
        ({"torch_dtype": "float32"}, "config key 'torch_dtype' cannot be set: it changes nothing that is computed"),
        ({"_note": 1}, "config key '_note' cannot be set: it changes nothing that is computed"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave True is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 contradicts num_attention_heads 12"),
        ({"rope_scaling": None, "rope_scaling.factor": 2}, "factor of rope_scaling is for the type yarn"),
        ({"rope_scaling": [1], "rope_scaling.factor": 2}, "rope_scaling must be an object"),
        ({"rope_theta": 5.0, "rope_scaling.rope_theta": 6.0}, "rope_theta 5.0 contradicts rope_theta 6.0"),
    ],
)
def test_overrides_that_are_refused(raw, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config(raw, settings)


def test_what_repeats_an_overridden_key_follows(raw):
    raw |= {"num_local_experts": 24, "qk_head_dim": 26, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}
    settings = {"num_attention_heads": 6, "n_routed_experts": 48, "v_head_dim": 12, "qk_nope_head_dim": 16}
    config = parse_config(raw, settings | {"num_hidden_layers": 4})
    assert (config.num_attention_heads, config.n_routed_experts, config.num_hidden_layers) == (6, 48, 4)
    with pytest.raises(ConfigError, match="mlp_layer_types contradicts"):
        parse_config(raw | {"mlp_layer_types": ["dense"] * 5}, {"v_head_dim": 12})


def test_overrides_that_say_what_the_file_says(raw):
    settings = {"num_key_value_heads": 12, "hidden_act": "silu", "index_topk_freq": 1}
    assert parse_config(raw, settings) == parse_config(raw)
