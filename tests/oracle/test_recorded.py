"""The reference against recorded runs of Hugging Face transformers, tensor by tensor, in float64."""

import math
from pathlib import Path

import pytest
import torch
from recorded import Oracle, compare_all
from recording import record

from reference.attention import Indexer
from reference.checkpoint import Checkpoint, check_tensors
from reference.config import parse_config

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "fixtures" / "golden"
SHARED = ROOT.parent / "shared" / "oracle"
FOLDERS = [GOLDEN / "deepseek_v32", GOLDEN / "deepseek_v3", SHARED / "deepseek_v32", SHARED / "deepseek_v3"]
BOUND = 1e-12


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def oracle(request):
    if not request.param.is_dir():
        pytest.skip(f"{request.param.parent.name}/{request.param.name} is not here")
    return Oracle(request.param)


def errors_of(oracle: Oracle, tp: int) -> dict[str, float]:
    config, reader = parse_config(oracle.raw), Checkpoint(oracle.folder)
    check_tensors(config, reader)
    return compare_all(oracle, record(config, reader, oracle.ids, tp=tp, drafts=oracle.drafts))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_recorded_tensor_is_met(oracle, tp, record_property):
    errors = errors_of(oracle, tp)
    record_property("largest_relative_error", max(errors.values()))
    assert len(errors) == len(oracle.outputs)
    assert {name: error for name, error in errors.items() if error > BOUND} == {}


def test_the_comparison_notices_a_wrong_rotation(oracle, monkeypatch):
    """The most common bug: the indexer rotated like the attention."""
    if not parse_config(oracle.raw).has_indexer:
        pytest.skip("a model without an indexer")
    original = Indexer.__init__

    def interleaved(self, *args):
        original(self, *args)
        self.q_rope.interleaved = self.k_rope.interleaved = True

    monkeypatch.setattr(Indexer, "__init__", interleaved)
    errors = errors_of(oracle, 1)
    assert errors["layers.0.index_scores"] > 0.01
    assert errors["logits"] > 0.01
    assert errors["layers.0.selected"] == math.inf
    assert errors["layers.0.kv_latent"] < BOUND


def test_the_weights_keep_their_stored_type(oracle):
    assert Checkpoint(oracle.folder).tensor("lm_head.weight").dtype in (torch.float32, torch.bfloat16)
