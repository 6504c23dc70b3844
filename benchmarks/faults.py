"""Plants faults, one at a time, in a copy of the source tree, and tells what sees each and what is said of its cause.

python -m benchmarks.faults FOLDER [--only a0,b1] [--no-sweep] [--jobs N] [--json FILE]
python -m benchmarks.faults --smoke

FOLDER holds an ``index.json``, a list of ``{"name", "diff", "command", "expected"}``, and the diffs; a ``cause`` may
stand there as well (:mod:`benchmarks.fault_words`). Of each fault the default case is run, then (unless --no-sweep) the
cases of the covering arrays until one sees it, then its own command. A fault whose expected outcome is EQUAL must stay
EQUAL in all of them.
"""

from __future__ import annotations

import argparse
import json
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.fault_words import causes, judged

ROOT = Path(__file__).parents[1]
DEFAULT = "spcheck diff --tp 2 --tokens 17"
_COPIED = ("reference", "optimized", "spcheck", "fixtures", "tests", "benchmarks")
_GRACE = 15.0  # seconds that a process has over what its case may take
_MODELS = {"mscale": {"mscale": 0.707}, "yarn_half": {"mscale": 0.5}}
"""Made models: what of the golden folder's ``rope_parameters`` is another."""
_ZEROED = {"zero_o": ".self_attn.o_proj.weight"}
"""Made models: which of the golden folder's tensors are zero."""


@dataclass
class Told:
    """What came of one fault. ``seen_by`` is default, sweep, command or nothing."""

    name: str
    expected: str
    seen_by: str
    outcome: str
    first: str | None = None
    case: str = ""
    text: list[str] = field(default_factory=list)
    hint: str = ""
    wrong: list[str] = field(default_factory=list)


class Runner:
    """The process that runs cases in a copy; a case that hangs ends it, and the next one gets a fresh one."""

    def __init__(self, tree: Path, seconds: float) -> None:
        self._tree = tree
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """One case's answer; that of a process which hangs or dies is FAILED."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**request, "seconds": self._seconds}).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._seconds + _GRACE)
        line = process.stdout.readline() if ready else b""
        answer: dict[str, Any] = json.loads(line) if line else {"outcome": "FAILED", "text": ["failed  hangs or dies"]}
        if answer.get("outcome") == "FAILED":
            self.close()  # threads of ranks may go on
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fault_runner"],
            cwd=self._tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": str(self._tree), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        )
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"the runner in {self._tree} does not start: python -m benchmarks.fault_runner tells why")
        return process


@contextmanager
def planted(diff: Path) -> Iterator[Path | None]:
    """A copy of the source tree with one fault in it; None where the change does not fit."""
    with tempfile.TemporaryDirectory(prefix="spcheck-fault-") as folder:
        tree = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        applied = subprocess.run(
            ["patch", "-p1", "--no-backup-if-mismatch", "-s", "-i", str(diff)], cwd=tree, capture_output=True
        )
        yield tree if applied.returncode == 0 else None


def tell(entry: Mapping[str, Any], folder: Path, *, sweeps: bool, seconds: float) -> Told:
    """Plants one fault and runs what there is, until something sees it."""
    with planted(folder / entry["diff"]) as tree:
        if tree is None:
            return Told(entry["name"], entry["expected"], "nothing", "DOES NOT APPLY")
        runner = Runner(tree, seconds)
        try:
            return _judged(_seen(entry, tree, runner, sweeps=sweeps), entry.get("cause") or causes().get(entry["name"]))
        finally:
            runner.close()


def _seen(entry: Mapping[str, Any], tree: Path, runner: Runner, *, sweeps: bool) -> Told:
    told = Told(entry["name"], entry["expected"], "nothing", "EQUAL")
    runs = [("default", DEFAULT), *([("sweep", None)] if sweeps else []), ("command", entry["command"])]
    for name, command in runs:
        answers = _sweep(runner) if command is None else [runner.ask(command=_words(command, tree))]
        for answer in answers:
            outcome = answer.get("outcome") or answer["error"]
            if outcome not in ("EQUAL", "EQUIVALENT"):
                told.outcome, told.first, told.case = outcome, answer.get("first"), answer.get("case", command or "")
                told.text = answer.get("text", [])
            if outcome in ("DIVERGED", "FAILED"):
                told.seen_by = name
                return told
    return told


def _sweep(runner: Runner) -> Iterator[dict[str, Any]]:
    for number in count():
        answer = runner.ask(sweep=number)
        if answer.get("end"):
            return
        yield answer


def _words(command: str, tree: Path) -> list[str]:
    """The words behind ``spcheck diff``; a made model's folder is made."""
    words = shlex.split(command)[2:]
    for i, word in enumerate(words):
        name = word.rpartition("/")[2]
        if word.startswith(("FOLDERS/", "models/")):
            words[i] = str(_made(name, tree))
        elif word.startswith("fixtures/"):
            words[i] = str(tree / word)
    return words


