"""reference.config: what a published file may say, and the one sentence that refuses the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reference.config import ConfigError, YarnConfig, load_config, parse_config

PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"


@pytest.fixture
def raw():
    return json.loads(PRESET.read_text())


def test_a_published_file(raw):
    config = parse_config(raw)
    assert (config.hidden_size, config.num_attention_heads, config.index_topk) == (96, 12, 8)
    assert config.rope_theta == 10000.0
    assert config.yarn == YarnConfig(6, 512, 32, 1, 0.9, 1.2)
    assert config.has_indexer
    assert list(config.mtp_layers) == [5]
    assert [config.is_moe_layer(i) for i in range(6)] == [False, False, True, True, True, True]
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 2e-6)


def test_a_published_file_does_not_say_the_eps_of_the_latents(raw):
    del raw["latent_norm_eps"]
    assert parse_config(raw).latent_norm_eps == 1e-6


def test_both_spellings_of_the_rotary_settings(raw):
    block = {"rope_type": "yarn", "rope_theta": raw["rope_theta"], **raw["rope_scaling"]}
    block.pop("type")
    other = {k: v for k, v in raw.items() if not k.startswith("rope_")} | {"rope_parameters": block}
    assert parse_config(other) == parse_config(raw)


def test_a_v3_file_has_no_indexer(raw):
    assert not parse_config(raw | {"model_type": "deepseek_v3"}).has_indexer


def test_overrides_come_last(raw):
    config = parse_config(raw, {"num_hidden_layers": 3, "mtp_zero_first_embedding": True})
    assert config.num_hidden_layers == 3
    assert config.mtp_zero_first_embedding


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_size": "96"}, "hidden_size must be int"),
        ({"hidden_size": True}, "hidden_size must be int"),
        ({"q_lora_rank": None}, "q_lora_rank must be int"),
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"n_shared_experts": 0}, "n_shared_experts must be positive"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be 0 or more"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"n_group": 5}, "n_group 5 does not divide"),
        ({"n_group": 24, "topk_group": 8}, "at least 2 experts"),
        ({"topk_group": 7}, "topk_group 7 is more than"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok 13 is more than the 12"),
        ({"index_topk": None}, "needs index_n_heads"),
        ({"index_head_dim": 6}, "index_head_dim 6 is less than"),
        ({"quantization_config": {}}, "quantized checkpoints"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"rope_theta": 1}, "rope_theta must be more than 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "needs factor and original_max"),
        ({"rope_scaling": {"rope_type": [], "type": "yarn"}}, "contradicts type 'yarn'"),
        ({"rope_scaling": {"rope_type": []}}, "is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": "2"}}, "factor of rope_scaling must be a number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 9}},
            "factor of rope_scaling must be positive",
        ),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types contradicts"),
    ],
)
def test_refused(raw, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config(raw | changes)


def test_a_missing_key_is_named(raw):
    del raw["kv_lora_rank"]
    with pytest.raises(ConfigError, match="config lacks kv_lora_rank"):
        parse_config(raw)


def test_an_unknown_override_is_named(raw):
    with pytest.raises(ConfigError, match="'hiden_size'"):
        parse_config(raw, {"hiden_size": 1})


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        load_config(tmp_path)
    for text, sentence in (("{", "is not JSON"), ("[]", "one JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            load_config(tmp_path)


def test_no_torch_is_imported():
    code = "import sys, reference.config, reference.layout, reference.taps; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PRESET.parents[2], check=False).returncode == 0
