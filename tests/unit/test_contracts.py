"""The tables, against numbers counted by hand for the smallest cases."""

import pytest

from spcheck.case import Case
from spcheck.families.deepseek.collectives import expected_collectives
from spcheck.families.deepseek.rows import expected_rows, phases_of_probe
from spcheck.plan.plan import make_plan
from spcheck.plan.schemes import SidePlan

SIDES = {scheme: SidePlan("candidate", "optimized", scheme, "", 2) for scheme in ("tp", "moe-sp", "full-sp")}
SIDES["reference"] = SidePlan("reference", "reference", "reference", "", 2)


def plan_of(**options):
    return make_plan(Case(**{"requests": ((3,),), "tp": 2, "mtp_steps": 2, **options}))


@pytest.mark.parametrize(
    ("probe", "tp", "moe_sp", "full_sp"),
    [
        ("model.embed_tokens.in", 3, 3, 3),
        ("model.embed_tokens.out", 3, 3, 3),
        ("model.layers.0.input_layernorm.out", 3, 3, 2),
        ("model.layers.0.self_attn.q_a_layernorm.out", 3, 3, 3),
        ("model.layers.0.self_attn.o_proj.in", 3, 3, 3),
        ("model.layers.0.self_attn.indexer.choose.out", 3, 3, 3),
        ("model.layers.0.self_attn.out", 3, 3, 2),
        ("model.layers.0.post_attention_layernorm.in", 3, 3, 2),
        ("model.layers.0.mlp.out", 3, 3, 2),
        ("model.layers.2.input_layernorm.in", 3, 3, 2),  # behind a dense layer
        ("model.layers.2.self_attn.out", 3, 2, 2),
        ("model.layers.2.post_attention_layernorm.out", 3, 2, 2),
        ("model.layers.2.mlp.gate.choose.out", 3, 2, 2),
        ("model.layers.3.input_layernorm.in", 3, 2, 2),  # behind a MoE layer
        ("model.layers.3.self_attn.o_proj.in", 3, 3, 3),
        ("model.norm.out", 3, 3, 2),
        ("model.out", 3, 3, 3),
        ("model.aux.2", 3, 3, 3),
        ("lm_head.out", 3, 3, 3),
        ("sampler.out", 1, 1, 1),
    ],
)
def test_rows_of_three_tokens_over_two_ranks(probe, tp, moe_sp, full_sp):
    plan = plan_of()
    target = plan.phases[0][0]
    seen = {scheme: expected_rows(probe, side, plan.config, target) for scheme, side in SIDES.items()}
    own = 1 if probe == "sampler.out" else 3
    assert seen == {"reference": [own], "tp": [tp], "moe-sp": [moe_sp], "full-sp": [full_sp]}


def test_rows_of_the_draft():
    plan = plan_of()
    first, second = plan.phases[0][1:]
    wanted = [("eh_proj.in", 3, 2), ("self_attn.o_proj.in", 3, 3), ("mlp.out", 2, 2), ("shared_head.norm.out", 3, 2)]
    for probe, moe_sp, full_sp in [*wanted, ("input_layernorm.in", 3, 2), ("out", 3, 3)]:
        name = f"model.layers.5.{probe}"
        assert expected_rows(name, SIDES["moe-sp"], plan.config, first) == [moe_sp]
        assert expected_rows(name, SIDES["full-sp"], plan.config, first) == [full_sp]
    assert expected_rows("model.layers.5.eh_proj.in", SIDES["full-sp"], plan.config, second) == [1]
    assert [p.call for p in phases_of_probe("model.layers.5.eh_proj.in", plan)] == [0, 1]
    assert [p.kind for p in phases_of_probe("model.layers.4.mlp.out", plan)] == ["target"]


def test_rows_at_a_border_are_full():
    plan = plan_of(model="dsv32-alternating")
    target = plan.phases[0][0]
    for layer, rows in ((2, [3]), (3, [3]), (4, [3])):
        probe = f"model.layers.{layer}.input_layernorm.in"
        assert expected_rows(probe, SIDES["moe-sp"], plan.config, target) == rows
    assert expected_rows("model.layers.3.mlp.out", SIDES["moe-sp"], plan.config, target) == [3]
    assert expected_rows("model.layers.4.mlp.out", SIDES["moe-sp"], plan.config, target) == [2]


