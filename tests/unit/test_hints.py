"""Hints from reports written by hand: only what separates wrong rows from right ones is said."""

import pytest

from spcheck.case import Case
from spcheck.judge.merge import merge_probes
from spcheck.judge.sentences import sentence
from spcheck.judge.verdict import conclude
from spcheck.plan.plan import make_plan
from tests.unit.test_verdict import difference, reports, row

PROBE = "model.layers.2.mlp.out"


def plan_of(**options):
    return make_plan(Case(**{"requests": ((5, 1, 11),), "tp": 2, "mtp_steps": 0, "numerics": "float64", **options}))


def told(plan, wrong, kind="value", probe=PROBE, **by_rank):
    """The sentence of a probe that is wrong on these runs of rows, rank by rank."""
    rows = []
    for rank, runs in enumerate(wrong):
        place = plan.place(rank)
        phase = plan.phase("target", 0, place.dp_rank)
        owned = phase.owned(place.tp_rank, plan.case.tp)
        over = sum(last - first + 1 for first, last in runs)
        where = {"dp": place.dp_rank, "request": 0, "position": rank}
        d = difference(rows=len(owned), rows_over=over, unequal_rows=over, max_rel=0.5 * bool(over), wrong=runs,
                       first_over=0 if over else None, worst_row=0 if over else None)  # fmt: skip
        more = {name: values[rank] for name, values in by_rank.items() if over and values[rank] is not None}
        rows.append([row(probe, d, kind, first=where, worst=where, **more)])
    told_by = reports(*rows)
    for report, marks in zip(told_by, by_rank.get("marks", [[]] * len(rows)), strict=True):
        report["marks"] = marks
    (result,) = merge_probes(told_by)
    return sentence(result, plan)


def hints(*args, **more):
    return told(*args, **more).split("; ")[1:]


EVERY, NONE = [(0, 8)], []


def test_a_request():
    assert hints(plan_of(), [[(0, 4)], NONE]) == ["only request 0, on all its rows"]
    assert hints(plan_of(), [[(0, 3)], NONE]) == []


def test_rows_of_a_rank():
    assert hints(plan_of(), [EVERY, NONE]) == ["only on rank 0, on all rows of its shard"]
    assert hints(plan_of(), [[(1, 8)], NONE]) == []


def test_what_may_be_this_or_that():
    """Two one-row requests: the second is the last row, rank 1's, and a request of its own."""
    assert hints(plan_of(requests=((1, 1),)), [NONE, [(0, 0)]]) == []
    assert hints(plan_of(requests=((3,),)), [[(0, 0)], NONE]) == [], "of three rows one is anything"
    assert hints(plan_of(requests=((8, 9),)), [[(0, 7)], NONE]) == ["only request 0, on all its rows"]
    assert hints(plan_of(requests=((9, 8),)), [EVERY, NONE]) == [
        "only request 0, on all its rows or on rank 0, on all rows of its shard (the same rows)"
    ]


def test_places_in_a_request():
    plan = plan_of(requests=((17,),))
    assert hints(plan, [NONE, [(7, 7)]]) == ["only the last row"]
    assert hints(plan, [[(0, 0)], NONE]) == ["only rows at position 0"]
    assert hints(plan, [[(8, 8)], [(0, 7)]]) == ["only rows with more than 8 keys (index_topk)"]
    assert hints(plan_of(), [[(4, 5)], [(7, 7)]]) == ["only the last row of each request"]
    assert hints(plan, [NONE, [(0, 0)]]) == ["only the first row of rank 1's shard"]
    assert hints(plan, [NONE, [(2, 7)]]) == ["only from position 11 on, row 11 of the batch"]


def test_data_parallel_ranks_and_adapters():
    plan = plan_of(requests=((3, 4), (5,)), lora_rank=4, lora_adapters=1, scheme="tp")
    assert hints(plan, [NONE, NONE, [(0, 2)], [(0, 1)]])[0].startswith("only on DP rank 1, on all its rows")
    plan = plan_of(lora_rank=4, lora_adapters=1, scheme="tp")
    assert hints(plan, [[(0, 4), (6, 8)], [(0, 7)]]) == ["only rows with an adapter"]
    assert hints(plan, [[(5, 5)], NONE])[0].startswith("only request 1, on all its rows or rows without an adapter")


def test_rows_that_are_all_wrong_are_not_separated():
    assert hints(plan_of(), [EVERY, [(0, 7)]]) == []


def test_what_is_not_known_is_not_said():
    d = difference(rows=9, rows_over=5, max_rel=0.5, first_over=0, wrong=None)
    (result,) = merge_probes(reports([row(PROBE, d)], [row(PROBE, difference(rows=8))]))
    assert "only" not in sentence(result, plan_of())


def mark(sketches, probe=PROBE, call=0):
    return {"probe": probe, "phase": "target", "call": call, "sketches": sketches}


def sketch(n):
    return [10.0 + n, 1.0 + n, 2.0 - n * n]


def marks_of(plan):
    owned = [plan.phase("target", 0).owned(rank, plan.case.tp) for rank in range(plan.case.tp)]
    return [[mark([sketch(n) for n in rows])] for rows in owned]


