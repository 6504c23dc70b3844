"""What a case did not exercise, against lists by hand."""

from pathlib import Path

import pytest

from spcheck.case import Case
from spcheck.judge.exercised import not_exercised
from spcheck.plan.plan import make_plan
from spcheck.report.exercised import exercised_json, exercised_lines

GATE = ".mlp.gate.choose.out"
GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
V32 = str(GOLDEN / "deepseek_v32")  # a dense and a MoE layer, an MTP layer, 8 experts, index_topk 5


def plan_of(**options):
    return make_plan(Case(**{"requests": ((17,),), "tp": 2, "model": V32, **options}))


def missed(rows=(), generation=None, **options):
    plan = plan_of(**options)
    reports = [{"rank": rank, "expert_rows": here} for rank, here in enumerate(rows)]
    return not_exercised(plan, reports, generation)


def test_experts_without_a_row_are_named():
    counts = [1] * 8
    one, other = [0, *counts[1:]], [0, 2, 0, *counts[3:]]
    rows = [[[f"model.layers.2{GATE}", 0, counts, []]] for _ in range(2)]
    rows[0].append([f"model.layers.1{GATE}", 0, one, []])
    rows[1].append([f"model.layers.1{GATE}", 0, other, []])
    slots = missed(rows).expert_slots
    assert (slots.count, slots.of, slots.names) == (1, 16, ("model.layers.1.mlp.experts.0",))


def test_experts_of_a_layer_that_never_ran_are_not_counted():
    found = missed(mtp_steps=0)
    assert found.expert_slots.of == 8
    assert (found.mtp_layers.names, found.mtp_layers.of) == (("model.layers.2",), 1)
    found = missed(mtp_steps=1, overrides=(("num_nextn_predict_layers", 3),))
    assert (found.mtp_layers.names, found.mtp_layers.of) == (("model.layers.3", "model.layers.4"), 3)
    assert not missed().mtp_layers.count


@pytest.mark.parametrize(
    ("options", "kept_all", "always_chose"),
    [
        ({"requests": ((5,),)}, 3, 0),
        ({"requests": ((6,),)}, 0, 3),
        ({"requests": ((1, 1),), "cached": ((4, 3),)}, 3, 0),
        ({"requests": ((6,), (2,))}, 0, 0),
        ({"requests": ((6,),), "previous": ((2,),)}, 0, 0),
        ({"requests": ((6,), ())}, 0, 3),  # an idle rank chooses nothing
        ({"requests": ((6,),), "candidate": "reference", "reference_world": 1}, 0, 0),  # plain ones always score
        ({"requests": ((5,),), "mtp_steps": 2}, 2, 0),  # draft step 1 has a sixth key
        ({"requests": ((6,),), "model": str(GOLDEN / "deepseek_v3")}, 0, 0),
    ],
)
def test_whether_top_k_chose(options, kept_all, always_chose):
    found = missed(**options)
    assert (found.sparse_choice.count, found.top_k_skip.count) == (kept_all, always_chose)


class Generated:
    """As far as it is looked at."""

    def __init__(self, accepted, steps=2):
        self.accepted, self.steps = accepted, steps


@pytest.mark.parametrize(
    ("generation", "names"),
    [
        (None, ()),
        (Generated([]), ("draft 0", "draft 1")),
        (Generated([(0, 3), (0, 3)]), ("draft 0", "draft 1")),
        (Generated([(1, 3), (0, 3)]), ("draft 1",)),
        (Generated([(1, 3), (1, 3)]), ()),
    ],
)
def test_drafts_that_were_never_accepted(generation, names):
    assert missed(generation=generation, mtp_steps=2, generate=2).drafts_accepted.names == names


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ()),
        ({"pad_to": 17, "mtp_steps": 0}, ("--pad-to",)),
        ({"pad_to": 18}, ()),
        ({"padding_content": "nan"}, ("--padding-content",)),
        ({"requests": ((16,),), "skip_padding": False}, ("--no-skip-padding",)),
        ({"skip_padding": False}, ()),
        ({"scheme": "tp", "all2all_backend": "naive"}, ("--all2all-backend",)),
        ({"expert_parallel": False, "tp": 1}, ("--no-expert-parallel",)),
        ({"expert_parallel": False}, ()),
        ({"prefill_chunk": 17}, ("--prefill-chunk",)),
        ({"prefill_chunk": 8}, ()),
        ({"graph_sizes": (8, 17), "mtp_steps": 0}, ("--graph-sizes",)),
        ({"lora_rank": 2, "lora_adapters": 2}, ("--lora-adapters (LoRA adapter 1)",)),
        ({"reference_world": 1, "tp": 1}, ("--reference-world",)),
        ({"overrides": (("max_position_embeddings", 17),), "mtp_steps": 2}, ("--mtp-steps (draft step 1)",)),
        ({"overrides": (("topk_group", 4),)}, ("n_group",)),
        ({"overrides": (("mtp_zero_first_embedding", True),), "mtp_steps": 0}, ("mtp_zero_first_embedding",)),
        ({"overrides": (("mtp_zero_first_embedding", True),)}, ()),
    ],
)
def test_settings_that_change_nothing(options, names):
    assert missed(**options).settings.names == names


def test_no_step_that_generates():
    assert missed(generation=Generated([], steps=0), generate=2, mtp_steps=0).settings.names == ("--generate",)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"requests": ((16,),)}, 1),
        ({"requests": ((17,),)}, 0),
        ({"requests": ((16,),), "pad_to": 24}, 0),
        ({"requests": ((16,),), "mtp_steps": 2}, 0),  # a later draft step has one row
        ({"requests": ((17,),), "scheme": "tp"}, 1),
        ({"requests": ((17,),), "tp": 1}, 1),
    ],
)
def test_a_case_without_a_padded_row_says_so(options, count):
    found = missed(**options)
    assert (found.padded_rows.count, found.padded_rows.of) == (count, 1)
    text = " ".join(exercised_lines(found, plan_of(**options)))
    assert ("no row is padded" in text) == bool(count)


def test_the_lines_and_the_json():
    plan = plan_of(requests=((3,),), mtp_steps=0, padding_content="nan")
    found = not_exercised(plan, [], None)
    assert list(exercised_lines(found, plan)) == [
        "not exercised 8 of 8 expert slots without a row; top-k never left a key out",
        "              (index_topk 5); MTP layer 2 never used; no effect:",
        "              --padding-content",
    ]
    document = exercised_json(found)
    assert document["mtp_layers"] == {"count": 1, "of": 1, "names": ["model.layers.2"]}
    assert document["top_k_skip"] == {"count": 0, "of": 2, "names": []}
    assert list(exercised_lines(None, plan)) == []
    assert exercised_json(None) is None


def test_a_part_is_told_with_its_layers():
    plan = plan_of(requests=((5,),), mtp_steps=2)
    found = not_exercised(plan, [], Generated([(1, 3), (0, 3)]))
    text = " ".join(" ".join(exercised_lines(found, plan)).split())
    assert "top-k never left a key out in layers 0, 1 (index_topk 5); draft 1 never accepted" in text


def test_nothing_is_said_where_all_was_exercised():
    rows = [[[f"model.layers.{i}{GATE}", 0, [1] * 8, []] for i in (1, 2)]]
    options = {"requests": ((17, 4),), "previous": ((2,),)}
    assert list(exercised_lines(missed(rows, **options), plan_of(**options))) == []
