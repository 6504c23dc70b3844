"""`spcheck diff --collectives` as a user reads it, in a pipe and as JSON."""

import json
import re
import subprocess
import sys

import pytest

LINE = ["diff", "--tp", "2", "--tokens", "17", "--mtp-steps", "3", "--backend", "loopback"]


def spcheck(*words):
    command = [sys.executable, "-m", "spcheck", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    target = tmp_path_factory.mktemp("accounting") / "out.json"
    done = spcheck(*LINE, "--collectives", "--json", str(target))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(target.read_text())["accounting"]


def words_of(text, start):
    """The words of the lines that start so."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip().startswith(start)]


def test_the_tables(run):
    text, _ = run
    assert "\x1b" not in text
    assert [line.split()[0] for line in text.splitlines() if len(line) > 80] == ["repeat"]
    dense, moe = words_of(text, "layers 0-1 dense"), words_of(text, "layers 2-4 moe")
    assert dense == [
        ["layers 0-1 dense", "all_reduce", "tp", "2", "25.5 KiB", "25.5 KiB"],
        ["layers 0-1 dense", "all_gather", "tp", "1", "6.8 KiB", "6.8 KiB"],
    ]
    assert [line[1] for line in moe] == ["all_reduce", "all_gather"]
    assert ["reduce_scatterv ep", "1", "13.5 KiB", "13.5 KiB"] in words_of(text, "reduce_scatterv")
    assert len(words_of(text, "draft steps 1-2 (layer 5)")) == 2


def test_the_totals(run):
    text, _ = run
    assert words_of(text, "collectives, target step") == [["collectives, target step", "12", "25", "2.08"]]
    per_token = ["9.2 KiB", "11.9 KiB", "1.29"]
    assert words_of(text, "bytes per token") == [["bytes per token", *per_token], ["bytes per token, seen", *per_token]]
    assert len(words_of(text, "bytes per step")) == 1
    assert words_of(text, "dense MLP") == [["dense MLP", "324.0 KiB", "648.0 KiB", "2.00"]]
    assert words_of(text, "residual stream, norms") == [["residual stream, norms", "12.8 KiB", "6.8 KiB", "0.53"]]
    assert words_of(text, "memory       kept")


def test_the_json(run):
    _, accounting = run
    reference, candidate = accounting["reference"], accounting["candidate"]
    assert candidate["parameter_bytes"] == sum(candidate["parameters"].values())
    assert candidate["parameters"]["dense MLP"] == 2 * reference["parameters"]["dense MLP"] == 2 * 3 * 96 * 144 * 8
    assert reference["bytes_per_token"] == reference["seen_bytes_per_token"] == (11 * 96 + 125) * 8
    assert candidate["largest_activation"]["shape"] == [18 * 10, 96]  # a row for each choice of two shards
    assert [f["name"] for f in candidate["forwards"]] == ["target step", *(f"draft step {j}" for j in range(3))]
    assert candidate["forwards"][0]["traffic"][0] == {
        "place": "embedding", "kind": "all_reduce", "group": "tp", "count": 1, "bytes": 17 * 96 * 8,
        "at_most": False, "seen_count": 1, "seen_bytes": 17 * 96 * 8,
    }  # fmt: skip


def test_one_line_has_no_room_for_it():
    done = spcheck(*LINE, "--collectives", "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "spcheck: give --collectives or --quiet, not both\n"