def test_rows_of_another_place():
    plan = plan_of(requests=((17,),))
    shifted = [[sketch(n + 1) for n in range(9)], [sketch(n) for n in range(10, 17)]]
    found = hints(plan, [EVERY, [(0, 6)]], sketches=shifted, marks=marks_of(plan))
    assert found == ["each row holds the value of the row 1 later"]
    theirs = [None, [sketch(n) for n in range(8)]]
    found = hints(plan, [NONE, [(0, 7)]], sketches=theirs, marks=marks_of(plan))
    assert found[0] == "each row holds the value of the row 9 before, that of the previous rank's shard"


def test_a_single_row_of_another_place():
    plan = plan_of()
    found = hints(plan, [[(5, 5)], NONE], sketches=[[sketch(3)], None], marks=marks_of(plan))
    assert found == ["request 1 token 0 holds the value of request 0 token 3", "only request 1, on all its rows"]


def test_in_a_vocabulary_of_one_rows_are_alike_anyway():
    plan = plan_of(overrides=(("vocab_size", 1),))
    found = hints(plan, [[(5, 5)], NONE], sketches=[[sketch(3)], None], marks=marks_of(plan))
    assert found == ["only request 1, on all its rows"]


def test_a_value_of_another_probe_is_no_cast():
    """It is as narrow as that probe's values are."""
    clues = {"cast": "bfloat16", "equals": "model.embed_tokens.out"}
    assert hints(plan_of(), [[(5, 5)], NONE], clues=[clues, None])[0] == "holds the value of model.embed_tokens.out?"
    assert hints(plan_of(), [[(5, 5)], NONE], clues=[{"cast": "bfloat16"}, None])[0].endswith("a cast?")


def test_a_row_that_is_added_and_parts_that_went_elsewhere():
    plan = plan_of(requests=((17,),))
    every = [[(0, 8)], [(0, 7)]]

    def added(n):
        return [9.0 + n, *(a + b for a, b in zip(sketch(n)[1:], sketch((n - 1) % 17)[1:], strict=True))]

    wrong = [[added(n) for n in range(9)], [added(n) for n in range(9, 17)]]
    assert hints(plan, every, sketches=wrong, marks=marks_of(plan)) == ["the row 1 before is added to each"]
    moved = [[20.0, sketch(0)[1] + 5, sketch(0)[2] - 3], [20.0, sketch(1)[1] - 5, sketch(1)[2] + 3]]
    found = hints(plan, [[(0, 1)], NONE], sketches=[moved, None], marks=marks_of(plan))
    assert found == ["their sum is right: parts of rows went to other rows?"]
    tiny = [[20.0, sketch(0)[1] + 5e-9, sketch(0)[2] - 3e-9], [20.0, sketch(1)[1] - 2e-9, sketch(1)[2] + 1e-9]]
    found = hints(plan, [[(0, 1)], NONE], sketches=[tiny, None], marks=marks_of(plan))
    assert "their sum is right: parts of rows went to other rows?" not in found, "they are small, and do not cancel"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(2.0, "2 x the reference: summed 2 times?"), (1.02, "1.02 x the reference: scaled?"),
     (1.001, "1.001 x the reference: scaled?"), (2.5, "2.5 x the reference: routed_scaling_factor?")],
)  # fmt: skip
def test_a_factor_from_1_001_on(ratio, said):
    plan = plan_of()
    rows = [[row(PROBE, {**difference(rows=1, rows_over=1, max_rel=0.1, first_over=0), "ratio": ratio})], []]
    (result,) = merge_probes(reports(*rows))
    assert said in sentence(result, plan)


def test_a_factor_must_be_that_of_all_ranks():
    rows = [
        [row(PROBE, {**difference(rows=1, rows_over=1, max_rel=0.1, first_over=0), "ratio": r})] for r in (2.0, 3.0)
    ]
    (result,) = merge_probes(reports(*rows))
    assert "x the reference" not in sentence(result, plan_of())


def test_a_padded_row_leaks_only_where_it_may():
    clues = [{"nan": True}, None]
    assert hints(plan_of(), [[(1, 2)], NONE], clues=clues) == ["not a number"]
    padded = plan_of(padding_content="nan", pad_to=18)
    assert hints(padded, [[(1, 2)], NONE], clues=clues) == ["not a number: a padded row that leaks?"]


def test_behind_missing_rows_or_a_missing_forward_nothing_is_guessed():
    plan = plan_of(mtp_steps=1)
    d = difference(rows=9, rows_over=9, unequal_rows=9, max_rel=1.0, first_over=0, ratio=2.0, wrong=[(0, 8)])
    missing = {**row("model.layers.5.enorm.out", d), "phase": "draft", "unpaired": "reference"}
    del missing["difference"]
    later = {**row("model.layers.5.self_attn.cache.latent", d), "phase": "cache"}
    found = conclude(plan, reports([missing, later], []), {}, None).verdict.findings
    assert [f.kind for f in found][:2] == ["unpaired", "value"]
    assert "x the reference" not in found[1].message
    found = conclude(plan, reports([later], []), {}, None).verdict.findings
    assert "2 x the reference" in found[0].message


def test_a_choice_among_equal_scores():
    d = difference(rows=2, rows_over=1, unequal_rows=1, max_rel=1.0, first_over=0, wrong=None)
    counts = {"compared": 2, "agreeing": 1, "within": 0, "beyond": 1, "margin": 0.0, "flip_margin": 0.0}
    rows = [[row("a", d, "set", choices={**counts, "score_error": 0.0})], []]
    (result,) = merge_probes(reports(*rows))
    assert "equal scores chosen in another order: the order of ties?" in sentence(result, plan_of())
