"""Judging and showing, on reports written by hand: no run, so that every rule is tried alone."""

import copy
import json

import pytest

from spcheck.case import Case
from spcheck.judge.merge import merge_probes
from spcheck.judge.outcome import EXIT_CODES, outcome_of, worst
from spcheck.judge.verdict import conclude
from spcheck.plan.plan import make_plan
from spcheck.report.json import to_json
from spcheck.report.text import to_text, verdict_line

PLAN = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, numerics="float64"))
SILENT = {"rows": [], "collectives": {}, "work": [], "silent": []}


def difference(**values):
    base = {"rows": 2, "unequal_rows": 0, "max_abs": 0.0, "max_rel": 0.0, "worst_row": None, "worst_channel": None}
    base |= {
        "worst_expected": None,
        "worst_actual": None,
        "first_over": None,
        "rows_over": 0,
        "ratio": None,
        "note": "",
    }
    return {**base, "reference_nan": False, **values}


def wrong(size=0.5, **values):
    places = {"worst_row": 0, "worst_channel": 4, "worst_expected": 1.0, "worst_actual": 1.0 + size, "first_over": 0}
    return difference(unequal_rows=1, rows_over=1, max_abs=size, max_rel=size, **places, **values)


def row(probe, diff, kind="value", **more):
    return {"probe": probe, "phase": "target", "call": 0, "kind": kind, "bound": 1e-12, "difference": diff, **more}


def reports(*rows_by_rank):
    return [
        {"rank": rank, "probes": list(rows), "expert_rows": [], "reference": copy.deepcopy(SILENT),
         "candidate": {**copy.deepcopy(SILENT), "scheme": "full-sp"}}
        for rank, rows in enumerate(rows_by_rank)
    ]  # fmt: skip


def judged(*rows_by_rank, failure=None, plan=PLAN):
    return conclude(plan, reports(*rows_by_rank), {}, failure)


def test_the_worst_outcome_wins():
    assert worst(["EQUAL", "INCONCLUSIVE", "EQUIVALENT"]) == "INCONCLUSIVE"
    assert worst(["FAILED", "DIVERGED"]) == "FAILED"
    assert outcome_of(0, 0, []) == "INCONCLUSIVE", "nothing compared is no pass"
    assert EXIT_CODES == {"EQUAL": 0, "EQUIVALENT": 0, "DIVERGED": 1, "INCONCLUSIVE": 3, "FAILED": 4}


def test_bitwise_equal_everywhere_is_equal():
    c = judged([row("model.norm.out", difference())], [row("model.norm.out", difference(rows=1))])
    assert (c.verdict.outcome, c.compared, c.bitwise_equal) == ("EQUAL", 1, 1)
    assert c.results[0].rows == 3


def test_within_the_bound_is_equivalent():
    c = judged([row("a", difference(unequal_rows=1, max_rel=1e-15, worst_row=0))], [])
    assert c.verdict.outcome == "EQUIVALENT"
    assert c.verdict.first_divergence is None


def test_the_first_divergence_is_the_first_in_execution_order():
    at = {"first": {"dp": 0, "request": 0, "position": 2}, "worst": {"dp": 0, "request": 0, "position": 2}}
    rows = [row("a", difference()), row("b", difference()), row("c", wrong())]
    c = judged(rows, [row("a", difference()), row("b", wrong(0.1), **at), row("c", difference())])
    assert c.verdict.outcome == "DIVERGED"
    assert c.verdict.first_divergence == {"probe": "b", "call": 0, "dp": 0, "request": 0, "position": 2, "rank": 1}
    (finding,) = c.verdict.findings
    assert "b: 1.0e-01 over bound 1.0e-12 on 1 of 4 rows, first at request 0 token 2, rank 1" in finding.message
    assert "channel 4: 1.1 for 1" in finding.message
    assert "(1 later probes differ too)" in finding.message
    assert "equal until  a" in to_text(c)


def test_a_replica_that_differs_is_a_divergence_even_with_equal_rows():
    fault = {"replica": {"dp": 0, "rank": 1, "request": 0, "position": 1}}
    c = judged([row("a", difference(), **fault)], [row("a", difference())])
    assert c.verdict.outcome == "DIVERGED"
    assert "the replicas on rank 0 and rank 1 differ" in c.verdict.findings[0].message


@pytest.mark.parametrize("numerics", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["value", "set", "scores"])
def test_no_rounding_explains_ranks_that_disagree(numerics, kind):
    plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, numerics=numerics))
    fault = {"replica": {"dp": 0, "rank": 1, "request": 0, "position": 1}}
    c = judged([row("a", difference(), kind, **fault)], [row("a", difference(), kind)], plan=plan)
    assert c.verdict.outcome == "DIVERGED"


