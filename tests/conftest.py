"""Shared by the tests. Every xdist worker computes with one thread: the ranks are the parallelism.

hypothesis draws the same examples in every run, so that a run tells of the change and not of the draw.
``pytest tests/property --hypothesis-profile=search`` draws new ones.
"""

import gc

import torch
from hypothesis import settings

from spcheck.case import Case
from spcheck.judge.verdict import Comparison
from spcheck.launch.threads import ThreadHost
from spcheck.plan.plan import make_plan
from spcheck.run import run_once
from spcheck.worker.built import EnginePool

settings.register_profile("search", derandomize=False, deadline=None)
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")
torch.set_num_threads(1)
gc.freeze()  # as the host does: torch's own objects are not visited by every collection


def compare_case(case: Case, pool: EnginePool | None = None) -> Comparison:
    """On the grid that the case asks for, in this process."""
    return run_once(make_plan(case), ThreadHost(pool))
