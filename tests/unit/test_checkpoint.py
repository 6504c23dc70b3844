"""reference.checkpoint and reference.layout: reading, writing, random weights, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reference.checkpoint import (
    Checkpoint,
    CheckpointError,
    RandomAdapters,
    RandomWeights,
    check_tensors,
    write_checkpoint,
)
from reference.config import ModelConfig, parse_config
from reference.layout import adapted_modules, adapter_shapes, optional_copies, tensor_shapes

FEWER = {"n_routed_experts": 8, "n_group": 4, "num_experts_per_tok": 4, "num_hidden_layers": 3}
PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"


@pytest.fixture(scope="module")
def raw():
    return json.loads(PRESET.read_text()) | FEWER


@pytest.fixture(scope="module")
def config(raw):
    return parse_config(raw)


class Table:
    """A reader over a dict."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def tensor(self, name):
        return self.tensors[name]


def table_of(reader) -> dict[str, torch.Tensor]:
    return {name: reader.tensor(name) for name in reader.names()}


PUBLISHED = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
}
INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
UNQUANTIZED = ("embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight", "weights_proj.weight")


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        (ModelConfig("deepseek_v32", **PUBLISHED, **INDEXER), 685_396_921_376),
        (ModelConfig("deepseek_v3", **PUBLISHED), 684_531_386_000),
    ],
)
def test_the_layout_has_the_published_number_of_elements(config, elements):
    """The published files have a scale for every 128 x 128 block of a quantized matrix."""
    shapes = tensor_shapes(config)
    scales = [
        math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)
        for name, shape in shapes.items()
        if len(shape) == 2 and not name.endswith(UNQUANTIZED)
    ]
    assert sum(map(math.prod, shapes.values())) + sum(scales) == elements


def test_random_weights_do_not_depend_on_the_order_of_reading(config):
    first, second = RandomWeights(config, 1), RandomWeights(config, 1)
    backwards = {name: second.tensor(name) for name in sorted(second.names(), reverse=True)}
    assert all(torch.equal(first.tensor(name), backwards[name]) for name in first.names())
    assert first.tensor("lm_head.weight") is first.tensor("lm_head.weight")
    assert not torch.equal(first.tensor("lm_head.weight"), RandomWeights(config, 2).tensor("lm_head.weight"))


def test_random_weights_matter_everywhere(config):
    reader = RandomWeights(config, 0)
    spread = {name: reader.tensor(name).double().std().item() for name in reader.names()}
    stored = {name: reader.tensor(name).dtype for name in reader.names()}
    wide = {name for name, dtype in stored.items() if dtype == torch.float32}
    assert wide == {f"model.layers.{i}.mlp.gate.{x}" for i in (2, 3) for x in ("weight", "e_score_correction_bias")}
    assert {stored[name] for name in stored.keys() - wide} == {torch.bfloat16}
    assert spread["model.embed_tokens.weight"] == pytest.approx(1, rel=0.1)
    assert spread["model.layers.2.self_attn.o_proj.weight"] == pytest.approx(1.3 / math.sqrt(12 * 10), rel=0.1)
    assert spread["model.norm.weight"] == pytest.approx(0.2, rel=0.3)
    assert spread["model.layers.2.self_attn.indexer.k_norm.bias"] == pytest.approx(0.2, rel=0.5)
    assert 0.006 < spread["model.layers.2.mlp.gate.e_score_correction_bias"] < 0.075
    assert reader.tensor("model.norm.weight").double().mean().item() == pytest.approx(1, abs=0.1)


def test_the_mtp_copies_repeat_the_main_tables(config):
    reader = RandomWeights(config, 0)
    assert len(optional_copies(config)) == 2
    assert all(reader.tensor(copy) is reader.tensor(main) for copy, main in optional_copies(config).items())