def test_a_reference_that_differs_from_itself_proves_nothing():
    fault = {"reference_replica": {"dp": 0, "rank": 1, "request": 0, "position": 1}}
    c = judged([row("a", difference(), **fault)], [row("a", difference())])
    assert c.verdict.outcome == "INCONCLUSIVE"
    assert "the reference differs from itself" in c.verdict.findings[0].message


def test_an_unpaired_and_a_silent_probe_never_pass():
    c = judged([row("a", difference()), {**row("model.aux.1", difference()), "unpaired": "reference"}], [])
    assert c.verdict.outcome == "DIVERGED"
    quiet = reports([row("a", difference())], [])
    quiet[0]["candidate"]["silent"] = ["model.norm.out"]
    c = conclude(PLAN, quiet, {}, None)
    assert c.verdict.outcome == "DIVERGED"
    assert "model.norm.out: declared by the candidate, and never fired" in c.verdict.findings[0].message


def test_another_active_scheme_is_told():
    other = reports([row("a", difference())], [])
    other[1]["candidate"]["scheme"] = "tp"
    c = conclude(PLAN, other, {}, None)
    assert c.verdict.outcome == "DIVERGED"
    assert "scheme tp is active in the candidate, full-sp expected" in c.verdict.findings[0].message


def chosen(within=0, beyond=0):
    counts = {"compared": 2, "agreeing": 2 - within - beyond, "within": within, "beyond": beyond}
    return {"choices": {**counts, "margin": 1e-3, "flip_margin": 1e-9, "score_error": 1e-9}}


@pytest.mark.parametrize(
    ("numerics", "kind", "more", "outcome"),
    [
        ("exact", "set", chosen(within=1), "DIVERGED"),
        ("float64", "set", {}, "DIVERGED"),
        ("float64", "set", chosen(beyond=1), "DIVERGED"),
        ("float64", "set", chosen(within=1), "INCONCLUSIVE"),
        ("float32", "set", chosen(beyond=1), "DIVERGED"),
        ("float32", "value", {}, "DIVERGED"),
        ("float32", "scores", {}, "DIVERGED"),
        ("bfloat16", "set", chosen(beyond=1), "DIVERGED"),
        ("bfloat16", "value", {}, "INCONCLUSIVE"),
    ],
)
def test_a_difference(numerics, kind, more, outcome):
    plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, numerics=numerics))
    assert judged([row("a", wrong(), kind, **more)], [], plan=plan).verdict.outcome == outcome


def deep(layers, **options):
    overrides = (("num_hidden_layers", layers),)
    return make_plan(
        Case(requests=((3,),), tp=2, mtp_steps=0, overrides=overrides, **{"numerics": "float32", **options})
    )


@pytest.mark.parametrize(
    ("layers", "size", "outcome"),
    [
        (3, 2.1e-5, "DIVERGED"),
        (5, 2.1e-5, "DIVERGED"),
        (16, 6.3e-5, "INCONCLUSIVE"),
        (16, 6.5e-5, "DIVERGED"),
        (61, 2.4e-4, "INCONCLUSIVE"),
        (61, 2.5e-4, "DIVERGED"),
    ],
)
def test_what_rounding_may_explain_in_float32_grows_with_the_layers(layers, size, outcome):
    c = judged([row("a", wrong(size))], [], plan=deep(layers))
    assert c.verdict.outcome == outcome
    reason = f"; a rounding difference may explain it in {layers} layers, --numerics exact tells"
    assert c.verdict.findings[0].message.endswith(reason) == (outcome == "INCONCLUSIVE")


@pytest.mark.parametrize(("drafts", "outcome"), [(0, "DIVERGED"), (2, "INCONCLUSIVE")])
def test_a_draft_step_is_one_more_layer(drafts, outcome):
    """A healthy pair of five layers and two draft steps showed 2.1e-5 on a processor with AVX2 kernels."""
    plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=drafts, numerics="float32"))
    assert judged([row("a", wrong(2.1e-5))], [], plan=plan).verdict.outcome == outcome


@pytest.mark.parametrize("numerics", ["exact", "float64"])
def test_in_other_types_layers_explain_nothing(numerics):
    c = judged([row("a", wrong(2.1e-12))], [], plan=deep(61, numerics=numerics))
    assert c.verdict.outcome == "DIVERGED"


