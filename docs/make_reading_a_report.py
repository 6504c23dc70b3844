"""Runs the examples of reading-a-report.md and writes their outputs into it: `python docs/make_reading_a_report.py`.

Each example is a real `spcheck diff` in processes of its own. A fault of `fixtures/mutants.py` gets into the process
that holds the ranks by a sitecustomize.py on its path; the tree itself is never changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "reading-a-report.md"

_SEED = """\
import sys
if "spcheck.launch.host" in sys.orig_argv:
    sys.path.insert(0, {root!r})
    from fixtures.mutants import MUTANTS
    seam = next(m for m in MUTANTS if m.name == {fault!r}).seam()
    seam.__enter__()  # for as long as the process lives, and for the ranks that are forked from it
"""


@dataclass(frozen=True)
class Example:
    """One block of the document: its command, the fault it runs with, and which lines of the output it shows."""

    words: str
    fault: str | None = None
    shows: Callable[[str], str] = str


def _around_the_first_difference(text: str) -> str:
    """Of the first forward that `--verbose` lists: its heading, the first probes, and those about the first DIFFERS."""
    lines = text.split("\n\n")[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("DIFFERS"))
    return "\n".join([*lines[:5], "...", *lines[first - 4 : first + 4], "..."]) + "\n"


def _from_the_choices(text: str) -> str:
    """The lines behind the contracts."""
    return text[text.index("choices ") :]


_GENERATES = "--tp 2 --requests 1@9,5/- --mtp-steps 2 --generate 3 --set vocab_size=2"

EXAMPLES = {
    "healthy": Example("--tp 2 --tokens 17"),
    "value": Example("--tp 2 --tokens 17", "one-rank-holds-another-replica"),
    "contract": Example("--tp 2 --tokens 17", "sp-rows-not-in-the-padding-mask"),
    "parallel": Example(
        "--tp 2 --requests 5/11/- --previous 7/-/3 --graph-sizes 8,16 --padding-content stale --collectives"
    ),
    "generated": Example(_GENERATES),
    "token": Example(_GENERATES, "one-draft-too-many-is-accepted", _from_the_choices),
    "quiet": Example("--tp 2 --tokens 17 --quiet", "one-rank-holds-another-replica"),
    "verbose": Example("--tp 2 --tokens 17 --verbose", "one-rank-holds-another-replica", _around_the_first_difference),
}


def output_of(example: Example) -> str:
    """What the command prints, with the folder of a clone somewhere in place of this one."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if example.fault is not None:
            seed = _SEED.format(root=str(ROOT), fault=example.fault)
            (Path(folder) / "sitecustomize.py").write_text(seed, encoding="utf-8")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "spcheck", "diff", *example.words.split()]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != (0 if example.fault is None else 1):
        raise SystemExit(f"{example.words} with fault {example.fault} ended with {done.returncode}: {done.stderr}")
    return example.shows(done.stdout.replace(str(ROOT), "/home/you/spcheck"))


def block_of(name: str, text: str) -> re.Match[str]:
    """The block marked ``<!-- name -->``; its second group is the output."""
    found = re.search(rf"(<!-- {name} -->\n```\n)(.*?)(```\n)", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"{DOCUMENT} has no block {name}")
    return found


def main() -> None:
    """Runs every example and rewrites its block."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, example in EXAMPLES.items():
        old = block_of(name, text)
        text = text[: old.start(2)] + output_of(example) + text[old.end(2) :]
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
