"""Any config of one's own, through the command and in one process: random weights, small sizes, nested settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spcheck.case import Case
from spcheck.report.json import to_json
from spcheck.report.text import to_text
from tests.conftest import compare_case
from tests.unit.published import KIMI_K2, PUBLISHED, V32

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
GOLDEN = ROOT / "fixtures" / "golden" / "deepseek_v32"
SHARED = ROOT.parent / "shared" / "spec" / "model_configs"
NAMES = ["deepseek-v3.2", "deepseek-v3", "kimi-k2-instruct"]


def spcheck(*words):
    command = [sys.executable, "-m", "spcheck", "diff", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture
def published(tmp_path):
    for name, raw in PUBLISHED.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(raw))
    return tmp_path


def compared(model, **options):
    return compare_case(Case(**{"requests": ((17,),), "tp": 2, "model": str(model), **options}))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (2, 2)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_made_tiny(published, name, tp, dp):
    drafts = 0 if PUBLISHED[name] is KIMI_K2 else 1
    comparison = compared(
        published / f"{name}.json",
        tp=tp,
        requests=((17,),) * dp,
        scale="tiny",
        mtp_steps=drafts,
        all2all_backend="naive",
    )
    assert comparison.verdict.outcome == "EQUAL", comparison.verdict.findings
    text = to_text(comparison)
    assert "random weights, seed 0: no checkpoint was read" in text
    assert "hidden_size 7168 -> 96" in text
    assert "note  the weights are random: quantization_config is ignored" in text


@pytest.mark.skipif(not SHARED.is_dir(), reason="the configs are not part of the project")
@pytest.mark.parametrize("name", NAMES)
def test_published_files_made_tiny(name):
    done = spcheck("--tp", 2, "--tokens", 17, "--model", SHARED / f"{name}.json", "--scale", "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("EQUAL, scheme full-sp")


def test_a_report_as_json(published):
    comparison = compared(published / "V3.2.json", scale="tiny", seed=5)
    document = json.loads(to_json(comparison))
    assert document["weights"] == "random weights, seed 5"
    assert {"key": "num_hidden_layers", "before": 61, "after": 6} in document["scaled"]
    assert document["notes"] == ["the weights are random: quantization_config is ignored"]
    assert f"--model {published / 'V3.2.json'} --scale tiny" in document["case"]


def test_a_checkpoint_and_a_preset_are_not_said_to_be_random():
    for model in (GOLDEN, "dsv32-tiny"):
        comparison = compared(model)
        assert "random weights" not in to_text(comparison)
        assert comparison.verdict.outcome == "EQUAL"
    assert json.loads(to_json(compared(GOLDEN)))["weights"] == f"weights of {GOLDEN}"


def test_a_nested_setting_reaches_both_subjects():
    """Of one side alone the pair would differ; of none, nothing would."""
    plain = compared("dsv32-tiny")
    for key, value in (("rope_scaling.mscale_all_dim", 0.5), ("rope_scaling.factor", 2), ("rope_scaling", None)):
        changed = compared("dsv32-tiny", overrides=((key, value),))
        assert changed.verdict.outcome == "EQUAL"
        assert [r.max_rel for r in changed.results] != [r.max_rel for r in plain.results]


def test_a_nested_setting_through_the_command():
    done = spcheck("--tokens", 3, "--backend", "loopback", "--set", "rope_scaling.mscale_all_dim=0.5")
    assert done.returncode == 0, done.stderr
    assert "--set rope_scaling.mscale_all_dim=0.5" in done.stdout


def test_a_setting_that_is_an_object_through_the_command():
    block = '{"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}'
    done = spcheck("--tokens", 3, "--backend", "loopback", "--set", f"rope_scaling={block}", "-q")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_with_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(PRESET.read_text())
    done = spcheck("--tokens", 3, "--backend", "loopback", "--model", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "random weights, seed 0: no checkpoint was read"


def test_a_model_without_mtp_layers_drafts_nothing_unless_asked(published):
    words = ("--tokens", 3, "--backend", "loopback", "--scale", "tiny", "--model", published / "Kimi K2.json")
    done = spcheck(*words)
    assert done.returncode == 0, done.stderr
    assert "mtp steps 0" in done.stdout
    assert "--mtp-steps 0" in done.stdout
    asked = spcheck(*words, "--mtp-steps", 1)
    assert asked.returncode == 2
    assert "--mtp-steps 1 needs an MTP layer" in asked.stderr


def test_a_model_that_cannot_be_held_is_refused_before_it_is_made(published):
    done = spcheck("--tp", 2, "--tokens", 17, "--model", published / "V3.2.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "GiB at least" in done.stderr
    assert done.stderr.endswith("try --scale tiny\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("changes", [{"indexer_rope_interleave": True}, {"index_topk_freq": 4}, {"sink_tokens": 4}])
def test_a_key_that_changes_the_model_is_refused_by_name(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(V32 | changes))
    done = spcheck("--tokens", 3, "--scale", "tiny", "--model", tmp_path / "config.json")
    assert done.returncode == 2
    assert next(iter(changes)) in done.stderr