def _made(name: str, tree: Path) -> Path:
    """The golden folder with the change that the name stands for."""
    folder = tree / "made" / name
    shutil.copytree(tree / "fixtures/golden/deepseek_v32", folder, dirs_exist_ok=True)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["rope_parameters"] |= _MODELS.get(name, {})
    file.write_text(json.dumps(config), encoding="utf-8")
    if name in _ZEROED:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        zeroed = {key: x * 0 if key.endswith(_ZEROED[name]) else x for key, x in tensors.items()}
        save_file(zeroed, folder / "model.safetensors")
    return folder


def _judged(told: Told, cause: Mapping[str, Any] | None) -> Told:
    if cause is not None and told.seen_by != "nothing":
        told.hint, told.wrong = judged(cause, told.text)
    return told


def show(all_told: Sequence[Told]) -> Iterator[str]:
    """The table, then the counts."""
    for told in all_told:
        yield f"{told.name:<62} {told.expected:<9} {told.seen_by:<8} {told.outcome[:60]:<9} {told.hint:<9} {told.first}"
        for sentence in told.text[:4]:
            yield f"    {sentence}"
        for guess in told.wrong:
            yield f"    NOT TRUE: {guess}"
    wrong = [told for told in all_told if told.expected == "EQUAL" and told.outcome != "EQUAL"]
    sought = [told for told in all_told if told.expected != "EQUAL"]
    seen = [told for told in sought if told.seen_by != "nothing"]
    by = Counter(told.seen_by for told in seen)
    hints = Counter(told.hint for told in seen)
    ways = ", ".join(f"{number} by {way}" for way, number in by.items())
    yield f"{len(all_told)} faults; {len(seen)} of {len(sought)} seen: {ways}"
    yield f"of harmless ones {len(wrong)} not EQUAL: {', '.join(told.name for told in wrong) or 'none'}"
    shares = [
        f"{hints[kind]} ({hints[kind] / max(len(seen), 1):.0%}) {kind}" for kind in ("names", "silent", "misleads")
    ]
    yield f"hints of the seen ones: {', '.join(shares)}"


SMOKE = {
    "twice": ("hidden = layer.sp.sp_reduce_scatter(", "hidden = 2 * layer.sp.sp_reduce_scatter("),
    "harmless": ("hidden = layer.sp.sp_reduce_scatter(", "hidden = 1 * layer.sp.sp_reduce_scatter("),
}
"""Two changes of one line of ``optimized/dataflows/full_sp.py``."""


def smoke_folder(folder: Path) -> None:
    """Writes an index and the diffs of :data:`SMOKE` into a folder."""
    name = "optimized/dataflows/full_sp.py"
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    index = []
    for fault, (old, new) in SMOKE.items():
        number = next(i for i, line in enumerate(lines) if old in line)
        line = lines[number]
        head = f"--- a/{name}\n+++ b/{name}\n@@ -{number + 1} +{number + 1} @@\n"
        (folder / f"{fault}.diff").write_text(f"{head}-{line}\n+{line.replace(old, new)}\n", encoding="utf-8")
        expected = "EQUAL" if fault == "harmless" else "DIVERGED"
        cause = {"names": "2 x the reference", "allows": []}
        index.append({"name": fault, "diff": f"{fault}.diff", "command": DEFAULT, "expected": expected, "cause": cause})
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def run(folder: Path, only: Sequence[str], *, sweeps: bool, jobs: int, seconds: float) -> list[Told]:
    """All faults of a folder whose names begin with one of ``only``, or all."""
    entries = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    wanted = [e for e in entries if not only or any(e["name"].startswith(word) for word in only)]

    def one(entry: Mapping[str, Any]) -> Told:
        told = tell(entry, folder, sweeps=sweeps, seconds=seconds)
        print(f"{told.name}: {told.seen_by} {told.hint}", file=sys.stderr, flush=True)
        return told

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults and tells what sees them.")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="beginnings of names, with commas")
    parser.add_argument("--no-sweep", action="store_true", help="without the cases of the covering arrays")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="that one case may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="two faults of its own, the default case alone")
    args = parser.parse_args()
    only = [word for word in args.only.split(",") if word]
    with tempfile.TemporaryDirectory() as own:
        if args.smoke:
            smoke_folder(Path(own))
        elif args.folder is None:
            parser.error("a folder with index.json is needed, or --smoke")
        folder = Path(own) if args.smoke else args.folder.resolve()
        all_told = run(folder, only, sweeps=not (args.no_sweep or args.smoke), jobs=args.jobs, seconds=args.seconds)
    print("\n".join(show(all_told)))
    if args.json:
        args.json.write_text(json.dumps([asdict(told) for told in all_told], indent=1), encoding="utf-8")
    if any(told.expected == "EQUAL" and told.outcome != "EQUAL" for told in all_told):
        sys.exit(1)


if __name__ == "__main__":
    main()
