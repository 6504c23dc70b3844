"""`spcheck doctor` on this machine as it is, and on machines made worse: without torch, network, or a working host."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from spcheck.doctor.machine import PACKAGES

DOCTOR = [sys.executable, "-m", "spcheck", "doctor"]


def doctor(*words, before=(), **environment):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run([*before, *DOCTOR, *words], capture_output=True, text=True, timeout=300, env=environment)


def line_of(text, label):
    return next(line for line in text.splitlines() if line.startswith(label))


def test_this_machine(tmp_path):
    done = doctor("--json", str(tmp_path / "doctor.json"))
    assert (done.returncode, done.stderr) == (0, "")
    for backend in ("loopback", "gloo"):
        assert "works   EQUAL with 2 ranks in " in line_of(done.stdout, f"{backend} ")
    assert "cannot " in line_of(done.stdout, "nccl ")
    assert done.stdout.splitlines()[-1] == "spcheck diff runs here on loopback, gloo."
    assert max(map(len, done.stdout.splitlines())) <= 80
    for label in ("spcheck", "python", "torch", "packages", "gpus", "cores", "memory", "temporary", "network"):
        assert len(line_of(done.stdout, f"{label} ")) > 16

    found = json.loads((tmp_path / "doctor.json").read_text())
    assert (found["schema"], found["exit_code"]) == ("spcheck.doctor/1", 0)
    assert [(b["name"], b["works"]) for b in found["backends"]] == [("loopback", True), ("gloo", True), ("nccl", False)]
    assert found["torch"]["version"]
    assert list(found["machine"]["packages"]) == list(PACKAGES)
    assert all(found["machine"]["packages"].values())


def test_json_on_stdout_leaves_it_to_json():
    done = doctor("--json", "-")
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "spcheck diff runs here on" in done.stderr


def test_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert line_of(done.stdout, "gloo ").split(maxsplit=1)[1] == "cannot  ImportError: libtorch.so: cannot open"
    assert done.stdout.splitlines()[-1] == "No backend works here."


def test_a_backend_that_should_work_and_does_not(tmp_path):
    """The host process ends at once: what the page says first is not what it says in the end."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'spcheck.launch.host' in sys.orig_argv: os._exit(3)\n"
    )
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert "BROKEN  FAILED with 2 ranks" in line_of(done.stdout, "gloo ")
    assert done.stdout.splitlines()[-1] == "loopback, gloo should work here and did not."


def may_unshare():
    command = ["unshare", "-n", "true"]
    return shutil.which("unshare") and subprocess.run(command, capture_output=True, timeout=20).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="needs a network namespace of its own")
def test_without_a_network():
    done = doctor(before=["unshare", "-n"])
    assert done.returncode == 0
    assert "cannot  127.0.0.1 cannot be used: " in line_of(done.stdout, "gloo ")
    assert done.stdout.splitlines()[-1] == "spcheck diff runs here on loopback."
