"""What spcheck costs, as ratios measured side by side in one run: most of this machine's speed cancels out.

python -m benchmarks.ratios [--smoke]

The function that compares has a table of its own: python -m benchmarks.measuring
"""

import gc
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from benchmarks.smoke import parser
from spcheck.case import Case
from spcheck.comm.loopback import run_loopback
from spcheck.launch.threads import ThreadHost
from spcheck.plan.plan import make_plan
from spcheck.run import run_once
from spcheck.subjects.protocol import load_subject
from spcheck.worker.built import EnginePool, build_bare, own_groups
from spcheck.worker.script import Script

CPU = torch.device("cpu")
DIFF = [sys.executable, "-m", "spcheck", "diff", "--tp", "2", "--tokens", "17", "--backend"]
# Hidden 1024 with the published head sizes, the other widths in the published proportions, and few layers and experts.
WIDE = (
    ("hidden_size", 1024), ("intermediate_size", 2560), ("moe_intermediate_size", 288), ("num_hidden_layers", 3),
    ("first_k_dense_replace", 1), ("num_attention_heads", 16), ("q_lora_rank", 384), ("kv_lora_rank", 256),
    ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128), ("index_n_heads", 16),
    ("index_head_dim", 128), ("index_topk", 64), ("n_routed_experts", 32), ("num_experts_per_tok", 8),
    ("n_group", 4), ("topk_group", 2), ("vocab_size", 8192),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Rounds of a command and of a warm case, the hidden size and tokens of the large one, turns of the last loop."""

    commands: int
    warm: int
    hidden: int
    tokens: int
    turns: int


FULL = Sizes(commands=5, warm=40, hidden=1024, tokens=128, turns=3_000_000)
SMOKE = Sizes(commands=1, warm=1, hidden=64, tokens=9, turns=3_000)


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def ratio(command, base, rounds):
    """Median of the ratio pair by pair."""
    return statistics.median(seconds(command) / seconds(base) for _ in range(rounds))


class Pair:
    """One case again and again in this process, all of it or only the two models' forwards."""

    def __init__(self, **options):
        self.plan = make_plan(Case(**{"requests": ((17,),), "tp": 2, "backend": "loopback", **options}))
        self.host = ThreadHost(EnginePool(limit=2 * self.plan.case.tp))
        self.bare = {}  # (rank, side) -> engine and its communicators
        self.outcome = run_once(self.plan, self.host).verdict.outcome
        self.unprobed()

    def checked(self):
        start = time.perf_counter()
        log = self.host.run(self.plan)
        seconds = time.perf_counter() - start
        assert not log.failed
        return seconds

    def unprobed(self):
        start = time.perf_counter()
        run_loopback(self.plan.case.tp, self.forwards)
        return time.perf_counter() - start

    @torch.inference_mode()
    def forwards(self, world):
        script = Script(self.plan, CPU)
        for side in (self.plan.reference, self.plan.candidate):
            engine = self.engine(world, side)
            packed = load_subject(side.module).BATCHING == "packed"
            engine.start(self.plan.lengths(0), self.plan.adapters(0))
            for phase in self.plan.phases[0]:
                for requests in [list(phase.requests)] if packed else [[r] for r in phase.requests]:
                    if phase.kind == "target":
                        engine.step(script.chunks(phase, 0, requests))
                    else:
                        engine.draft(requests, phase.draft)

    def engine(self, world, side):
        """Without hooks, built once, and connected to this world's groups."""
        groups = own_groups(world, side, self.plan.case)
        key = world.rank, side
        if key not in self.bare:
            rejoined = {name: Rejoined(group) for name, group in groups.items()}
            self.bare[key] = build_bare(side, self.plan, CPU, rejoined), rejoined
        engine, rejoined = self.bare[key]
        for name, group in rejoined.items():
            group.join(groups[name])
        return engine


class Rejoined:
    """A communicator whose world may change."""

    def __init__(self, inner):
        self.join(inner)

    def join(self, inner):
        self.rank, self.size, self.inner = inner.rank, inner.size, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def warm(label, rounds, **options):
    gc.collect()  # the engines of the case before, which hold gigabytes, lie in cycles
    pair = Pair(**options)
    checked, shares = [], []
    for _ in range(rounds):
        checked.append(pair.checked())
        shares.append(checked[-1] / pair.unprobed())
    best, share = 1 / min(checked), statistics.median(shares)
    print(f"{label:<44} {best:5.1f} a second, {share:5.2f} x the two models' bare forwards, {pair.outcome}", flush=True)


def cold(rounds):
    import_torch = [sys.executable, "-c", "import torch"]
    import_click = [sys.executable, "-c", "import click"]
    rows = {
        "spcheck diff, cold, gloo": ([*DIFF, "gloo"], import_torch, "import torch"),
        "spcheck diff, cold, loopback": ([*DIFF, "loopback"], import_torch, "import torch"),
        "spcheck --help": ([sys.executable, "-m", "spcheck", "--help"], import_click, "import click"),
    }
    for label, (command, base, what) in rows.items():
        print(f"{label:<44} {ratio(command, base, rounds):5.2f} x `{what}`", flush=True)


def main():
    sizes = SMOKE if parser(__doc__).parse_args().smoke else FULL
    torch.set_num_threads(1)
    cold(sizes.commands)
    for numerics in ("float64", "exact"):
        warm(f"warm case, tp 2, 17 tokens, {numerics}", sizes.warm, numerics=numerics)
    for numerics in ("float32", "float64", "exact"):
        overrides = tuple({**dict(WIDE), "hidden_size": sizes.hidden}.items())
        options = {"overrides": overrides, "requests": ((sizes.tokens,),), "numerics": numerics}
        label = f"hidden {sizes.hidden}, tp 2, {sizes.tokens} tokens, {numerics}"
        warm(label, 2 * sizes.commands, **options)
    start = time.perf_counter()
    for _ in range(sizes.turns):
        pass
    print(f"({sizes.turns:,} empty turns of a Python loop take {time.perf_counter() - start:.2f} s here)")


if __name__ == "__main__":
    main()
