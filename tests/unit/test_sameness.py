"""Which equal rows of a reference are a finding: facts by hand, from the rank to the sentence."""

import json

import pytest
import torch

from spcheck.case import Case
from spcheck.judge.contracts.sameness import EXCUSES, SameRows, degenerate_probes, same_rows
from spcheck.judge.findings import degenerate_findings
from spcheck.plan.plan import make_plan
from spcheck.subjects.protocol import Tap
from spcheck.worker.sameness import Sameness
from spcheck.worker.script import Script

VALUE = Tap("", "out", 0, "Replicate", "value")
SCORES = Tap("", "in", 0, "Replicate", "scores")
FED = "model.embed_tokens.in"


def plan_of(requests=((3,),), **options):
    return make_plan(Case(**{"requests": requests, "tp": 1, "mtp_steps": 0, **options}))


def report_of(plan, values, tap=VALUE, dp_rank=0, fed=None):
    """What a rank says that saw these values [rows, width] of a probe in the target step."""
    sameness = Sameness(Script(plan, torch.device("cpu")), plan.place(dp_rank))
    ids = torch.tensor([range(len(values))] if fed is None else [fed]).T
    sameness.look(
        plan.phases[dp_rank][0], {FED: ids, "a": values}, {FED: Tap("", "in", 0, "Replicate", "set"), "a": tap}.get
    )
    return {"rank": dp_rank, "sameness": json.loads(json.dumps(sameness.report()))}


def degenerate(plan, *reports):
    return [(found.probe, found.rows, found.state) for found in degenerate_probes(plan, reports)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_rows_and_equal_rows(dtype):
    plan = plan_of()
    zero, alike = torch.zeros(3, 8, dtype=dtype), torch.arange(1, 9, dtype=dtype).repeat(3, 1)
    assert degenerate(plan, report_of(plan, zero)) == [("a", 3, "zero")]
    assert degenerate(plan, report_of(plan, -zero)) == [("a", 3, "zero")]
    assert degenerate(plan, report_of(plan, alike)) == [("a", 3, "alike")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [1, 700, 998])
def test_one_row_of_many_blocks(row, dtype):
    plan = plan_of(requests=((1000,),))
    values = torch.zeros(1000, 800, dtype=dtype)
    values[::2] = -0.0
    assert degenerate(plan, report_of(plan, values)) == [("a", 1000, "zero")]
    values[row, 799] = 2.0**-20
    assert not degenerate(plan, report_of(plan, values))


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("base", [0.0, 1.0])
def test_one_other_row_is_enough(row, base):
    values = torch.full((3, 8), base)
    values[row, 5] += 2.0**-20
    assert not degenerate(plan_of(), report_of(plan_of(), values))


def test_what_is_no_number_is_not_alike():
    assert not degenerate(plan_of(), report_of(plan_of(), torch.full((3, 8), torch.nan)))


def test_chosen_ids_are_exempt():
    chosen = Tap("", "out", 0, "Replicate", "set")
    assert not degenerate(plan_of(), report_of(plan_of(), torch.zeros(3, 8, dtype=torch.int64), chosen))


def test_where_no_score_stands_there_is_none():
    scores = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    assert degenerate(plan_of(), report_of(plan_of(), scores, SCORES)) == [("a", 3, "zero")]
    scores[2, 1] = 0.5
    assert not degenerate(plan_of(), report_of(plan_of(), scores, SCORES))


def test_rows_of_one_token_throughout_may_be_alike():
    plan = plan_of(overrides=(("vocab_size", 1),))
    assert not degenerate(plan, report_of(plan, torch.ones(3, 8), fed=[0, 0, 0]))
    assert degenerate(plan, report_of(plan, torch.zeros(3, 8), fed=[0, 0, 0])) == [("a", 3, "zero")]


def test_rows_of_several_ranks_and_forwards():
    plan = plan_of(requests=((1,), (1,)))
    one, other = torch.ones(1, 8), torch.full((1, 8), 2.0)
    one_rank = report_of(plan, one, dp_rank=0)
    assert not degenerate(plan, one_rank), "a single row has one history"
    assert degenerate(plan, one_rank, report_of(plan, one, dp_rank=1)) == [("a", 2, "alike")]
    assert not degenerate(plan, one_rank, report_of(plan, other, dp_rank=1))


def test_rows_of_keys_are_alike_whatever_the_width():
    plan = plan_of(requests=((1,), (1,)))
    narrow, wide = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0, 2.0, 0.0]]])
    (same,) = same_rows([report_of(plan, narrow, dp_rank=0), report_of(plan, wide, dp_rank=1)])
    assert (same.rows, same.histories) == (2, 2)


