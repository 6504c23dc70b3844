"""What wrong rows have in common, on small tensors made for one cause each."""

import math

import pytest
import torch

from spcheck.case import Case
from spcheck.plan.plan import make_plan
from spcheck.worker.clues import Look, find_clues
from spcheck.worker.digests import row_sketches

CONFIG = make_plan(Case(requests=((3,),), tp=2)).config
torch.manual_seed(0)
E, P, Q = (torch.randn(6, 8, dtype=torch.float64) for _ in range(3))


def clues(actual, expected=E, probe="model.layers.2.mlp.out", kind="value", others=None, blocks=1, first=0):
    at = [(0, first + i) for i in range(len(expected))]
    return find_clues(Look(probe, kind, expected, actual, at, others or {}, CONFIG, blocks))


def test_random_values_have_nothing_in_common():
    assert clues(E + torch.randn(6, 8, dtype=torch.float64), others={"p": P, "q": Q}, blocks=2) == {}


def test_not_a_number_and_zero():
    assert clues(torch.where(E > 0, E, math.nan))["nan"]
    assert clues(torch.zeros_like(E))["zero"]
    assert clues(E, torch.zeros_like(E))["from_zero"]


@pytest.mark.parametrize(("coefficient", "told"), [(-1.0, -1.0), (1.0, 1.0), (-0.6, -0.6)])
def test_a_part_that_is_missing_or_too_much(coefficient, told):
    assert clues(E + coefficient * P, others={"q": Q, "p": P})["part"] == ["p", told]


def test_a_part_is_not_the_whole():
    assert "part" not in clues(1.5 * E, others={"p": 3 * E})


def test_the_value_of_another_probe():
    assert clues(P, others={"p": P, "q": Q})["equals"] == "p"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast(kind):
    assert clues(E.to(kind).double())["cast"] == str(kind).removeprefix("torch.")


def test_a_sum_of_bfloat16_and_an_error_of_float32():
    parts = torch.randn(2, 6, 64, dtype=torch.float64) + 2
    expected = parts.sum(0)
    assert clues(parts.bfloat16().double().sum(0), expected)["cast"] == "sums of bfloat16"
    x, w = torch.randn(6, 64, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64)
    assert clues(x.float().double() @ w, x @ w)["cast"] == "float32 rounding"
    assert "cast" not in clues((x + 1e-4 * torch.randn_like(x)) @ w, x @ w)


def test_factors_of_rows_and_of_channels():
    rows, channels = torch.linspace(0.9, 1.1, 6).double(), torch.linspace(0.8, 1.3, 8).double()
    assert clues(rows[:, None] * E)["row_factors"] == pytest.approx([0.9, 1.1])
    assert clues(channels * E)["channel_factors"]
    assert not {"row_factors", "channel_factors"} & clues(1.5 * E).keys()


def test_another_eps():
    x = torch.randn(6, 8, dtype=torch.float64) * torch.linspace(0.2, 2, 6)[:, None]
    weight = torch.rand(8, dtype=torch.float64) + 0.5
    norm = [weight * x / (x.square().mean(1, keepdim=True) + eps).sqrt() for eps in (1e-6, 1e-5)]
    others = {"model.norm.in": x}
    assert clues(norm[1], norm[0], probe="model.norm.out", others=others)["eps"]
    other_rows = torch.linspace(0.9, 1.1, 6).double()[:, None] * norm[0]
    assert "eps" not in clues(other_rows, norm[0], probe="model.norm.out", others=others)


def test_the_order_of_channels():
    assert clues(E.roll(4, dims=1))["order"] == "halves"
    assert clues(E[:, torch.tensor([1, 0, 2, 3, 5, 4, 7, 6])])["order"] == "order"


def test_a_rank_s_part_of_the_channels():
    other = E.clone()
    other[:, 4:] += 1
    assert clues(other, blocks=2)["channels"] == [1, -1]
    other[:, 4:] = E[:, :4]
    assert clues(other, blocks=2)["channels"] == [1, 0]
    assert "channels" not in clues(other, blocks=1)
    assert "channels" not in clues(E + 1, blocks=2)


