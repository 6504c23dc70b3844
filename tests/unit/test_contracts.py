"""The tables, against numbers counted by hand for the smallest cases."""

import pytest

from spcheck.case import Case
from spcheck.contracts.collectives import expected_collectives
from spcheck.contracts.rows import expected_rows, phases_of_probe
from spcheck.plan import make_plan


def plan_of(**options):
    return make_plan(Case(**{"requests": ((3,),), "tp": 2, "mtp_steps": 2, **options}))


@pytest.mark.parametrize(
    ("probe", "tp_rows", "sp_rows"),
    [
        ("model.embed_tokens.in", 3, 3),
        ("model.embed_tokens.out", 3, 3),
        ("model.layers.0.input_layernorm.out", 3, 2),
        ("model.layers.0.self_attn.q_a_layernorm.out", 3, 3),
        ("model.layers.0.self_attn.o_proj.in", 3, 3),
        ("model.layers.0.self_attn.indexer.choose.out", 3, 3),
        ("model.layers.0.self_attn.out", 3, 2),
        ("model.layers.0.mlp.out", 3, 2),
        ("model.layers.2.mlp.gate.choose.out", 3, 2),
        ("model.norm.out", 3, 2),
        ("model.out", 3, 3),
        ("model.aux.2", 3, 3),
        ("lm_head.out", 3, 3),
        ("sampler.out", 1, 1),
    ],
)
def test_rows_of_three_tokens_over_two_ranks(probe, tp_rows, sp_rows):
    plan = plan_of()
    target = plan.phases[0]
    assert expected_rows(probe, "reference", target, 2) == [1 if probe == "sampler.out" else 3]
    assert expected_rows(probe, "tp", target, 2) == [tp_rows]
    assert expected_rows(probe, "full-sp", target, 2) == [sp_rows]


def test_rows_of_the_draft():
    plan = plan_of()
    first, second = plan.phases[1:]
    for probe, rows in (("eh_proj.in", 2), ("self_attn.o_proj.in", 3), ("shared_head.norm.out", 2), ("out", 3)):
        assert expected_rows(f"model.layers.5.{probe}", "full-sp", first, 2) == [rows]
    assert expected_rows("model.layers.5.eh_proj.in", "full-sp", second, 2) == [1]
    assert [p.call for p in phases_of_probe("model.layers.5.eh_proj.in", plan)] == [0, 1]
    assert [p.kind for p in phases_of_probe("model.layers.4.mlp.out", plan)] == ["target"]


def shapes(plan, dataflow, phase=0):
    return [(c.kind, c.group, *c.shape) for c in expected_collectives(plan, dataflow, plan.phases[phase])]


def test_full_sp_target_by_hand():
    """17 tokens, tp 2: m = 9. D = 96, K = 4, 2 dense and 3 MoE layers, 2 aux states, V = 250."""
    plan = plan_of(requests=((17,),), aux_layers=(0, 3))
    dense = [("all_gather", "tp", 9, 96), ("reduce_scatter", "tp", 18, 96)]
    moe = [("all_gatherv", "ep", 9, 96), ("all_gatherv", "ep", 9, 4), ("all_gatherv", "ep", 9, 4)]
    moe += [("reduce_scatterv", "ep", 18, 96)]
    wanted = [("all_reduce", "tp", 17, 96), *dense, *dense, *(dense + moe) * 3, ("all_gather", "tp", 9, 288)]
    assert shapes(plan, "full-sp")[:-1] == wanted
    assert shapes(plan, "full-sp")[-1][:2] == ("all_gather", "tp")
    assert len(wanted) == 1 + 10 + 12 + 1


def test_tp_target_by_hand():
    """Two all-reduces per layer and the embedding's; one more for each aux layer behind layer 0."""
    plan = plan_of(requests=((17,),), aux_layers=(0, 3, 5), scheme="tp")
    assert shapes(plan, "tp")[:-1] == [("all_reduce", "tp", 17, 96)] * (1 + 10 + 2)
    assert shapes(plan_of(requests=((17,),)), "reference")[:-1] == [("all_reduce", "tp", 17, 96)] * 11


def test_the_reference_goes_request_by_request():
    plan = plan_of(requests=((5, 1),))
    rows = [c.shape[0] for c in expected_collectives(plan, "reference", plan.phases[0]) if c.kind == "all_reduce"]
    assert rows == [5] * 11 + [1] * 11


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


def test_bytes_follow_the_type():
    for numerics, size in (("float64", 8), ("float32", 4), ("bfloat16", 2)):
        plan = plan_of(numerics=numerics)
        assert expected_collectives(plan, "full-sp", plan.phases[0])[0].bytes == 3 * 96 * size
