"""Candidates whose rank 1 calls other collectives than its peers: ``python -m tests.e2e.parting BACKEND``.

Prints one JSON object: per bug what the run came to. A process of its own, since ranks are forked from it.
"""

import gc
import json
import sys
import time

import optimized.dataflows.full_sp
import optimized.norms
from fixtures.seams import edited
from spcheck.case import Case
from spcheck.judge.failure import failure_sentence
from spcheck.judge.verdict import conclude
from spcheck.plan.plan import make_plan
from spcheck.report.json import to_json
from spcheck.report.text import to_text
from tests.e2e.trials import run

GATHER = "layer.sp.sp_all_gather(hidden)[: positions.shape[0]]"
SCATTER = "hidden = layer.sp.sp_reduce_scatter(layer.self_attn(full, positions, attn))"
HERE = "layer.sp.group.rank == 1"
COPIES = "hidden.repeat(layer.sp.group.size, 1)"
FIRST_TIME = 'tp.rank == 1 and "skipped" not in vars(tp) and not vars(tp).update(skipped=True)'
BLOCK = (optimized.dataflows.full_sp, "full_sp_block")
PARTINGS = {
    "skipped": (*BLOCK, GATHER, f"({COPIES} if {HERE} else layer.sp.sp_all_gather(hidden))[: positions.shape[0]]"),
    "repeated": (*BLOCK, GATHER, f"({HERE} and layer.sp.sp_all_gather(hidden), {GATHER})[1]"),
    "swapped": (
        *BLOCK,
        f"full = {GATHER}\n    {SCATTER}",
        f"first = {HERE} and layer.sp.sp_reduce_scatter({COPIES})\n    full = {GATHER}\n"
        f"    hidden = first if {HERE} else layer.sp.sp_reduce_scatter(layer.self_attn(full, positions, attn))",
    ),
    "of another size": (*BLOCK, "sp_all_gather(hidden)", f"sp_all_gather(hidden[1:] if {HERE} else hidden)"),
    "skipped among equal ones": (
        optimized.norms,
        "fused_allreduce_rms_norm",
        "tp.all_reduce(partial)",
        f"(partial if {FIRST_TIME} else tp.all_reduce(partial))",
    ),
}


def main(backend):
    gc.freeze()
    results = {}
    for name, bug in PARTINGS.items():
        scheme = "tp" if bug[0] is optimized.norms else "full-sp"
        plan = make_plan(Case(((5,),), 2, backend=backend, scheme=scheme))
        with edited(*bug):
            begun = time.monotonic()
            reports = run(plan, backend, begun + (60 if backend == "loopback" else 4))
        comparison = conclude(plan, reports, {}, failure_sentence(reports))
        text = to_text(comparison)
        results[name] = {**json.loads(to_json(comparison)), "text": text, "seconds": time.monotonic() - begun}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
