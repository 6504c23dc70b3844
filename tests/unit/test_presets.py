"""The presets lie in general position: no two settings that code may take for one another are equal or neutral."""

import itertools
import json
from importlib import resources

import pytest
import torch

from reference.checkpoint import RandomWeights
from reference.config import ConfigError, parse_config
from spcheck.case import Case
from spcheck.launch.ranks import run_threads
from spcheck.plan.model import load_model, preset_names
from spcheck.plan.plan import make_plan
from spcheck.worker.built import EnginePool

NAMES = ["dsv3-tiny", "dsv32-alternating", "dsv32-tiny", "dsv32-two-mtp"]
KEY_NORM_EPS = 1e-6  # of the index key's LayerNorm: no config has it

# Settings of one kind, of which code may take one for another. None counts of none.
ALIKE = (
    ("rms_norm_eps", "latent_norm_eps", "the index key's eps"),
    ("n_routed_experts", "n_group", "experts of a group", "topk_group", "num_experts_per_tok", "n_shared_experts"),
    ("index_topk", "num_experts_per_tok", "topk_group"),
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim", "qk_head_dim"),
    ("num_attention_heads", "index_n_heads", "v_head_dim", "index_head_dim", "qk_nope_head_dim"),
    ("q_lora_rank", "kv_lora_rank", "cache row", "hidden_size"),
    ("intermediate_size", "moe_intermediate_size", "hidden_size", "all heads' values"),
    ("num_hidden_layers", "first_k_dense_replace", "moe_layer_freq"),
)
# The best experts that make a group's score are two in every model. One group keeps one: there is no choice to confuse.
BEST_OF_A_GROUP = 2


def config_of(name):
    return load_model(Case(((1,),), 1, model=name))


def settings_of(config):
    made = {
        "the index key's eps": KEY_NORM_EPS if config.has_indexer else None,
        "experts of a group": config.n_routed_experts // config.n_group,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "cache row": config.kv_lora_rank + config.qk_rope_head_dim,
        "all heads' values": config.num_attention_heads * config.v_head_dim,
    }
    return {**vars(config), **made}


def test_there_are_four():
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alike", ALIKE, ids=lambda names: names[0])
def test_settings_of_one_kind_differ(name, alike):
    config = config_of(name)
    values = {key: value for key, value in settings_of(config).items() if key in alike and value is not None}
    if config.n_group == 1:  # no choice of groups; one shared expert beside one group is the published setting
        values = {key: value for key, value in values.items() if key not in ("n_group", "topk_group")}
        values.pop("experts of a group", None)
    assert [(a, b) for a, b in itertools.combinations(values, 2) if values[a] == values[b]] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_stretch_of_the_rotary_table_is_no_neutral_one(name):
    yarn = config_of(name).yarn
    if yarn is not None:
        assert len({yarn.mscale, yarn.mscale_all_dim, 0.0, 1.0}) == 4
        assert yarn.factor != config_of(name).qk_rope_head_dim


def test_what_presets_have_between_them():
    configs = {name: config_of(name) for name in NAMES}
    gammas = [config.routed_scaling_factor for config in configs.values()]
    assert len(set(gammas)) == len(NAMES)
    assert 1.0 not in gammas
    assert [name for name, c in configs.items() if c.num_nextn_predict_layers == 2] == ["dsv32-two-mtp"]
    assert [name for name, c in configs.items() if not c.has_indexer] == ["dsv3-tiny"]
    assert [name for name, c in configs.items() if not c.norm_topk_prob] == ["dsv3-tiny"]
    assert [name for name, c in configs.items() if c.yarn is None] == ["dsv3-tiny"]
    assert [name for name, c in configs.items() if c.n_shared_experts > 1] == ["dsv3-tiny"]
    assert any(1 < c.topk_group != BEST_OF_A_GROUP for c in configs.values())


def test_a_preset_says_itself_which_layers_have_experts():
    """So that a mistake in `is_moe_layer`, which both subjects ask, ends before a run."""
    text = (
        resources.files("spcheck")
        .joinpath("families", "deepseek", "presets", "dsv32-alternating.json")
        .read_text(encoding="utf-8")
    )
    raw = json.loads(text)
    assert raw["mlp_layer_types"] == ["dense", "dense", "sparse", "dense", "sparse", "dense"]
    with pytest.raises(ConfigError, match="mlp_layer_types contradicts"):
        parse_config(raw | {"first_k_dense_replace": 3})


@pytest.mark.parametrize("name", NAMES)
def test_the_router_holds_what_bfloat16_cannot(name):
    """In exact numerics as well, where weights are rounded to a grid of 2^-12."""
    config = config_of(name)
    reader = RandomWeights(config, 0)
    layer = config.mtp_layers.start
    for part in ("weight", "e_score_correction_bias"):
        stored = reader.tensor(f"model.layers.{layer}.mlp.gate.{part}")
        assert stored.dtype == torch.float32
        on_grid = (stored.double() * 2**12).round() / 2**12
        for values in (stored.double(), on_grid):
            assert (values.bfloat16().double() != values).double().mean() > 0.3
    assert reader.tensor("lm_head.weight").dtype == torch.bfloat16


def experts_without_rows(seed):
    """Of the default case with this seed, over all MoE layers: experts are counted where the candidate runs them."""
    reports = run_threads(make_plan(Case(((17,),), 2, seed=seed)), EnginePool())
    counts = [n for report in reports for _, _, rows in report["candidate"]["work"] for n in rows]
    assert len(counts) == 4 * 24
    return counts.count(0)


def test_every_expert_has_a_row_in_the_default_case():
    """Seed 0: all 24 experts of the 3 MoE layers and the MTP layer. Seeds 1 to 9 leave 2 of 864 without a row."""
    assert experts_without_rows(0) == 0
    assert sum(map(experts_without_rows, range(1, 10))) <= 2
