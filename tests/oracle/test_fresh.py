"""The reference against transformers models made at test time: other seeds, sizes and settings."""

import json
from pathlib import Path

import pytest
import torch
from hf_model import HfOracle
from recording import record, relative_error
from sizes import YARN, raw_config

from reference.checkpoint import RandomWeights, TensorReader
from reference.config import parse_config

PRESETS = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets"
BOUND = 1e-12
BATCH, LENGTH, DRAFTS = 2, 19, 3

MTP_PROBES = {
    "proj": "eh_proj.out",
    "block_out": "shared_head.norm.in",
    "normed": "out",
    "logits": "shared_head.head.out",
}
SETTINGS = {
    "as-published": {},
    "no-yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "one-group": {"n_group": 1, "topk_group": 1},
    "every-group-kept": {"n_group": 3, "topk_group": 3},
    "unnormalised-routing": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "two-shared-experts": {"n_shared_experts": 2},
    "coarse-epsilon": {"rms_norm_eps": 1e-3},
    "no-dense-layer": {"first_k_dense_replace": 0},
    "all-dense": {"first_k_dense_replace": 3},
    "unequal-mscales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn-ramp-of-no-width": {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 1, "factor": 40.0}},
    "yarn-ramp-inside": {"rope_parameters": YARN | {"original_max_position_embeddings": 4096}, "qk_rope_head_dim": 20},
    "yarn-ramp-to-the-end": {"rope_parameters": YARN | {"original_max_position_embeddings": 4096, "rope_theta": 100.0}},
    "wide-rotary": {"qk_rope_head_dim": 20, "v_head_dim": 30, "qk_nope_head_dim": 6},
    "choose-everything": {"num_experts_per_tok": 6},
}


def random_ids(vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randint(vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def errors(raw: dict, reader: TensorReader, ids: torch.Tensor, tp: int) -> dict[str, float]:
    """Largest relative errors of logits, residual streams, MTP values and drafts; infinite for another token."""
    config = parse_config(raw)
    oracle = HfOracle(raw, reader)
    ours = record(config, reader, ids, tp=tp, drafts=DRAFTS)
    logits, streams = oracle.forward(ids)
    pairs = {"logits": (ours.batch("lm_head.out", BATCH), logits)}
    N = config.num_hidden_layers
    pairs |= {f"stream {i}": (ours.batch(f"model.aux.{i}", BATCH), streams[i]) for i in range(N)}
    pairs["h"] = ours.batch("model.out", BATCH), streams[N]
    mtp = oracle.forward_mtp(streams[N][:, :-1], ids[:, 1:])
    probes = {
        "proj": "eh_proj.out",
        "block_out": "shared_head.norm.in",
        "normed": "out",
        "logits": "shared_head.head.out",
    }
    for name, probe in probes.items():
        pairs[f"mtp {name}"] = ours.batch(f"model.layers.{N}.{probe}", BATCH)[:, :-1], mtp[name]
    tokens, draft_logits = oracle.draft(streams[N], ids, logits, DRAFTS)
    ours_logits = torch.stack([call[-1] for call in ours.values[f"model.layers.{N}.shared_head.head.out"]])
    pairs["draft logits"] = ours_logits.unflatten(0, (DRAFTS, BATCH)).transpose(0, 1), draft_logits
    found = {name: relative_error(*pair) for name, pair in pairs.items()}
    ours_tokens = ours.values["sampler.out"] + ours.values[f"model.layers.{N}.shared_head.sampler.out"]
    same = torch.equal(torch.cat(ours_tokens).unflatten(0, (1 + DRAFTS, BATCH)).T, tokens)
    return found | {"draft tokens": 0.0 if same else float("inf")}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_settings(model_type, setting, record_property):
    raw = raw_config(model_type, **SETTINGS[setting])
    reader = RandomWeights(parse_config(raw), seed=len(setting))
    found = errors(raw, reader, random_ids(raw["vocab_size"], 7), tp=2)
    record_property("largest_relative_error", max(found.values()))
    assert {name: error for name, error in found.items() if error > BOUND} == {}


@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_seeds(model_type, seed, record_property):
    raw = raw_config(model_type)
    found = errors(
        raw, RandomWeights(parse_config(raw), seed), random_ids(raw["vocab_size"], seed), tp=(1, 2, 4)[seed % 3]
    )
    record_property("largest_relative_error", max(found.values()))
    assert {name: error for name, error in found.items() if error > BOUND} == {}


@pytest.mark.parametrize("name", ["dsv3-tiny", "dsv32-tiny", "dsv32-two-mtp"])
def test_presets(name, record_property):
    """With the eps of the latents and the one MTP layer that transformers knows of."""
    raw = json.loads((PRESETS / f"{name}.json").read_text()) | {"num_nextn_predict_layers": 1}
    yarn = raw.pop("rope_scaling", None)
    kind = {"rope_type": "default"} if yarn is None else {"rope_type": yarn.pop("type"), **yarn}
    raw["rope_parameters"] = {**kind, "rope_theta": raw.pop("rope_theta")}
    del raw["latent_norm_eps"]
    found = errors(raw, RandomWeights(parse_config(raw), 1), random_ids(raw["vocab_size"], 1), tp=2)
    record_property("largest_relative_error", max(found.values()))
    assert {name: error for name, error in found.items() if error > BOUND} == {}


def test_an_indexer_that_keeps_everything_is_no_indexer():
    sparse = raw_config(index_topk=LENGTH + DRAFTS)
    dense = raw_config("deepseek_v3")
    reader = RandomWeights(parse_config(sparse), 5)
    ids = random_ids(61, 5)
    with_indexer = record(parse_config(sparse), reader, ids, drafts=DRAFTS)
    without = record(parse_config(dense), reader, ids, drafts=DRAFTS)
    assert torch.equal(with_indexer.batch("lm_head.out", BATCH), without.batch("lm_head.out", BATCH))


def test_transformers_reads_a_written_checkpoint(tmp_path: Path):
    """In the published spelling of the rotary settings, with shards; the MTP layer is passed over there."""
    import transformers

    from reference.checkpoint import Checkpoint, check_tensors, write_checkpoint
    from reference.config import load_config

    raw = raw_config()
    yarn = raw.pop("rope_parameters")
    raw["rope_theta"] = yarn["rope_theta"]
    raw["rope_scaling"] = {"type": "yarn"} | {k: v for k, v in yarn.items() if not k.startswith("rope_")}
    raw["architectures"] = ["DeepseekV32ForCausalLM"]
    write_checkpoint(tmp_path, raw, RandomWeights(parse_config(raw), 3), shards=3)
    config, reader = load_config(tmp_path), Checkpoint(tmp_path)
    check_tensors(config, reader)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs.set_attn_implementation("eager")
    ids = random_ids(61, 3)
    with torch.no_grad():
        logits = theirs(input_ids=ids, use_cache=False).logits
    for dtype in (torch.float32, torch.float64):
        assert relative_error(record(config, reader, ids, dtype=dtype).batch("lm_head.out", BATCH), logits) < 2e-5
