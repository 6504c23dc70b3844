"""Routed padding: what a gate chose for rows that are no token, and where they were sent."""

import math

import torch
from torch import tensor

from spcheck.case import Case
from spcheck.judge.contracts.padded import PaddedChoices
from spcheck.plan.plan import make_plan
from spcheck.subjects.protocol import Tap
from spcheck.worker.capture import Piece
from spcheck.worker.expert_rows import count_experts, padded_choices

PLAN = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, skip_padding=False))
EXPERTS, CHOSEN = PLAN.config.n_routed_experts, PLAN.config.num_experts_per_tok
MLP = "model.layers.2.mlp"
TAPS = {f"{MLP}.gate.choose.out": Tap(f"{MLP}.gate.choose", "out", 0, "Shard(0)", "set")}
LEAST = list(range(CHOSEN))
BEST = list(range(EXPERTS - 1, EXPERTS - 1 - CHOSEN, -1))


def entries(chosen, sent=None, scores=None, real=1):
    values = {".gate.choose.in": scores, ".gate.choose.out": chosen, ".experts.ids": sent}
    pieces = [Piece(f"{MLP}{name}", value) for name, value in values.items() if value is not None]
    return list(padded_choices(PLAN, TAPS, pieces, lambda _: real))


def rising(rows):
    """Scores of which the last experts' are the best."""
    return torch.arange(EXPERTS, dtype=torch.float64).repeat(rows, 1)


def test_real_rows_are_left_out_and_counts_are_by_expert_and_rank():
    (entry,) = entries(tensor([LEAST, BEST, [*LEAST[:-1], EXPERTS - 1]]))
    assert [entry["counts"][e] for e in LEAST] == [1] * (CHOSEN - 1) + [0]
    assert entry["counts"][EXPERTS - 1] == 2
    assert entry["to_rank"] == [1, 2]
    assert sum(entry["counts"]) == 2 * CHOSEN


def test_without_a_padded_row_there_is_nothing_to_say():
    assert entries(tensor([BEST, BEST]), real=2) == []


def test_the_order_of_the_ids_is_free_and_another_id_is_not():
    chosen = tensor([BEST, BEST, BEST])
    (entry,) = entries(chosen, chosen.flip(1), rising(3))
    assert (entry["sent"], entry["chosen"]) == (None, None)
    other = tensor([LEAST, BEST, [0, *BEST[1:]]])
    (entry,) = entries(chosen, other, rising(3))
    assert entry["sent"] == {"row": 1, "wanted": BEST, "found": [0, *BEST[1:]]}
    (entry,) = entries(other, other, rising(3))
    assert entry["chosen"] == {"row": 1, "wanted": BEST, "found": [0, *BEST[1:]]}


def test_scores_that_are_no_numbers_choose_what_they_like():
    (entry,) = entries(tensor([BEST, LEAST]), scores=rising(2) * tensor([[1.0], [math.nan]]))
    assert entry["chosen"] is None


def test_rows_that_are_not_sent_at_all_are_told():
    (entry,) = entries(tensor([BEST, BEST]), tensor([BEST]))
    assert entry["sent"] == {"row": 0, "wanted": BEST, "found": []}


def test_an_id_that_no_expert_has_counts_nowhere():
    counts, _ = count_experts(tensor([[-1, 0, EXPERTS, 2 * EXPERTS]]), PLAN)
    assert (len(counts), sum(counts)) == (EXPERTS, 1)


def padded(plan, *counts_by_rank):
    reports = [
        {"rank": rank, "candidate": {"padded": [{"layer": "model.layers.2", "call": 0, "counts": counts}]}}
        for rank, counts in enumerate(counts_by_rank)
    ]
    return PaddedChoices(plan, "candidate", plan.candidate, reports)


def test_padded_rows_of_all_shards_reach_an_expert_and_those_of_a_replica_once():
    first, second = [1] * EXPERTS, [10] * EXPERTS
    key = "model.layers.2", 0
    assert padded(PLAN, first, second).rows_of_experts(key, None) == [11] * EXPERTS
    alone = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, skip_padding=False, scheme="tp"))
    half = EXPERTS // 2
    assert padded(alone, first, second).rows_of_experts(key, None) == [1] * half + [10] * half
    columns = make_plan(Case(requests=((3,), ()), tp=2, mtp_steps=0, skip_padding=False, scheme="tp"))
    by_rank = [[1] * EXPERTS, [10] * EXPERTS, [100] * EXPERTS, [1000] * EXPERTS]
    block = EXPERTS // 4
    wanted = [101] * block + [1010] * block + [101] * block + [1010] * block
    assert padded(columns, *by_rank).rows_of_experts(key, None) == wanted
