"""`benchmarks.faults`: plants changes of one line, and tells what sees them and what is said of their cause."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.fault_words import causes, guesses, judged
from benchmarks.faults import SMOKE, planted, show, smoke_folder

ROOT = Path(__file__).parents[2]


def test_two_faults_of_its_own(tmp_path):
    target = tmp_path / "told.json"
    words = [sys.executable, "-m", "benchmarks.faults", "--smoke", "--json", str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = {fault["name"]: fault for fault in json.loads(target.read_text(encoding="utf-8"))}
    assert told.keys() == SMOKE.keys()
    assert (told["harmless"]["outcome"], told["harmless"]["seen_by"]) == ("EQUAL", "nothing")
    twice = told["twice"]
    assert (twice["outcome"], twice["seen_by"]) == ("DIVERGED", "default")
    assert twice["first"] == "model.layers.0.self_attn.out#0"
    assert (twice["hint"], twice["wrong"]) == ("names", [])
    assert "2 faults; 1 of 1 seen: 1 by default" in done.stdout
    assert "1 (100%) names, 0 (0%) silent, 0 (0%) misleads" in done.stdout


def test_a_change_that_does_not_fit(tmp_path):
    smoke_folder(tmp_path)
    diff = tmp_path / "twice.diff"
    with planted(diff) as tree:
        assert "2 * layer.sp" in (tree / "optimized/dataflows/full_sp.py").read_text(encoding="utf-8")
    diff.write_text(diff.read_text(encoding="utf-8").replace("sp_reduce_scatter", "no_such_call"), encoding="utf-8")
    with planted(diff) as tree:
        assert tree is None


CAUSE = {"names": r"twice|2 x the reference", "allows": ["rank"]}
SIZE = "value  model.layers.0.mlp.out: 1.0e+00 over bound 1e-12 on 3 of 9 rows, first at request 0 token 0, rank 0"


def test_a_hint_names_is_silent_or_misleads():
    assert judged(CAUSE, [f"{SIZE}; 2 x the reference: summed 2 times?"]) == ("names", [])
    assert judged(CAUSE, [f"{SIZE}; only on rank 1, on all rows of its shard"]) == ("silent", [])
    assert judged(CAUSE, [SIZE]) == ("silent", [])
    assert judged(CAUSE, [f"{SIZE}; not a number (3 later probes differ too)"]) == ("misleads", ["not a number"])


def test_the_name_of_a_probe_names_no_cause():
    assert judged({"names": "mlp", "allows": []}, [SIZE]) == ("silent", [])
    assert judged({"names": "mlp.*the reference", "allows": []}, [f"{SIZE}; 2 x the reference: scaled?"])[0] == "names"
    assert judged({"names": "3 rows on rank", "allows": []}, ["rows  model.out: 3 rows on rank 0"])[0] == "names"


def test_facts_are_no_guesses():
    assert guesses(f"{SIZE}; largest at request 0 token 1, rank 0; shape [2] where [3] was expected") == []


def test_every_cause_is_whole():
    for name, cause in causes().items():
        assert cause.keys() == {"class", "cause", "names", "allows"}, name


def test_nothing_to_show():
    assert next(iter(show([]))).startswith("0 faults; 0 of 0 seen")