@pytest.mark.parametrize(
    "definite",
    [
        row("b", wrong(1e-3)),
        row("b", wrong(float("inf"))),
        row("b", wrong(), "set", choices={"compared": 2, "agreeing": 1, "within": 0, "beyond": 1, "margin": 1e-3,
                                          "flip_margin": 1e-3, "score_error": 1e-9}),
        row("b", difference(), replica={"dp": 0, "rank": 1, "request": 0, "position": 1}),
    ],
    ids=["beyond", "not finite", "choice", "replica"],
)  # fmt: skip
def test_a_definite_divergence_is_named_before_what_rounding_may_explain(definite):
    c = judged([row("a", wrong(1e-4)), definite, row("c", wrong(1e-4))], [], plan=deep(61))
    assert c.verdict.outcome == "DIVERGED"
    assert c.verdict.first_divergence["probe"] == "b"
    assert c.verdict.findings[0].message.startswith("b: ")
    assert "(1 later probes differ too)" in c.verdict.findings[0].message
    assert "may explain" not in c.verdict.findings[0].message
    assert "equal until" not in to_text(c), "the probe before it differs, too"


def test_a_broken_contract_is_no_rounding():
    told = reports([row("a", wrong(1e-4))], [])
    told[1]["candidate"]["scheme"] = "tp"
    assert conclude(deep(61), told, {}, None).verdict.outcome == "DIVERGED"


def test_a_reference_that_is_no_number_proves_nothing():
    c = judged([row("a", wrong(float("inf"), reference_nan=True))], [])
    assert c.verdict.outcome == "INCONCLUSIVE"
    assert "the reference itself is not a number there" in c.verdict.findings[0].message


def test_a_nan_of_the_candidate_is_a_divergence_in_every_type():
    for numerics in ("float64", "float32", "bfloat16"):
        plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, numerics=numerics))
        assert judged([row("a", wrong(float("inf")))], [], plan=plan).verdict.outcome == "DIVERGED"


def test_what_rounding_cannot_explain_counts_behind_a_choice_too():
    plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, numerics="bfloat16"))
    rows = [row("a", wrong(), "set"), row("b", wrong(float("inf")))]
    assert judged(rows, [], plan=plan).verdict.outcome == "DIVERGED"


def test_a_reference_that_differs_from_itself_first_excuses_what_follows():
    fault = {"reference_replica": {"dp": 0, "rank": 1, "request": 0, "position": 1}}
    assert judged([row("a", wrong(), **fault)], []).verdict.outcome == "INCONCLUSIVE"
    assert judged([row("a", wrong()), row("b", difference(), **fault)], []).verdict.outcome == "DIVERGED"


def test_a_failure_outranks_what_was_compared():
    c = judged([row("a", wrong())], [], failure="rank 1 raised ValueError: no")
    assert c.verdict.outcome == "FAILED"
    assert "failed  rank 1 raised ValueError: no" in to_text(c)


def test_hints():
    ratio = judged([row("a", wrong(ratio=2.0, rows=1))], []).verdict.findings[0].message
    assert "2 x the reference: summed 2 times?" in ratio
    less = judged([row("a", wrong(ratio=0.5, rows=1))], []).verdict.findings[0].message
    assert "0.5 x the reference: not summed over the 2 ranks?" in less
    single = judged([row("a", difference())], [row("a", {**wrong(), "rows": 1, "wrong": [(0, 0)]})])
    assert "only" not in single.verdict.findings[0].message, "it is the last row, rank 1's, and its shard's first"
    assert "not finite" in judged([row("a", wrong(float("inf")))], []).verdict.findings[0].message


def test_json_has_no_infinity_and_text_no_markup_of_names():
    c = judged([row("model.[red]x[/]", wrong(float("inf")))], [])
    document = json.loads(to_json(c), parse_constant=lambda name: pytest.fail(name))
    assert document["probes"][0]["max_rel"] is None
    assert "model.[red]x[/]" in to_text(c)


def test_the_verdict_line_says_when_sp_did_not_run():
    plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0, scheme="tp"))
    told = reports([row("a", difference())], [])
    for report in told:
        report["candidate"]["scheme"] = "tp"
    c = conclude(plan, told, {}, None)
    assert verdict_line(c) == "EQUAL, scheme tp: SP not exercised"


def test_merging_keeps_the_order_of_the_rank_that_saw_most():
    merged = merge_probes(reports([row("b", difference())], [row("a", difference()), row("b", difference())]))
    assert [r.probe for r in merged] == ["a", "b"]


def test_forwards_that_different_ranks_saw_stand_in_the_order_in_which_they_ran():
    """One data-parallel rank is idle in the step before, the other one in the case's own step."""
    plan = make_plan(Case(requests=((1,), ()), previous=((), (3,)), tp=1, mtp_steps=0, numerics="float64"))
    before, own = (row("model.norm.out", wrong()), {**row("model.norm.out", difference()), "call": 1})
    cache = {**row("model.layers.0.self_attn.cache.latent", wrong()), "phase": "cache"}
    c = judged([own, cache], [before, cache], plan=plan)
    assert [(r.phase, r.call) for r in c.results] == [("target", 0), ("target", 1), ("cache", 0)]
    assert c.verdict.first_divergence["probe"] == "model.norm.out"
