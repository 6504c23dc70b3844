"""Every benchmark runs to its end in its smoke mode: each row of its table is there, with the outcome it must have.

What anything costs is read by nobody here.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = ("EQUAL", "EQUIVALENT")
HELPERS = {"smoke", "fault_runner", "fault_words"}
ELSEWHERE = {"faults"}  # tests/e2e/test_faults.py


def smoke(name, *words):
    """The lines that a benchmark prints, in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()


def test_ratios():
    *rows, last = smoke("ratios")
    commands = ("spcheck diff, cold, gloo", "spcheck diff, cold, loopback", "spcheck --help")
    for label, row in zip(commands, rows[:3], strict=True):
        assert re.fullmatch(rf"{label} +\d+\.\d\d x `import (torch|click)`", row), row
    for numerics, row in zip(("float64", "exact", "float32", "float64", "exact"), rows[3:], strict=True):
        found = re.fullmatch(r".*, (\w+) +\d+\.\d a second, +\d+\.\d\d x the two models' bare forwards, (\w+)", row)
        assert found, row
        assert found[1] == numerics
        assert found[2] in (("EQUAL",) if numerics == "exact" else PASSES), row
    assert last.startswith("(")


def test_growth():
    lines = [line.split() for line in smoke("growth")]
    headings = [words[0] for words in lines if words[1] == "seconds"]
    assert headings == ["tokens", "layers", "requests", "context", "steps", "ranks"]
    rows = {" ".join(words[:2]): words[2:] for words in lines if words[1] != "seconds"}
    assert list(rows) == ["3 tokens", "5 tokens", "3 layers", "2 requests", "9 cached", "1 steps", "2 ranks"]
    for figures in rows.values():
        assert len(figures) == 5
        assert figures[-1] == "EQUAL"


def test_growth_of_one_kind():
    assert [line.split()[0] for line in smoke("growth", "layers")] == ["layers", "3"]


def test_measuring():
    heading, *rows = smoke("measuring")
    assert "assert_close" in heading
    wanted = [
        (shape, dtype, kind)
        for shape in ("[17, 96]", "[65, 33]")
        for dtype in ("float32", "float64", "bfloat16")
        for kind in ("equal", "rounding", "wrong row")
    ]
    for (shape, dtype, kind), row in zip(wanted, rows, strict=True):
        assert re.match(rf"{re.escape(shape)} +{dtype} +{kind} +[\d.]+ x +[\d.]+ x \(\w+ *\) +\d+ ", row), row


def test_sensitivity():
    heading, *rows, healthy = smoke("sensitivity")
    assert heading.endswith("of 1 seeds")
    noticed = {row[:42].strip(): tuple(map(int, row[42:].split())) for row in rows}
    assert len(noticed) == len(rows) == 12
    assert noticed.pop("none") == (0, 0)
    assert {before for _, before in noticed.values()} == {1}, "spcheck sees each of them"
    assert noticed["shared expert x (1 + 1e-12)"] == (1, 1)
    assert noticed["norm eps x (1 + 1e-4)"] == (0, 1), "what the grid hides is seen before it"
    assert re.fullmatch(r"4 healthy cases, \d+ compared values, 0 not EQUAL \(\d+ s\)", healthy)


@pytest.mark.parametrize("name", sorted({p.stem for p in (ROOT / "benchmarks").glob("*.py")} - HELPERS - ELSEWHERE))
def test_each_has_its_test(name):
    assert f"test_{name}" in globals()