def test_a_later_forward_can_differ():
    plan = plan_of(requests=((1,),), generate=2)
    sameness = Sameness(Script(plan, torch.device("cpu")), plan.place(0))
    (phase,) = [p for p in plan.phases[0] if p.kind == "target"][:1]
    for value, varied in ((1.0, []), (1.0, []), (2.0, ["a"]), (1.0, ["a"])):
        sameness.look(phase, {"a": torch.full((1, 4), value)}, lambda _: VALUE)
        assert sameness.report()["varied"] == varied


GATE, SOFTMAX = "model.layers.2.mlp.gate.weigh.out", "model.layers.0.self_attn.softmax.out"
SCORED, NORMED = "model.layers.0.self_attn.indexer.choose.in", "model.layers.0.input_layernorm.out"
MTP, HEAD = "model.layers.5.enorm.out", "lm_head.out"


@pytest.mark.parametrize(
    ("options", "same", "reason"),
    [
        ({}, SameRows(SCORED, 3, 3, True, 2, 2), "ReLU"),
        ({"requests": ((1, 1),)}, SameRows(SOFTMAX, 2, 1, False, 2, 2), "an only key"),
        ({"overrides": (("index_topk", 1),)}, SameRows(SOFTMAX, 3, 9, False, 2, 2), "an only key"),
        ({"overrides": (("num_experts_per_tok", 1),)}, SameRows(GATE, 30, 1, False, 2, 2), "single expert"),
        ({}, SameRows(NORMED, 3, 64, False, 1, 2), "its own token"),
        ({}, SameRows(HEAD, 3, 64, False, 2, 1), "vocabulary of one"),
        ({"numerics": "bfloat16"}, SameRows(HEAD, 3, 1, False, 2, 2), "by chance"),
        (
            {"mtp_steps": 1, "requests": ((1, 1),), "overrides": (("mtp_zero_first_embedding", True),)},
            SameRows(MTP, 2, 64, True, 2, 2),
            "position 0",
        ),
    ],
)
def test_each_excuse_has_its_case(options, same, reason):
    def reasons(plan, same):
        return [excuse.reason for excuse in EXCUSES if excuse.covers(plan, same)]

    assert any(reason in given for given in reasons(plan_of(**options), same))
    plain = SameRows("model.layers.0.mlp.out", 17, 64, same.zero, 2, 2)
    assert not reasons(plan_of(**options), plain)


def test_the_sentence():
    plan = plan_of()
    one, zero = report_of(plan_of(((1,),)), torch.zeros(1, 8)), report_of(plan, torch.zeros(3, 8))
    (finding,) = degenerate_findings(degenerate_probes(plan, [zero]))
    assert finding.message == "a: all 3 rows of the reference are zero: nothing was compared there"
    assert (finding.kind, finding.outcome, finding.at["probe"]) == ("degenerate", "INCONCLUSIVE", "a")
    assert "a: the only row of the reference is zero" in degenerate_findings(degenerate_probes(plan, [one]))[0].message
    assert not degenerate_findings(())
    (finding,) = degenerate_findings(degenerate_probes(plan, [zero]) * 3)
    assert finding.message.endswith("(and at 2 more probes)")
