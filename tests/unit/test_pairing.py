"""Probes that one side alone has: one finding for each forward, whatever their number."""

from spcheck.case import Case
from spcheck.judge.verdict import conclude
from spcheck.plan.plan import make_plan
from tests.unit.test_verdict import difference, judged, reports, row

PLAN = make_plan(Case(requests=((3,),), tp=1, mtp_steps=2, numerics="float64"))


def alone(probe, side="reference", phase="draft", call=1):
    return {"probe": probe, "phase": phase, "call": call, "kind": "value", "unpaired": side}


def findings(*rows):
    found = conclude(PLAN, reports(list(rows)), {}, None).verdict
    return [f for f in found.findings if f.kind == "unpaired"], found


def test_a_forward_that_did_not_run_is_one_finding():
    probes = [alone(f"model.layers.5.{name}") for name in ("embed_tokens.in", "enorm.out", "hnorm.out")]
    found, verdict = findings(row("model.norm.out", difference()), *probes)
    assert [f.message for f in found] == ["draft step 1 did not run in the candidate: 3 probes unpaired"]
    assert verdict.outcome == "DIVERGED"
    assert verdict.first_divergence["probe"] == "model.layers.5.embed_tokens.in"


def test_each_forward_and_each_side_is_told_by_itself():
    found, _ = findings(alone("model.layers.5.a"), alone("model.layers.5.a", call=0), alone("b", "candidate", call=0))
    assert [f.message for f in found] == [
        "model.layers.5.a (draft step 0) was seen in the reference only",
        "b (draft step 0) was seen in the candidate only",
        "draft step 1 did not run in the candidate: 1 probe unpaired",
    ]


def test_probes_of_a_forward_that_ran():
    paired = {**row("model.layers.5.a", difference()), "phase": "draft", "call": 1}
    found, _ = findings(paired, alone("model.layers.5.b"), alone("model.layers.5.c"), alone("model.layers.5.d"))
    assert [f.message for f in found] == [
        "model.layers.5.b (draft step 1) was seen in the reference only, and 2 more probes of this forward"
    ]


def test_the_outcome_is_the_same_for_one_probe():
    assert (
        judged([row("a", difference()), alone("model.aux.1", phase="target", call=0)], []).verdict.outcome == "DIVERGED"
    )
