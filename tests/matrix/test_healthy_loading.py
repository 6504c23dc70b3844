"""Over the covering arrays both subjects hold what the table says; they are built and not run."""

import pytest
import torch

from spcheck.case import Case
from spcheck.comm.loopback import run_loopback
from spcheck.comm.recorded import Recorded
from spcheck.plan.plan import make_plan
from spcheck.worker.built import build, own_groups
from tests.matrix.decoding import DECODING
from tests.matrix.prompts import PROMPTS

EVERY = 9  # of the rows one in so many: names and ranks matter here, which many rows have alike


def logs_of(plan):
    """What each rank says of its parameters, of both sides."""
    logs = []

    @torch.inference_mode()
    def main(world):
        for role, side in plan.sides:
            groups = own_groups(world, side, plan.case)
            if plan.place(world.rank).tp_rank < side.tp:
                recorded = {name: Recorded(g, [], lambda: "", world.trace) for name, g in groups.items()}
                built = build(side, plan, world.rank, torch.device("cpu"), recorded)
                logs.append((world.rank, role, built.loading.log))

    run_loopback(plan.case.ranks, main)
    return logs


@pytest.mark.parametrize("space", [PROMPTS, DECODING], ids=lambda space: space.name)
@pytest.mark.parametrize("numerics", ["exact", "bfloat16"])
def test_healthy_subjects_hold_what_the_checkpoint_says(space, numerics):
    first = 0 if numerics == "exact" else EVERY // 2
    for row in space.read()[first::EVERY]:
        plan = make_plan(Case(**{**space.case_of(row), "backend": "loopback", "numerics": numerics}))
        logs = logs_of(plan)
        assert len({rank for rank, _, _ in logs}) == plan.case.ranks
        for rank, role, log in logs:
            assert not log["faults"], (plan.case.id, rank, role)
            assert not log["unknown"], (plan.case.id, rank, role)
