"""Plain mistakes: one sentence on stderr, exit 2, no traceback."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest


def spcheck(*words, env=None, timeout=120):
    command = [sys.executable, "-m", "spcheck", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--tp 5 --tokens 17", "--tp 5 does not divide num_attention_heads 12"),
        (
            "--tp 2 --tokens 17 --set n_routed_experts=9 --set n_group=3 --set num_experts_per_tok=4",
            "n_routed_experts 9",
        ),
        ("--tp 2 --tokens 0", "at least 1 token"),
        ("--tp 2 --tokens -3", "at least 1 token"),
        ("--tp 2 --tokens many", "not a valid integer"),
        ("--tp 2 --requests 5,,x", "no list of new@cached tokens such as 5,1@40,3@12"),
        ("--tp 2", "give --tokens N or --requests"),
        ("--tp 2 --tokens 3 --requests 3", "not both"),
        ("--tp 2 --tokens 17 --pad-to 16", "--pad-to 16 is less than the 17 tokens"),
        ("--tp 2 --tokens 17 --model no-such-model", "neither a preset"),
        ("--tp 2 --tokens 17 --aux-layers 9", "--aux-layers 9 is outside 0..5"),
        ("--tp 2 --tokens 17 --scheme full-sp --pp 2", "a pipeline stage would receive shards"),
        ("--tp 2 --tokens 17 --pp 2", "--pp 2 is not supported yet"),
        ("--tp 2 --tokens 17 --scheme full-sp --lora-rank 8 --lora-adapters 1", "LoRA adapters present"),
        ("--tp 2 --tokens 17 --lora-adapters 1", "--lora-adapters 1 needs --lora-rank"),
        ("--tp 2 --tokens 17 --scheme moe-sp --no-expert-parallel", "expert parallel off"),
        ("--tp 2 --tokens 17 --all2all-backend pplx", "'pplx' is not one of 'allgather_reducescatter'"),
        ("--tp 2 --dp 2 --requests 5,1/11/-", "--requests has 3 parts, one for each data-parallel rank, and --dp is 2"),
        ("--tp 2 --dp 2 --requests 5", "--requests has 1 part, one for each data-parallel rank, and --dp is 2"),
        ("--tp 2 --dp 0 --tokens 5", "--dp must be 1 to 1024, not 0"),
        ("--tp 2 --requests -/-", "there is no request"),
        ("--tp 2 --requests 5//3", "'5//3' has an empty part: an idle data-parallel rank is a dash"),
        ("--tp 3 --dp 3 --tokens 5", "--dp 3 x --tp 3 = 9 ranks do not divide n_routed_experts 24"),
        ("--tp 2 --requests 5/3 --previous 4", "--previous 4 is for 1 data-parallel rank, and there are 2"),
        ("--tp 2 --tokens 5 --graph-sizes 8,4", "--graph-sizes 8,4 must be ascending"),
        ("--tp 2 --tokens 5 --graph-sizes 8 --pad-to 8", "give --pad-to or --graph-sizes, not both"),
        ("--tp 2 --tokens 5 --reference optimized:sp", "--reference optimized:sp is not one of"),
        ("--tp 1 --tokens 17 --scheme full-sp", "needs tp > 1"),
        ("--tp 2 --tokens 17 --numerics int4", "is not one of"),
        ("--tp 2 --tokens 17 --set hidden_size", "is not key=value"),
        ("--tp 2 --tokens 17 --json /no/such/folder/out.json", "cannot be written"),
        ("--tp 2 --tokens 17 --timeout nan", "--timeout must be a positive number"),
        ("--tp 2 --tokens 17 --timeout inf", "--timeout must be a positive number"),
        ("--tp 2 --tokens 17 --aux-layers 2,2", "--aux-layers 2,2 names a layer twice"),
        ("--tp 2 --tokens 17 --timeout 1e10", "--timeout must be a positive number"),
        ("--tp 2 --tokens 17 --timeout 0", "--timeout must be a positive number"),
        ("--tp 2 --tokens 17 --seed -1", "--seed must be 0 or more"),
        ("--tp 2 --tokens 17 --no-such-option", "No such option"),
    ],
)
def test_one_sentence_and_exit_2(words, says):
    done = spcheck("diff", *words.split())
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def processes_with(setting):
    """Pids of all processes that have this setting in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_nccl_without_gpus_is_refused_by_the_machine_and_leaves_nothing(tmp_path):
    environment = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    done = spcheck("diff", "--tp", "2", "--tokens", "17", "--backend", "nccl", env=environment)
    assert done.returncode == 2
    assert done.stderr == "spcheck: --backend nccl needs one GPU per rank: 2 ranks, 0 GPUs found\n"
    assert list(tmp_path.iterdir()) == []
    assert processes_with(f"TMPDIR={tmp_path}") == []


def test_a_folder_without_config_or_with_weights_that_are_not_read(tmp_path):
    assert "no readable config.json" in spcheck("diff", "--tokens", "3", "--model", str(tmp_path)).stderr
    preset = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
    (tmp_path / "config.json").write_bytes(preset.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    done = spcheck("diff", "--tokens", "3", "--model", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_bad_environment_variable():
    done = spcheck("diff", "--tokens", "3", env={"VLLM_MOE_SKIP_PADDING": "maybe"})
    assert (done.returncode, done.stderr) == (2, "spcheck: VLLM_MOE_SKIP_PADDING must be 0 or 1, not 'maybe'\n")


def test_version_and_help():
    assert spcheck("--version").stdout.startswith("spcheck 0.")
    assert "  spcheck diff --tp 2 --tokens 17\n" in spcheck("diff", "--help").stdout
    assert spcheck().returncode == 0
