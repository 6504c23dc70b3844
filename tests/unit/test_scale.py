"""spcheck.plan.scale: small sizes that the ranks divide, of the same structure, with a list of what was changed."""

import pytest

from reference.config import parse_config
from spcheck.plan.scale import Change, tiny
from tests.unit.published import KIMI_K2, PUBLISHED, V3, V32

WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (8, 1), (16, 1), (1, 2), (2, 2), (3, 2), (2, 3), (7, 5)]
KEPT = ["n_group", "topk_group", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq"]
KEPT += ["rope_scaling", "rope_theta", "routed_scaling_factor", "norm_topk_prob", "rms_norm_eps", "model_type"]
KEPT += ["num_nextn_predict_layers", "max_position_embeddings", "tie_word_embeddings"]


def parsed(raw):
    return parse_config({key: value for key, value in raw.items() if key != "quantization_config"})


@pytest.mark.parametrize(("tp", "dp"), WORLDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name, tp, dp):
    raw = PUBLISHED[name]
    small, changes = tiny(raw, tp, dp)
    config = parsed(small)
    for size in (config.num_attention_heads, config.intermediate_size, config.moe_intermediate_size):
        assert size % tp == 0
    assert config.n_routed_experts % (tp * dp) == config.moe_intermediate_size % (tp * dp) == 0
    assert config.num_experts_per_tok < config.topk_group * (config.n_routed_experts // config.n_group)
    assert config.vocab_size % tp or tp == 1
    assert {key: small[key] for key in KEPT} == {key: raw[key] for key in KEPT}
    moe = [config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)]
    assert moe == [False] * raw["first_k_dense_replace"] + [True] * 3
    assert not config.has_indexer or config.index_topk < 17
    assert small == raw | {change.key: change.after for change in changes}
    assert all(raw[change.key] == change.before != change.after for change in changes)


def test_sizes_that_stand_for_each_other_differ():
    config = parsed(tiny(V32, 2, 1)[0])
    sizes = [config.hidden_size, config.intermediate_size, config.moe_intermediate_size, config.q_lora_rank]
    sizes += [config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim]
    sizes += [config.num_attention_heads, config.index_n_heads, config.index_head_dim, config.index_topk]
    sizes += [config.n_routed_experts, config.vocab_size]
    assert len(set(sizes)) == len(sizes)


def test_changes_in_words():
    _, changes = tiny(V3, 2, 1)
    assert Change("hidden_size", 7168, 96) in changes
    assert "hidden_size 7168 -> 96" in map(str, changes)
    assert [change.key for change in changes] == [key for key in V3 if any(c.key == key for c in changes)]


def test_a_small_config_stays():
    small, _ = tiny(KIMI_K2, 2, 1)
    assert tiny(small, 2, 1) == (small, ())


def test_layers_that_alternate_have_a_dense_one_at_the_end():
    config = parsed(tiny(V3 | {"first_k_dense_replace": 1, "moe_layer_freq": 2}, 2, 1)[0])
    kinds = [config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)]
    assert kinds == [False, False, True, False, True, False]


def test_dense_layers_alone_and_a_long_prefix():
    config = parsed(tiny(V3 | {"first_k_dense_replace": 61}, 2, 1)[0])
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (3, 3)
    config = parsed(tiny(V3 | {"first_k_dense_replace": 20}, 2, 1)[0])
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (6, 3)


def test_keys_that_repeat_sizes_follow():
    layers = ["dense"] * 3 + ["sparse"] * 58
    raw = V3 | {"num_local_experts": 256, "qk_head_dim": 192, "mlp_layer_types": layers}
    small, changes = tiny(raw, 2, 1)
    assert (small["num_key_value_heads"], small["num_local_experts"], small["qk_head_dim"]) == (12, 24, 24)
    assert small["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 3
    assert "mlp_layer_types of 61 layers -> of 6 layers" in map(str, changes)
    contradicting = tiny(raw | {"num_key_value_heads": 8, "mlp_layer_types": ["sparse"] * 61}, 2, 1)[0]
    assert (contradicting["num_key_value_heads"], len(contradicting["mlp_layer_types"])) == (8, 61)


def test_entries_of_layers_that_go_are_still_seen():
    types = ["full"] * 10 + ["shared"] * 51
    assert tiny(V32 | {"indexer_types": types}, 2, 1)[0]["indexer_types"] == types


@pytest.mark.parametrize("value", [None, 0, -3, "wide", True, 1.5, [1], 10**400])
@pytest.mark.parametrize("key", ["hidden_size", "n_group", "n_routed_experts", "num_hidden_layers", "moe_layer_freq"])
def test_what_is_no_size_is_left_to_the_parser(key, value):
    small, _ = tiny(V3 | {key: value}, 2, 1)
    if value != 10**400:
        assert small[key] is value


def test_numbers_that_contradict_each_other_are_left_to_the_parser():
    for changes in ({"num_experts_per_tok": 200}, {"topk_group": 9}, {"n_group": 7}):
        assert tiny(V3 | changes, 2, 1)[0]["n_routed_experts"] == 256