def test_an_adapter_has_a_pair_for_each_projection_it_adds_to(config):
    shapes = adapter_shapes(config, 4)
    assert len(shapes) == 1 + 2 * 7 * 3
    assert shapes["lora_alpha"] == (1,)
    assert shapes["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] == (4, 144)
    assert shapes["base_model.model.model.layers.2.mlp.shared_experts.down_proj.lora_B.weight"] == (96, 4)
    assert shapes["base_model.model.model.layers.1.self_attn.kv_a_proj_with_mqa.lora_B.weight"] == (40, 4)
    assert not any("kv_b_proj" in name or ".experts." in name or "layers.3" in name for name in shapes)


def test_random_adapters_give_a_quarter_of_the_matrices_they_add_to_and_less(config):
    base, reader, again = (RandomWeights(config, 0), *(RandomAdapters(config, 0, rank=4, adapters=2) for _ in "12"))
    expected = {f"adapters.{i}.{name}": shape for i in (0, 1) for name, shape in adapter_shapes(config, 4).items()}
    assert {name: reader.shape(name) for name in reader.names()} == expected
    assert all(torch.equal(reader.tensor(name), again.tensor(name)) for name in reversed(list(reader.names())))
    for i, module in ((i, module) for i in (0, 1) for module in adapted_modules(config)):
        pair = f"adapters.{i}.base_model.model.{module}"
        a, b = (reader.tensor(f"{pair}.lora_{part}.weight").double() for part in "AB")
        scale = reader.tensor(f"adapters.{i}.lora_alpha").item() / 4
        ratio = (scale * b @ a).norm() / base.tensor(f"{module}.weight").double().norm()
        assert 0.12 < ratio * (4 if i else 1) < 0.5
    assert not torch.equal(
        reader.tensor(f"{pair}.lora_A.weight"),
        reader.tensor(pair.replace("adapters.1", "adapters.0") + ".lora_A.weight"),
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_written_and_read_back(tmp_path, raw, config, shards):
    reader = RandomWeights(config, 0)
    write_checkpoint(tmp_path, raw, reader, shards=shards)
    read = Checkpoint(tmp_path)
    check_tensors(config, read)
    assert set(read.names()) == set(reader.names())
    assert all(torch.equal(read.tensor(name), reader.tensor(name)) for name in reader.names())
    assert all(read.shape(name) == reader.shape(name) for name in reader.names())
    assert json.loads((tmp_path / "config.json").read_text()) == raw
    assert len(list(tmp_path.glob("*.safetensors"))) == shards


def test_no_weights_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_a_file_cut_short(tmp_path):
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for kept in (0, 5, 40, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
            Checkpoint(tmp_path)


def test_a_pickle_is_no_checkpoint(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Checkpoint(tmp_path)


OUTSIDE = [
    "../x.safetensors",
    "/x.safetensors",
    "sub/x.safetensors",
    "sub\\x.safetensors",
    "..",
    "",
    "a\0.safetensors",
    3,
]


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_that_points_outside_its_folder(tmp_path, file):
    write_index(tmp_path, {"weight_map": {"a": file}})
    with pytest.raises(CheckpointError, match="no safetensors file of its folder"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone\.safetensors is named by the index but does not exist"),
        ({"weight_map": {}}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_a_bad_index(tmp_path, index, sentence):
    write_index(tmp_path, index)
    with pytest.raises(CheckpointError, match=sentence):
        Checkpoint(tmp_path)


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_that_is_no_json(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Checkpoint(tmp_path)


def test_a_tensor_that_is_not_there(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor b"):
        Checkpoint(tmp_path).tensor("b")
    write_index(tmp_path, {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}})
    for read in (Checkpoint(tmp_path).tensor, Checkpoint(tmp_path).shape):
        with pytest.raises(CheckpointError, match=r"model\.safetensors does not hold the tensor b"):
            read("b")


def test_missing_surplus_and_misshaped_tensors(config):
    whole = table_of(RandomWeights(config, 0))
    check_tensors(config, Table(whole))
    without = {name: tensor for name, tensor in whole.items() if "experts.3" not in name}
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.mlp\.experts\.3\..* and 5 more"):
        check_tensors(config, Table(without))
    with pytest.raises(CheckpointError, match=r"has no place for model\.extra"):
        check_tensors(config, Table(whole | {"model.extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(3,\), but the config says \(96,\)"):
        check_tensors(config, Table(whole | {"model.norm.weight": torch.zeros(3)}))


def test_what_may_be_missing_or_surplus(raw, config):
    whole = table_of(RandomWeights(config, 0))
    lean = {name: tensor for name, tensor in whole.items() if name not in optional_copies(config)}
    check_tensors(config, Table(lean))
    check_tensors(config, Table(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    check_tensors(parse_config(raw | {"num_nextn_predict_layers": 0}), Table(whole))
    with pytest.raises(CheckpointError, match="has no place for"):
        check_tensors(config, Table(whole | {"model.layers.4.enorm.weight": torch.zeros(96)}))
