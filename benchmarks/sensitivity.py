"""How small a fault exact arithmetic sees, and whether it ever cries wolf.

Puts one fault at a time into the optimized model (17 tokens, tp 2, three seeds) and counts the seeds that notice:
``after``: values compared bitwise after their rounding to the grid; ``before``: what spcheck does, which compares them
before it as well. Then runs healthy cases over worlds, schemes, tokens, draft steps, paddings and seeds.

python -m benchmarks.sensitivity [--smoke] [healthy cases, default 500]
"""

import itertools
import math
import time
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

import optimized.attention
import optimized.moe
import optimized.norms
import optimized.rotary
import optimized.router
import spcheck.worker.compare
from benchmarks.smoke import parser
from fixtures.mutants import edited
from optimized.attention import MLAAttention, Softmax
from spcheck.case import Case
from spcheck.families.deepseek.exact import exact_bound, point_of
from spcheck.launch.threads import ThreadHost
from spcheck.plan.plan import make_plan
from spcheck.run import run_once
from spcheck.worker.built import EnginePool

SEEDS = (0, 1, 2)


@contextmanager
def rope_position_off_by_one():
    plain = optimized.rotary.InterleavedRotary.forward

    def forward(self, x, positions):
        return plain(self, x, torch.cat([positions[:5], positions[5:6] - 1, positions[6:]]))

    with mock.patch.object(optimized.rotary.InterleavedRotary, "forward", forward):
        yield


@contextmanager
def probability_moved(by, near_one):
    """Of the first row, whose only key has probability 1, or of the last one."""
    plain = Softmax.forward

    def forward(self, logits):
        out = plain(self, logits)
        row = out[0 if near_one else -1, 0]
        row[row.argmax()] -= by
        return out

    with mock.patch.object(Softmax, "forward", forward):
        yield


@contextmanager
def leak_into_a_head(weight):
    plain = MLAAttention._attend

    def attend(self, query, chosen, attn):
        heads = plain(self, query, chosen, attn)
        heads[3] += weight * heads[7]
        return heads

    with mock.patch.object(MLAAttention, "_attend", attend):
        yield


@contextmanager
def eps_times(factor):
    plain = optimized.norms.Norm.__init__

    def init(self, weight, eps):
        plain(self, weight, eps * factor)

    with mock.patch.object(optimized.norms.Norm, "__init__", init):
        yield


def shared_expert_times(factor):
    plus = "routed + self.shared_experts(x)"
    return edited(optimized.moe.MoE, "forward", plus, f"{plus} * {factor!r}")


def routed_scaling_times(factor):
    return edited(optimized.router.Weigh, "forward", "chosen * self.gamma", f"chosen * (self.gamma * {factor!r})")


def residual_times(factor):
    forward = "x if residual is None else x + residual"
    return edited(optimized.norms.ResidualRMSNorm, "stream", forward, f"({forward}) * {factor!r}")


FAULTS = {
    "one rope position off by one": rope_position_off_by_one,
    "a probability near 1 moved by 2^-19": lambda: probability_moved(2.0**-19, near_one=True),
    "one probability off by 2^-20": lambda: probability_moved(2.0**-20, near_one=False),
    "a probability near 1 moved by 2^-21": lambda: probability_moved(2.0**-21, near_one=True),
    "leak of weight 2^-21 into a head output": lambda: leak_into_a_head(2.0**-21),
    "shared expert x (1 + 1e-6)": lambda: shared_expert_times(1 + 1e-6),
    "shared expert x (1 + 1e-12)": lambda: shared_expert_times(1 + 1e-12),
    "routed scaling x (1 + 1e-4)": lambda: routed_scaling_times(1 + 1e-4),
    "routed scaling x (1 + 1e-6)": lambda: routed_scaling_times(1 + 1e-6),
    "norm eps x (1 + 1e-4)": lambda: eps_times(1 + 1e-4),
    "residual x (1 + 1e-9)": lambda: residual_times(1 + 1e-9),
    "none": nullcontext,
}


@contextmanager
def compared_after_the_snap_only():
    """No bound before the snap: only what differs after it counts."""

    def bound_of(numerics, probe):
        return exact_bound(probe) if point_of(probe) is None else math.inf

    with mock.patch.object(spcheck.worker.compare, "bound_of", bound_of):
        yield


def compared(pool=None, **options):
    return run_once(make_plan(Case(backend="loopback", **options)), ThreadHost(pool))


def seen(fault, seeds, *, after_only):
    count = 0
    for seed in seeds:
        with ExitStack() as stack:
            stack.enter_context(fault())
            if after_only:
                stack.enter_context(compared_after_the_snap_only())
            comparison = compared(tp=2, requests=((17,),), seed=seed)
            count += comparison.bitwise_equal < comparison.compared if after_only else bool(comparison.verdict.findings)
    return count


def healthy_cases(limit):
    worlds = itertools.product(range(13), (1, 2, 3, 4), ("auto", "tp"), ((17,), (1,), (2,), (33,), (5, 1, 11)))
    for seed, tp, scheme, requests in itertools.islice(worlds, limit):
        padded = 40 if seed % 2 else None
        content = ("zero", "random", "nan")[seed % 3]
        yield {"tp": tp, "requests": (requests,), "scheme": scheme, "seed": seed, "mtp_steps": (seed + tp) % 4,
               "pad_to": padded, "padding_content": content, "skip_padding": seed % 4 < 2,
               "reference_world": 1 if seed % 2 else None}  # fmt: skip


def main():
    words = parser(__doc__)
    words.add_argument("cases", nargs="?", type=int, help="healthy cases, 500 without a number")
    given = words.parse_args()
    seeds, limit = (SEEDS[:1], 4) if given.smoke else (SEEDS, 500)
    limit = limit if given.cases is None else given.cases
    torch.set_num_threads(1)
    print(f"{'fault':<42} {'after':>6} {'before':>7}   of {len(seeds)} seeds")
    for name, fault in FAULTS.items():
        print(
            f"{name:<42} {seen(fault, seeds, after_only=True):>6} {seen(fault, seeds, after_only=False):>7}", flush=True
        )
    pool, start, cases, probes, unequal = EnginePool(limit=8), time.perf_counter(), 0, 0, 0
    for options in healthy_cases(limit):
        comparison = compared(pool, **options)
        cases, probes = cases + 1, probes + comparison.compared
        if comparison.verdict.outcome != "EQUAL":
            unequal += 1
            print(comparison.plan.case.id, comparison.verdict.findings[:1])
    spent = time.perf_counter() - start
    print(f"{cases} healthy cases, {probes} compared values, {unequal} not EQUAL ({spent:.0f} s)")


if __name__ == "__main__":
    main()
