"""The doctor's facts from files, which backends they allow, and how a page of them reads."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from spcheck.doctor.machine import PACKAGES, Cores, Memory, Place, cores, look, memory
from spcheck.doctor.torch_facts import Torch
from spcheck.doctor.trial import Backend, Diagnosis, expected
from spcheck.report.doctor import doctor_text

GIB = 2**30
CPU = Torch(version="2.13.0", gloo=True)
GPU = Torch(version="2.13.0", cuda="12.9", gpus=("H200, 139 GiB",) * 4, gloo=True, nccl="2.27.5")


def tree(root: Path, **files: str):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_limits_of_a_group_and_of_those_above_it(tmp_path):
    tree(
        tmp_path,
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__a__cpu_dot_max="150000 100000\n",
        sys__fs__cgroup__a__b__cpu_dot_max="max 100000\n",
        sys__fs__cgroup__a__b__memory_dot_max=f"{3 * GIB}\n",
        sys__fs__cgroup__a__memory_dot_max=f"{2 * GIB}\n",
        proc__meminfo="MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n",
    )
    assert cores(tmp_path).quota == 1.5
    assert memory(tmp_path) == Memory(16 * GIB, 8 * GIB, 2 * GIB)


def test_limits_of_the_older_kind(tmp_path):
    tree(
        tmp_path,
        sys__fs__cgroup__cpu__cpu_dot_cfs_quota_us="200000",
        sys__fs__cgroup__cpu__cpu_dot_cfs_period_us="100000",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712",
    )
    assert cores(tmp_path).quota == 2
    assert memory(tmp_path) == Memory(None, None, None)


@pytest.mark.parametrize("text", ["", "max", "max 100000", "-1", "1 0", "x y"])
def test_no_limit(tmp_path, text):
    tree(tmp_path, sys__fs__cgroup__cpu_dot_max=text, sys__fs__cgroup__memory_dot_max="max")
    tree(tmp_path, sys__fs__cgroup__cpu__cpu_dot_cfs_quota_us="-1")
    assert (cores(tmp_path).quota, memory(tmp_path).limit) == (None, None)


def test_this_machine():
    machine = look()
    assert 1 <= machine.cores.usable <= machine.cores.machine
    assert (machine.memory.available or 0) < (machine.memory.total or 0)
    assert machine.temporary.problem is None


def test_packages_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert tuple(re.split(r"\W", line)[0] for line in project["dependencies"]) == PACKAGES


@pytest.mark.parametrize(
    ("torch", "changes", "works"),
    [
        (CPU, {}, {"loopback": 2, "gloo": 2}),
        (GPU, {}, {"loopback": 2, "gloo": 2, "nccl": 2}),
        (replace(GPU, gpus=GPU.gpus[:1]), {}, {"loopback": 2, "gloo": 2, "nccl": 1}),
        (replace(GPU, gpus=()), {}, {"loopback": 2, "gloo": 2}),
        (replace(CPU, gloo=False), {}, {"loopback": 2}),
        (CPU, {"network": "there is no network interface lo"}, {"loopback": 2}),
        (CPU, {"temporary": Place("/tmp", problem="Read-only file system")}, {}),
        (Torch(problem="ModuleNotFoundError: No module named 'torch'"), {}, {}),
    ],
)
def test_what_should_work(torch, changes, works):
    found = expected(replace(look(), **changes), torch)
    assert {name: ranks for name, ranks, reason in found if reason is None} == works
    assert [name for name, *_ in found] == ["loopback", "gloo", "nccl"]


def test_a_page_of_long_and_odd_names_fits():
    machine = replace(
        look(),
        code="/home/" + "x" * 100,
        packages=dict.fromkeys(PACKAGES),
        cores=Cores(192, 3, 1.5),
        memory=Memory(None, None, GIB),
        temporary=Place("/tmp/\x1b[31mred\n", problem="Read-only file system"),
    )
    backends = (Backend("gloo", 2, outcome="FAILED", problem="rank 1 killed by signal 9, " * 9, seconds=3.0),)
    text = doctor_text(Diagnosis(machine, GPU, backends))
    assert max(map(len, text.splitlines())) <= 80
    assert all(line.isprintable() for line in text.splitlines())
    assert "3 of 192 may be used, and a cgroup leaves the time of 1.5" in text
    assert "click MISSING" in text
    assert text.splitlines()[-1] == "gloo should work here and did not."


@pytest.mark.parametrize(
    ("backends", "code"),
    [
        ((), 4),
        ((Backend("nccl", 1, "no GPU"),), 4),
        ((Backend("gloo", 2, outcome="EQUAL"), Backend("nccl", 1, "no GPU")), 0),
        ((Backend("gloo", 2, outcome="EQUAL"), Backend("loopback", 2, outcome="INCONCLUSIVE")), 4),
    ],
)
def test_exit_codes(backends, code):
    assert Diagnosis(look(), CPU, backends).exit_code == code