def shapes(plan, scheme, phase=0, dp_rank=0):
    return [(c.kind, c.group, *c.shape) for c in expected_collectives(plan, SIDES[scheme], dp_rank, phase)]


DENSE = [("all_gather", "tp", 9, 96), ("reduce_scatter", "tp", 18, 96)]
DISPATCH = [("all_gatherv", "ep", 9, 96), ("all_gatherv", "ep", 9, 10), ("all_gatherv", "ep", 9, 10)]
DISPATCH += [("reduce_scatterv", "ep", 18, 96)]
OF_FOUR = [(*call[:3], 4) if call[3] == 10 else call for call in DISPATCH]  # the alternating preset chooses 4 experts
SUM = [("all_reduce", "tp", 17, 96)]


def test_full_sp_target_by_hand():
    """17 tokens, tp 2: m = 9. D = 96, K = 10, 2 dense and 3 MoE layers, 2 aux states, V = 250."""
    plan = plan_of(requests=((17,),), aux_layers=(0, 3))
    wanted = [*SUM, *DENSE, *DENSE, *(DENSE + DISPATCH) * 3, ("all_gather", "tp", 9, 288)]
    assert shapes(plan, "full-sp")[:-1] == wanted
    assert shapes(plan, "full-sp")[-1] == ("all_gather", "tp", 125, 17)
    assert len(wanted) == 1 + 10 + 12 + 1


def test_tp_target_by_hand():
    """Two all-reduces per layer and the embedding's; one more for each aux layer behind layer 0."""
    plan = plan_of(requests=((17,),), aux_layers=(0, 3, 5), scheme="tp")
    assert shapes(plan, "tp")[:-1] == SUM * (1 + 10 + 2)
    assert shapes(plan_of(requests=((17,),)), "reference")[:-1] == SUM * 11


def test_moe_sp_target_by_hand():
    """Layers d d M M M: two open sums of dense layers, shards from the first MoE layer's attention to the exit."""
    plan = plan_of(requests=((17,),), aux_layers=(0, 1, 3, 5), scheme="moe-sp")
    wanted = [*SUM]  # embedding
    wanted += [*SUM]  # layer 0: attention; its MLP's sum is the next norm's
    wanted += [*SUM, *SUM, *SUM]  # aux 1 needs the sum too; layer 1: the MLP before, attention
    wanted += [*SUM, DENSE[1], *DISPATCH]  # layer 2: the MLP before; from full rows to shards
    wanted += [*DENSE, *DISPATCH] * 2  # layers 3 and 4; aux 3 waits as a shard
    wanted += [("all_gather", "tp", 9, 3 * 96)]  # exit: hidden, residual, aux 3; aux 5 is made of them
    assert shapes(plan, "moe-sp")[:-1] == wanted


def test_moe_sp_borders_by_hand():
    """Layers d d M d M d: one packed gather of hidden and residual into each dense layer behind a MoE layer."""
    plan = plan_of(requests=((17,),), aux_layers=(3, 4), model="dsv32-alternating", scheme="moe-sp")
    border = ("all_gather", "tp", 9, 2 * 96)
    wanted = [*SUM, *SUM, *SUM, *SUM]  # embedding; layer 0; layer 1 with the MLP before
    wanted += [*SUM, DENSE[1], *OF_FOUR]  # layer 2
    wanted += [border, *SUM]  # layer 3; aux 3 needs nothing more
    wanted += [*SUM, *SUM, DENSE[1], *OF_FOUR]  # aux 4, then layer 4 with the MLP before
    wanted += [border, *SUM, *SUM]  # layer 5, and its open sum at the exit
    assert shapes(plan, "moe-sp")[:-1] == wanted


def test_the_reference_goes_request_by_request():
    plan = plan_of(requests=((5, 1),))
    seen = expected_collectives(plan, SIDES["reference"], 0, 0)
    assert [c.shape[0] for c in seen if c.kind == "all_reduce"] == [5] * 11 + [1] * 11
    assert expected_collectives(plan_of(requests=((5, 1), ())), SIDES["reference"], 1, 0) == []


