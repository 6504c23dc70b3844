"""Shared by the tests. Every xdist worker computes with one thread: the ranks are the parallelism."""

import gc

import torch

from spcheck.case import Case
from spcheck.launch.ranks import run_threads
from spcheck.plan import make_plan
from spcheck.verdict import Comparison, conclude
from spcheck.worker.built import EnginePool

torch.set_num_threads(1)
gc.freeze()  # as the host does: torch's own objects are not visited by every collection


def compare_case(case: Case, pool: EnginePool | None = None) -> Comparison:
    from spcheck.launch.parent import failure_sentence

    plan = make_plan(case)
    reports = run_threads(plan, pool)
    return conclude(plan, reports, {"backend": "loopback"}, failure_sentence(reports))
