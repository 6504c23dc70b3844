"""What spcheck costs, as ratios measured side by side in one run: most of this machine's speed cancels out.

python -m benchmarks.ratios

The function that compares has a table of its own: python -m benchmarks.measuring
"""

import importlib
import statistics
import subprocess
import sys
import time

import torch

from spcheck.case import Case
from spcheck.comm.loopback import run_loopback
from spcheck.launch.ranks import run_threads
from spcheck.plan import make_plan
from spcheck.worker.built import EnginePool
from spcheck.worker.pair import token_ids
from spcheck.worker.weights import open_weights

ROUNDS = 5
DIFF = [sys.executable, "-m", "spcheck", "diff", "--tp", "2", "--tokens", "17", "--backend"]
# Hidden 1024 with the published head sizes, the other widths in the published proportions, and few layers and experts.
WIDE = (
    ("hidden_size", 1024), ("intermediate_size", 2560), ("moe_intermediate_size", 288), ("num_hidden_layers", 3),
    ("first_k_dense_replace", 1), ("num_attention_heads", 16), ("q_lora_rank", 384), ("kv_lora_rank", 256),
    ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128), ("index_n_heads", 16),
    ("index_head_dim", 128), ("index_topk", 64), ("n_routed_experts", 32), ("num_experts_per_tok", 8),
    ("n_group", 4), ("topk_group", 2), ("vocab_size", 8192),
)  # fmt: skip


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def ratio(command, base):
    """Median of the ratio pair by pair."""
    return statistics.median(seconds(command) / seconds(base) for _ in range(ROUNDS))


class Pair:
    """One case again and again in this process, all of it or only the two models' forwards."""

    def __init__(self, **options):
        self.plan = make_plan(Case(**{"requests": ((17,),), "tp": 2, "backend": "loopback", **options}))
        self.pool = EnginePool(limit=2 * self.plan.case.tp)
        self.bare = {}  # (rank, subject) -> engine and its communicators
        run_threads(self.plan, self.pool)
        run_loopback(self.plan.case.tp, self.forwards)

    def checked(self):
        start = time.perf_counter()
        run_threads(self.plan, self.pool)
        return time.perf_counter() - start

    def unprobed(self):
        start = time.perf_counter()
        run_loopback(self.plan.case.tp, self.forwards)
        return time.perf_counter() - start

    @torch.inference_mode()
    def forwards(self, world):
        tokens, case = token_ids(self.plan), self.plan.case
        for _, side in self.plan.sides:
            engine, apart = self.engine(world, side)
            requests = list(range(len(tokens)))
            together = [[r] for r in requests] if apart else [requests]
            engine.start([len(ids) + case.mtp_steps for ids in tokens])
            for some in together:
                engine.step([(r, 0, tokens[r]) for r in some])
            for step in range(case.mtp_steps):
                for some in together:
                    engine.draft(some, step)

    def engine(self, world, side):
        module = importlib.import_module(side.module)
        key = world.rank, side
        if key not in self.bare:
            groups = {name: Rejoined() for name in ("tp", "ep")}
            for group in groups.values():
                group.join(world.group("tp", range(world.size)))
            engine = module.build(
                self.plan.config, open_weights(self.plan), groups, dtype=getattr(torch, self.plan.dtype),
                device=torch.device("cpu"), scheme=side.scheme, aux_layers=(), pad_to=None, graph_sizes=(),
                skip_padding=True, expert_parallel=True, all2all_backend=self.plan.case.all2all_backend,
                lora_adapters=0,
            )  # fmt: skip
            self.bare[key] = engine, groups
        engine, groups = self.bare[key]
        for name, group in groups.items():
            group.join(world.group(name, range(world.size)))
        return engine, module.BATCHING == "request"


class Rejoined:
    """A communicator whose world may change."""

    def join(self, inner):
        self.rank, self.size, self.inner = inner.rank, inner.size, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def warm(label, rounds, **options):
    pair = Pair(**options)
    checked, shares = [], []
    for _ in range(rounds):
        checked.append(pair.checked())
        shares.append(checked[-1] / pair.unprobed())
    best, share = 1 / min(checked), statistics.median(shares)
    print(f"{label:<44} {best:5.1f} a second, {share:5.2f} x the two models' bare forwards", flush=True)


def main():
    torch.set_num_threads(1)
    import_torch = [sys.executable, "-c", "import torch"]
    import_click = [sys.executable, "-c", "import click"]
    help_page = [sys.executable, "-m", "spcheck", "--help"]
    print(f"spcheck diff, cold, gloo                     {ratio([*DIFF, 'gloo'], import_torch):5.2f} x `import torch`")
    print(
        f"spcheck diff, cold, loopback                 {ratio([*DIFF, 'loopback'], import_torch):5.2f} x `import torch`"
    )
    print(f"spcheck --help                               {ratio(help_page, import_click):5.2f} x `import click`")
    for numerics in ("float64", "exact"):
        warm(f"warm case, tp 2, 17 tokens, {numerics}", 40, numerics=numerics)
    for numerics in ("float32", "float64", "exact"):
        options = {"overrides": WIDE, "requests": ((128,),), "numerics": numerics}
        warm(f"hidden 1024, tp 2, 128 tokens, {numerics}", 2 * ROUNDS, **options)
    start = time.perf_counter()
    for _ in range(3_000_000):
        pass
    print(f"(3 million empty turns of a Python loop take {time.perf_counter() - start:.2f} s here)")


if __name__ == "__main__":
    main()
