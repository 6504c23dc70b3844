"""Ranks that die, stop, hang, raise or go astray: the report names them, and nothing is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# 100 in all.
TRIALS = [
    ("kill", "gloo", 30),
    ("late_kill", "gloo", 14),
    ("exit", "gloo", 14),
    ("raise", "gloo", 12),
    ("raise", "loopback", 10),
    ("stop", "gloo", 6),
    ("hang", "gloo", 8),
    ("hang", "loopback", 6),
]


def script(name, *words, env=None):
    command = [sys.executable, "-m", f"tests.e2e.{name}", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)


def test_there_are_100_trials():
    assert sum(count for *_, count in TRIALS) == 100


@pytest.mark.parametrize(("what", "backend", "count"), TRIALS)
def test_trials(what, backend, count, tmp_path):
    done = script("trials", what, backend, 0, count, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == count
    assert list(tmp_path.iterdir()) == []


GATHER = "all_gather [3, 96] float64 on tp in model.layers.0"
SCATTER = "reduce_scatter [6, 96] float64 on tp in model.layers.0"
EMBEDDED = "all_reduce [5, 96] float64 on tp in model.embed_tokens"
# Bug -> the last collective that is the same, and what ranks 0 and 1 call behind it.
PARTINGS = {
    "skipped": (EMBEDDED, GATHER, SCATTER),
    "repeated": (GATHER, SCATTER, GATHER),
    "swapped": (EMBEDDED, GATHER, SCATTER),
    "of another size": (EMBEDDED, GATHER, GATHER.replace("3", "2")),
    "skipped among equal ones": (
        EMBEDDED,
        "all_reduce [5, 96] float64 on tp in model.layers.0.post_attention_layernorm",
        "all_reduce [5, 96] float64 on tp in model.layers.1.input_layernorm",
    ),
}


@pytest.mark.parametrize("backend", ["loopback", "gloo"])
def test_ranks_that_part(backend):
    done = script("parting", backend)
    results = json.loads(done.stdout)
    assert list(results) == list(PARTINGS)
    for name, (before, *calls) in PARTINGS.items():
        result = results[name]
        assert result["outcome"] == "FAILED", name
        number = result["failure"]["divergence"]["number"]
        lines = result["text"].splitlines()
        table = lines.index("collective  what each rank calls")
        assert lines[table + 1 : table + 4] == [
            f"{f'{number}, all':<12}{before}",
            *(f"{f'{number + 1}, rank {rank}':<12}{call}" for rank, call in enumerate(calls)),
        ], name
        (finding,) = (f for f in result["findings"] if f["kind"] == "divergence")
        assert all(f"rank {rank} calls {call}" in finding["message"] for rank, call in enumerate(calls))
        assert backend == "gloo" or "CollectiveMismatch" in result["findings"][0]["message"], name
