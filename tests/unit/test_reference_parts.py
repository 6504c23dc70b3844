"""The parts of the reference by themselves: rotations, norms, choices, and their ties."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reference.attention import ChooseKeys, HeadWeights, chosen_mask
from reference.cache import LayerCache
from reference.config import parse_config
from reference.layers import GreedySampler, LayerNorm, RejectionSampler, RMSNorm
from reference.moe import Gate, Weigh
from reference.rope import Rotary, attention_scale, frequencies, table_scale

PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
RAW = json.loads(PRESET.read_text())
V32_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}


def config_of(**changes):
    return parse_config(RAW | changes)


def with_weights(module: nn.Module) -> nn.Module:
    for name, parameter in list(module.named_parameters()):
        value = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return module


class TestRotary:
    def test_the_published_frequencies(self):
        """V3.2: lo = 10 and hi = 23 of 32 pairs."""
        f = frequencies(config_of(qk_rope_head_dim=64, index_head_dim=128, rope_scaling=V32_YARN))
        expected = {
            0: 1.0,
            10: 0.05623413252,
            11: 0.03900692657,
            15: 0.008334508951,
            22: 0.000177827941,
            23: 3.33380358e-05,
            31: 3.33380358e-06,
        }
        assert {j: f[j] for j in expected} == pytest.approx(expected, rel=1e-8)

    @pytest.mark.parametrize(
        ("nope", "factor", "sigma"), [(128, 40, 0.13523377886), (128, 32, 0.13086079995), (192, None, 0.0625)]
    )
    def test_the_published_attention_scales(self, nope, factor, sigma):
        scaling = None if factor is None else V32_YARN | {"factor": factor}
        config = config_of(qk_nope_head_dim=nope, qk_rope_head_dim=64, index_head_dim=128, rope_scaling=scaling)
        assert attention_scale(config) == pytest.approx(sigma, rel=1e-9)
        assert table_scale(config) == 1.0

    @pytest.mark.parametrize("interleaved", [True, False])
    def test_pairs_turn_and_the_rest_stays(self, interleaved):
        config = config_of()
        f = frequencies(config)
        x = torch.randn(3, 2, 13, dtype=torch.float64)
        positions = torch.tensor([0, 5, 1000])
        y = Rotary(config, interleaved=interleaved)(x, positions)
        longer = (0.1 * 0.9 * math.log(6) + 1) / (0.1 * 1.2 * math.log(6) + 1)  # the preset's two mscales
        assert torch.allclose(y[0, :, :8], longer * x[0, :, :8], rtol=1e-14)
        assert torch.equal(y[..., 8:], x[..., 8:])
        for j in range(4):
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + 4)
            turn = torch.polar(torch.full((3, 1), longer), positions[:, None] * f[j])
            turned = torch.complex(x[..., a], x[..., b]) * turn
            assert torch.allclose(y[..., a], turned.real, atol=1e-4)
            assert torch.allclose(y[..., b], turned.imag, atol=1e-4)

    def test_float64_tables_are_float64(self):
        config = config_of()
        x = torch.zeros(1, 8, dtype=torch.float64)
        x[0, 2] = 1
        y = Rotary(config, interleaved=True)(x, torch.tensor([100_000]))
        assert y[0, 3].item() == pytest.approx(
            table_scale(config) * math.sin(100_000 * frequencies(config)[1]), rel=1e-10
        )


class TestNorms:
    def test_rms(self):
        norm = with_weights(RMSNorm(9, 1e-3))
        x = torch.randn(4, 9, dtype=torch.float64)
        assert torch.allclose(norm(x), F.rms_norm(x, (9,), norm.weight, 1e-3), rtol=1e-12, atol=1e-14)

    def test_layer(self):
        norm = with_weights(LayerNorm(9, 1e-3))
        x = torch.randn(4, 9, dtype=torch.float64)
        assert torch.allclose(norm(x), F.layer_norm(x, (9,), norm.weight, norm.bias, 1e-3), rtol=1e-12, atol=1e-14)

    def test_statistics_are_float32_in_bfloat16(self):
        norm = RMSNorm(512, 1e-6)
        norm.register_parameter("weight", nn.Parameter(torch.ones(512, dtype=torch.bfloat16), requires_grad=False))
        x = torch.randn(4, 512).bfloat16()
        exact = F.rms_norm(x.double(), (512,), eps=1e-6)
        half_an_ulp = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 9)
        # float32 sums in any order, and the root, err by a thousandth of that.
        assert ((norm(x).double() - exact).abs() <= half_an_ulp * (1 + 2.0**-10)).all()


class TestChoices:
    def test_the_lowest_position_wins_a_tie(self):
        scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0]])
        assert ChooseKeys(4)(scores).tolist() == [[1, 2, 0, 3]]

    def test_fewer_keys_than_k(self):
        scores = torch.tensor([[0.0, -math.inf, -math.inf], [-5.0, 3.0, -math.inf]])
        assert ChooseKeys(8)(scores).tolist() == [[0, -1, -1], [1, 0, -1]]
        assert ChooseKeys(2)(scores).tolist() == [[0, -1], [1, 0]]

    def test_the_mask_of_a_choice(self):
        assert chosen_mask(torch.tensor([[0, -1], [2, 1]]), 3).tolist() == [[True, False, False], [False, True, True]]

    def test_index_head_weights_of_the_published_size(self):
        assert HeadWeights(64, 128)(torch.ones(1)).item() == pytest.approx(0.011048543, rel=1e-7)

    def test_the_lowest_token_wins_a_tie(self):
        assert GreedySampler()(torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 0.0]])).tolist() == [1, 0]

    @pytest.mark.parametrize(
        ("drafted", "sampled", "accepted"),
        [([], [5], 0), ([5], [5, 1], 1), ([4], [5, 4], 0), ([5, 1, 2], [5, 9, 2, 3], 1), ([5, 1, 2], [5, 1, 2, 2], 3)],
    )
    def test_drafts_are_accepted_up_to_the_first_wrong_one(self, drafted, sampled, accepted):
        count = RejectionSampler()(torch.tensor(drafted, dtype=torch.int64), torch.tensor(sampled))
        assert (count.tolist(), count.dtype) == ([accepted], torch.int64)


class TestRouter:
    def choose(self, scores, **changes):
        sizes = {"n_routed_experts": 6, "n_group": 3, "topk_group": 1, "num_experts_per_tok": 2}
        gate = Gate(config_of(**sizes | changes))
        return gate.choose(gate.in_kept_groups(torch.tensor([scores]))).tolist()[0]

    def test_a_group_scores_the_sum_of_its_two_best(self):
        assert self.choose([0.9, 0.0, 0.5, 0.6, 0.7, 0.1]) == [3, 2]

    def test_dropped_groups_are_out_even_if_the_kept_scores_are_negative(self):
        assert self.choose([-0.3, -0.2, -0.9, -0.9, -0.9, -0.9]) == [1, 0]

    def test_ties_go_to_the_lowest(self):
        assert self.choose([0.5] * 6) == [0, 1]
        assert self.choose([0.5] * 6, topk_group=3, num_experts_per_tok=5) == [0, 1, 2, 3, 4]

    def test_one_group_is_no_group(self):
        assert self.choose([0.1, 0.9, 0.3, 0.8, 0.7, 0.2], n_group=1, num_experts_per_tok=4) == [1, 3, 4, 2]

    def test_weights_are_normalised_then_scaled(self):
        scores, ids = torch.tensor([[0.1, 0.3, 0.6]]), torch.tensor([[2, 0]])
        weights = Weigh(config_of(routed_scaling_factor=2.5))(scores, ids)
        assert weights.tolist()[0] == pytest.approx([2.5 * 6 / 7, 2.5 / 7])
        plain = Weigh(config_of(routed_scaling_factor=2.0, norm_topk_prob=False))(scores, ids)
        assert plain.tolist()[0] == pytest.approx([1.2, 0.2])


class TestCache:
    def test_rows_are_kept_overwritten_and_forgotten(self):
        cache = LayerCache()
        cache.begin(torch.arange(3))
        cache.write("a", torch.tensor([[1.0], [2.0], [3.0]]))
        assert cache.begin(torch.tensor([1])).tolist() == [True, True]
        assert cache.write("a", torch.tensor([[9.0]])).tolist() == [[1.0], [9.0]]
        assert cache.tables["a"].tolist() == [[1.0], [9.0]]

    def test_positions_that_were_never_seen_hold_nothing(self):
        cache = LayerCache()
        assert cache.begin(torch.tensor([2])).tolist() == [False, False, True]
        assert cache.write("a", torch.tensor([[5.0]])).tolist() == [[0.0], [0.0], [5.0]]
        assert cache.held()["a"].tolist() == [[5.0]]

    def test_nothing_is_left_behind_a_forgotten_position(self):
        cache = LayerCache()
        assert cache.held() == {}
        cache.begin(torch.arange(1, 4))
        cache.write("a", torch.tensor([[1.0], [2.0], [3.0]]))
        cache.forget(9)
        assert cache.held()["a"].tolist() == [[1.0], [2.0], [3.0]]
        cache.forget(2)
        assert cache.held()["a"].tolist() == [[1.0]]
        assert cache.begin(torch.tensor([4])).tolist() == [False, True, False, False, True]
        cache.write("a", torch.tensor([[7.0]]))
        assert cache.held()["a"].tolist() == [[1.0], [7.0]]
        cache.forget(1)
        assert cache.held() == {}
