"""How the time and the memory of a case grow with its sizes (loopback, one process, one thread).

python -m benchmarks.growth [--smoke] [tokens] [layers] [ranks] [requests] [context] [steps]

``requests`` decode one token each, behind 32 cached ones; ``context`` is the cached tokens of one request that chooses
256 keys and generates eight steps; ``steps`` are generated, each with its drafts.

Every case runs in a process of its own: its peak memory is that of nothing else. Seconds are without the prefill of
cached tokens, whose attention grows with the square of their number; the memory is with it.
"""

import json
import subprocess
import sys

from benchmarks.smoke import parser

# Sizes that sixteen ranks can divide.
SIXTEEN = (("num_attention_heads", 16), ("n_routed_experts", 48), ("moe_intermediate_size", 64))
SIZES = {
    "tokens": (17, 64, 256, 1024, 4096),
    "layers": (5, 15, 30, 61),
    "requests": (1, 4, 16, 64),
    "context": (255, 511, 1023, 2047),
    "steps": (1, 4, 16, 64),
    "ranks": (1, 2, 4, 8, 16),
}
SMOKE = {"tokens": (3, 5), "layers": (3,), "requests": (2,), "context": (9,), "steps": (1,), "ranks": (2,)}


def options_of(sweep, n, *, smoke):
    """What the case of size ``n`` has besides one request of 17 tokens on two ranks."""
    return {
        "tokens": {"requests": ((n,),)},
        "layers": {"overrides": (("num_hidden_layers", n),)},
        "requests": {"requests": ((1,) * n,), "cached": ((32,) * n,)},
        "context": {
            "requests": ((1,),),
            "cached": ((n,),),
            "generate": 2 if smoke else 8,
            "overrides": (("index_topk", 8 if smoke else 256),),
        },
        "steps": {"generate": n, "mtp_steps": 2},
        "ranks": {"tp": n, "overrides": SIXTEEN},
    }[sweep]


CASE = """
import json, resource, sys, time, torch
torch.set_num_threads(1)
from spcheck.case import Case
from spcheck.launch.threads import ThreadHost
from spcheck.plan.plan import make_plan
from spcheck.run import run_once
from spcheck.worker.built import EnginePool
from spcheck.worker.side import Side
prefill, run = [0.0], Side.run
def timed(side, phase):
    start = time.perf_counter()
    pieces = run(side, phase)
    prefill[0] += 0 if phase.probed else time.perf_counter() - start
    return pieces
Side.run = timed
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan = make_plan(Case.from_json(json.loads(sys.argv[1])))
host = ThreadHost(EnginePool(limit=64))
host.run(plan)
start, prefill[0] = time.perf_counter(), 0.0
outcome = run_once(plan, host).verdict.outcome
seconds = time.perf_counter() - start - prefill[0] / plan.case.ranks
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds, (peak - before) / 1024, outcome]))
"""


def measured(options):
    from spcheck.case import Case

    case = Case(**{"requests": ((17,),), "tp": 2, "backend": "loopback", **options})
    done = subprocess.run(
        [sys.executable, "-c", CASE, json.dumps(case.to_json())], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main():
    words = parser(__doc__)
    words.add_argument(
        "sweeps", nargs="*", choices=[*SIZES, "all"], default="all", help="which tables; all of them without a word"
    )
    given = words.parse_args()
    sizes = SMOKE if given.smoke else SIZES
    for sweep in sizes if "all" in given.sweeps else given.sweeps:
        first = None
        print(f"{sweep:<12} {'seconds':>8} {'x first':>8} {'MiB':>8} {'x first':>8}")
        for n in sizes[sweep]:
            seconds, memory, outcome = measured(options_of(sweep, n, smoke=given.smoke))
            first = first or (seconds, memory)
            label = f"{n} {'cached' if sweep == 'context' else sweep}"
            times = f"{label:<12} {seconds:8.2f} {seconds / first[0]:8.1f}"
            print(f"{times} {memory:8.0f} {memory / first[1]:8.1f}  {outcome}", flush=True)


if __name__ == "__main__":
    main()