def test_drafts_by_hand():
    plan = plan_of(requests=((3, 1),))
    first, later = shapes(plan, "full-sp", 1), shapes(plan, "full-sp", 2)
    assert [c[:2] for c in first] == [c[:2] for c in later]
    assert first[0] == ("all_reduce", "tp", 4, 96)
    assert later[0] == ("all_reduce", "tp", 2, 96)
    assert first[1:3] == [("all_gather", "tp", 2, 96), ("reduce_scatter", "tp", 4, 96)]
    assert first[7] == ("all_gather", "tp", 2, 96)
    assert len(first) == 9
    assert shapes(plan, "tp", 1)[:-1] == [("all_reduce", "tp", 4, 96)] * 3
    moe_sp = shapes(plan, "moe-sp", 1)
    assert moe_sp[1] == ("reduce_scatter", "tp", 4, 96)
    assert moe_sp[6] == ("all_gather", "tp", 2, 2 * 96)
    assert len(moe_sp) == 8


AGREED = ("all_reduce", "dp_cpu", 3, 3)


def test_three_data_parallel_ranks_by_hand():
    """5 + 1, 11 and no tokens, tp 2: shards of 3, 6 and 1 rows on two ranks each, 20 rows in all."""
    plan = plan_of(requests=((5, 1), (11,), ()))
    sizes = (3, 3, 6, 6, 1, 1)
    for dp_rank, m, n in ((0, 3, 6), (1, 6, 11), (2, 1, 1)):
        calls = expected_collectives(plan, SIDES["full-sp"], dp_rank, 0)
        seen = shapes(plan, "full-sp", 0, dp_rank)
        assert seen[:4] == [
            AGREED,
            ("all_reduce", "tp", n, 96),
            ("all_gather", "tp", m, 96),
            ("reduce_scatter", "tp", 2 * m, 96),
        ]
        routed = [c for c in calls if c.group == "ep"]
        assert [(c.kind, c.shape) for c in routed[:4]] == [
            ("all_gatherv", (m, 96)),
            ("all_gatherv", (m, 10)),
            ("all_gatherv", (m, 10)),
            ("reduce_scatterv", (20, 96)),
        ]
        assert {c.sizes for c in routed} == {sizes}
        assert len(seen) == 1 + 1 + 10 + 12 + 1 + 1


def test_draft_step_0_has_the_targets_rows_and_agrees_no_more():
    plan = plan_of(requests=((5, 1), ()))
    kinds = [shapes(plan, "full-sp", number)[0][:2] for number in range(3)]
    assert kinds == [("all_reduce", "dp_cpu"), ("all_reduce", "tp"), ("all_reduce", "dp_cpu")]
    assert [c.sizes for c in expected_collectives(plan, SIDES["full-sp"], 1, 2) if c.group == "ep"] == [(1,) * 4] * 4


def test_without_sp_rows_are_dispatched_between_data_parallel_ranks():
    plan = plan_of(requests=((5, 1), (11,), ()), scheme="tp", all2all_backend="naive")
    calls = [c for c in expected_collectives(plan, SIDES["tp"], 0, 0) if c.group == "dp"]
    wanted = [("broadcast", (rows, width)) for width in (96, 10, 10) for rows in (6, 11, 1)]
    assert [(c.kind, c.shape) for c in calls] == [*wanted, ("all_reduce", (18, 96))] * 3
    assert not [c for c in expected_collectives(plan_of(scheme="tp"), SIDES["tp"], 0, 0) if c.group != "tp"]


def test_all_to_all_has_counts_first_and_rows_by_choice():
    plan = plan_of(requests=((5, 1), (11,)), all2all_backend="all_to_all")
    calls = [c for c in expected_collectives(plan, SIDES["full-sp"], 0, 0) if c.group == "ep"]
    assert [(c.shape, c.dtype, c.by_choice) for c in calls[:5]] == [
        ((4,), "int64", False),
        ((12, 96), "float64", True),  # at most every own row to each of four ranks
        ((12, 10), "int64", True),
        ((12, 10), "float64", True),
        ((18, 96), "float64", True),  # and back: at most every row of all ranks, 3 + 3 + 6 + 6
    ]
    assert len(calls) == 15


def test_bytes_follow_the_type():
    for numerics, size in (("float64", 8), ("float32", 4), ("bfloat16", 2)):
        plan = plan_of(numerics=numerics)
        assert expected_collectives(plan, SIDES["full-sp"], 0, 0)[0].bytes == 3 * 96 * size
