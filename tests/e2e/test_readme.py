"""README's outputs are what the program prints today: same lines, whatever the last digits on this machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.seams import edited
from optimized.sp import SequenceParallel
from spcheck.case import Case
from spcheck.report.text import to_text
from tests.conftest import compare_case

ROOT = Path(__file__).parents[2]


def block(marker):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {marker} -->\n```\n(.*?)```", text, re.DOTALL)
    assert found, marker
    return found[1]


def skeleton(text):
    """Lines without their figures and places: these depend on the processor's rounding."""
    lines = [re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", line).split() for line in text.splitlines()]
    plain = [" ".join(line) for line in lines if line]
    kept = [line for line in plain if not line.startswith(("model.", "request #", "reference and candidate"))]
    return [re.sub(r"\b(ok|DIFFERS) .*", r"\1", line) for line in kept]


def test_the_first_output():
    done = subprocess.run(
        [sys.executable, "-m", "spcheck", "diff", "--tp", "2", "--tokens", "17"],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0
    assert skeleton(done.stdout) == skeleton(block("output"))


def test_the_diverged_output():
    scattered = "self.group.reduce_scatter("
    with edited(SequenceParallel, "sp_reduce_scatter", scattered, f"2 * {scattered}"):
        text = to_text(compare_case(Case(requests=((17,),), tp=2)))
    assert skeleton(text)[-len(skeleton(block("diverged"))) :] == skeleton(block("diverged"))


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert all((ROOT / link).exists() for link in re.findall(r"\]\(([^)#:]+)\)", text))