def rotary(positions, pairs):
    """[rows, 2 heads * rope] of random values turned by one radian a position in the first pair."""
    size = CONFIG.qk_rope_head_dim
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(6, 2, size // 2, 2, dtype=torch.float64, generator=generator)
    angles = positions[:, None].double() * 10000 ** (-torch.arange(0, size, 2) / size)
    turned = torch.view_as_complex(z) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    out = torch.view_as_real(turned)
    return (out.flatten(-2) if pairs == "neighbours" else out.transpose(-1, -2).flatten(-2)).flatten(1)


def test_rows_that_are_turned_otherwise():
    here = torch.arange(5, 11)
    probe = "model.layers.0.self_attn.q_rope.out"
    expected = rotary(here, "neighbours")
    assert clues(rotary(here - 2, "neighbours"), expected, probe, first=5)["turned"] == ["by", -2]
    assert clues(rotary(here.flip(0), "neighbours"), expected, probe, first=5)["turned"] == ["at"]
    assert clues(rotary(here + 3, "neighbours").float(), expected.float(), probe, first=5)["turned"] == ["by", 3]
    assert "turned" not in clues(1.5 * expected, expected, probe, first=5)
    slow = expected.clone()
    slow[:, 2:4] = slow[:, 2:4].flip(1) * torch.tensor([-1.0, 1.0])  # the second pair alone, a quarter turn further
    assert "turned" not in clues(slow, expected, probe, first=5), "no other position turns that pair alone"
    swapped = expected.view(6, -1, CONFIG.qk_rope_head_dim).roll(1, -1).flatten(1)
    assert clues(swapped, expected, probe, first=5)["turned"] == ["pairs"]


def test_masks_and_ids():
    scores = E.masked_fill(E < 0, -math.inf)
    choose = "model.layers.0.self_attn.indexer.choose"
    lost = scores.clone()
    lost[0, scores[0].argmax()] = -math.inf
    assert clues(lost, scores, f"{choose}.in", "scores")["mask"] == [1, 0]
    assert clues(E, scores, f"{choose}.in", "scores")["mask"] == [0, int((E < 0).sum())]
    ids = torch.arange(6)[:, None]
    assert clues(ids - 1, ids, "model.embed_tokens.in", "set")["ids"] == ["none", -1]
    assert clues(ids + 2, ids, f"{choose}.out", "set")["ids"] == ["later", 2, 0]
    assert clues(ids.clamp(max=2), ids, f"{choose}.out", "set") == {}
    assert clues(ids * 0, ids, "rejection_sampler.out", "accepted") == {}


def test_a_key_that_stands_at_another_slot():
    choose = "model.layers.0.self_attn.indexer.choose.in"
    other = E.clone()
    other[:, 3] += 1
    assert clues(other, E, choose, "scores")["keys"] == ["from", 3, 3]
    newest = E.clone()
    newest[torch.arange(6), torch.arange(2, 8)] += 1
    assert clues(newest, E, choose, "scores", first=2)["keys"] == ["newest", 1]
    newest[torch.arange(6), torch.arange(1, 7)] += 1
    assert clues(newest, E, choose, "scores", first=2)["keys"] == ["newest", 2]


def test_scores_of_a_router_without_a_part():
    experts, groups = CONFIG.n_routed_experts, CONFIG.n_group
    scores, bias = torch.rand(6, experts, dtype=torch.float64), torch.rand(experts, dtype=torch.float64)
    gate = "model.layers.2.mlp.gate"
    others = {f"{gate}.score.out": scores, f"{gate}.choose.in": scores + bias}

    def of_groups(x, best):
        return x.view(6, groups, -1).topk(best, dim=-1).values.sum(-1)

    probe, right = f"{gate}.choose_groups.in", of_groups(scores + bias, 2)
    assert clues(of_groups(scores, 2), right, probe, "scores", others)["scores_without"] == "the correction bias"
    told = clues(of_groups(scores + bias, 1), right, probe, "scores", others)["scores_without"]
    assert told == "the second best expert of each group"
    assert "scores_without" not in clues(right + scores[:, :groups], right, probe, "scores", others)


def test_sketches_are_linear_and_tell_rows_apart():
    s = row_sketches(torch.cat([E, P, E - P]))
    assert torch.allclose(s[:6, 1:] - s[6:12, 1:], s[12:, 1:])
    assert row_sketches(E[:0]).shape == (0, 3)
    assert len({tuple(row) for row in s.tolist()}) == 18
