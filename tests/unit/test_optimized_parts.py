"""Single modules against hand-counted values."""

import math

import pytest
import torch
from test_optimized_agreement import baseline, check, values
from test_optimized_agreement import run as run_case
from test_optimized_helpers import F64, build, close, on_ranks, tiny, token_ids, weights

import optimized.chunks
from optimized.batch import NewRows, SlotTable
from optimized.buffers import InputBuffers
from optimized.experts import Permute
from optimized.indexer import ChooseKeys
from optimized.linear import GreedySampler
from optimized.norms import ResidualRMSNorm, RMSNorm
from optimized.rotary import HalfSplitRotary, InterleavedRotary, RotaryTable, attention_scale, frequencies
from optimized.router import Best, Weigh, within_best_groups

CPU = torch.device("cpu")
INF = float("inf")
NAN = float("nan")


def test_rms_norm():
    x, weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=F64), torch.tensor([2.0, 10.0], dtype=F64)
    root = math.sqrt(12.5 + 0.5)
    close(RMSNorm(weight, 0.5)(x), torch.tensor([[6 / root, 40 / root], [0, 0]], dtype=F64), 1e-15)


def test_the_residual_norm_leaves_its_arguments_alone():
    x, residual = torch.ones(2, 2, dtype=F64), torch.full((2, 2), 3.0, dtype=F64)
    normed, total = ResidualRMSNorm(torch.ones(2, dtype=F64), 0.0)(x, residual)
    assert total.unique().tolist() == [4.0]
    close(normed, torch.ones(2, 2, dtype=F64), 1e-15)
    assert x.unique().tolist() == [1.0]
    assert residual.unique().tolist() == [3.0]


def test_published_frequencies():
    """The figures of the specification for V3.2: dr 64, YaRN 40 over 4096."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    f = frequencies(_with_rope(yarn, qk_rope_head_dim=64, qk_nope_head_dim=128, index_head_dim=128))
    expected = {
        0: 1.0,
        10: 0.05623413252,
        11: 0.03900692657,
        15: 0.008334508951,
        22: 0.000177827941,
        31: 3.33380358e-06,
    }
    for j, value in expected.items():
        assert f[j] == pytest.approx(value, rel=1e-8)
    scale = attention_scale(_with_rope(yarn, qk_rope_head_dim=64, qk_nope_head_dim=128, index_head_dim=128))
    assert scale == pytest.approx(0.13523377886, rel=1e-9)


def _with_rope(block, **overrides):
    import json

    from test_optimized_helpers import PRESET

    from reference.config import parse_config

    return parse_config(json.loads(PRESET.read_text()) | {"rope_scaling": block}, overrides)


def test_both_rotations_turn_their_pairs():
    table = RotaryTable(tiny(), F64, CPU)
    table.reserve(6)
    x = torch.randn(2, 8, dtype=F64)
    angle = torch.tensor([[p * f for f in frequencies(tiny())] for p in (5, 0)], dtype=F64)
    longer = (0.1 * 0.9 * math.log(6) + 1) / (0.1 * 1.2 * math.log(6) + 1)  # the preset's two mscales
    cos, sin = longer * angle.cos(), longer * angle.sin()
    positions = torch.tensor([5, 0])
    a, b = x[:, ::2], x[:, 1::2]
    expected = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(1)
    close(InterleavedRotary(table)(x, positions), expected, 1e-15)
    a, b, rest = x[:, :4], x[:, 4:], torch.randn(2, 3, dtype=F64)
    expected = torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)
    got = HalfSplitRotary(table)(torch.cat([x, rest], dim=-1), positions)
    close(got, expected, 1e-15)
    heads = torch.stack([torch.cat([x, rest], dim=-1)] * 3, dim=1)
    assert torch.equal(HalfSplitRotary(table)(heads, positions)[:, 1], got)


def test_the_lowest_key_wins_a_tie_and_masked_keys_are_never_chosen():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, -INF, -INF, -INF], [-INF] * 4])
    visible = torch.tensor([[0, 1, 2, 3], [0, -1, -1, -1], [-1] * 4])
    assert ChooseKeys(3)(visible, scores).tolist() == [[1, 2, 0], [0, -1, -1], [-1, -1, -1]]
    assert ChooseKeys(9)(visible, scores).shape == (3, 4)
    assert torch.equal(ChooseKeys(9)(visible, None), visible)


def test_groups_are_ranked_by_their_two_best_and_dropped_ones_cannot_return():
    biased = torch.tensor([[-1.0, -9.0, -2.0, -3.0, -5.0, -0.5], [0.0] * 6])
    assert Best(2)(within_best_groups(biased, 3, Best(1))).tolist() == [[2, 3], [0, 1]]
    assert Best(3)(biased).tolist() == [[5, 0, 2], [0, 1, 2]]


def test_a_nan_row_still_chooses_experts():
    ids = Best(2)(within_best_groups(torch.full((1, 6), NAN), 3, Best(1)))
    assert 0 <= int(ids.min()) <= int(ids.max()) < 6


def test_weights_are_normalised_then_scaled():
    scores, ids = torch.tensor([[0.5, 0.25, 0.25]], dtype=F64), torch.tensor([[2, 0]])
    assert Weigh(3.0, normalise=True)(scores, ids).tolist() == [[1.0, 2.0]]
    assert Weigh(2.0, normalise=False)(scores, ids).tolist() == [[0.5, 1.0]]


def test_permute_sorts_local_pairs_and_counts_them():
    pairs, counts = Permute(range(4, 7))(torch.tensor([[6, 4], [3, 6], [-1, -1], [7, 4]]))
    assert counts.tolist() == [2, 0, 2]
    assert pairs[:4].tolist() == [1, 7, 0, 3]


def test_the_lowest_token_wins_a_tie():
    assert GreedySampler()(torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


def test_packed_rows():
    slots = SlotTable([4, 3], CPU)
    held = slots.held[0]
    held[:2] = True  # request 0 has positions 0 and 1
    inputs = InputBuffers(1, F64, CPU)
    inputs.place(torch.arange(10, 15), 5)
    batch = slots.batch([NewRows(1, 0, 2, sampled=2), NewRows(0, 2, 1)], held, 5, inputs)
    assert batch.positions.tolist() == [0, 1, 2, 13, 14]
    assert batch.logits_indices.tolist() == [0, 1, 2]
    assert batch.is_padding.tolist() == [False] * 3 + [True] * 2
    attention = batch.attention
    assert attention.slot_mapping.tolist() == [4, 5, 2]
    assert attention.visible.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert attention.causal_choice.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [-1] * 3, [-1] * 3]
    assert held.tolist() == [True, True, True, False, True, True, False]
    slots.forget(0, 1)
    assert slots.held.tolist() == [[True, False, False, False, True, True, False], [False] * 7]


def test_rows_that_do_not_fit_are_refused():
    slots = SlotTable([4, 3], CPU)
    with pytest.raises(ValueError, match="request 1 needs 4 positions"):
        slots.batch([NewRows(1, 2, 2)], slots.held[0], 2, InputBuffers(1, F64, CPU))


def test_row_chunks_bound_memory_and_change_nothing(monkeypatch):
    config = tiny()
    expected, _ = baseline(config, (7, 2), 1, ())
    monkeypatch.setattr(optimized.chunks, "MAX_ELEMENTS", 300)
    ((seen, _),) = on_ranks(1, lambda world: run_case(world, config, (7, 2), 1, scheme="tp"))
    for a, b in zip(values(seen, config, (7, 2), 1), expected, strict=True):
        close(a, b)


class WithoutCopies:
    """A checkpoint that leaves out the MTP layer's copies of the main tables."""

    def __init__(self, inner):
        self.inner = inner

    def names(self):
        copies = (".shared_head.head.weight", "layers.5.embed_tokens.weight")
        return [name for name in self.inner.names() if not name.endswith(copies)]

    def shape(self, name):
        return self.tensor(name).shape

    def tensor(self, name):
        assert name in self.names()
        return self.inner.tensor(name)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_mtp_falls_back_to_the_main_tables(scheme):
    check(tiny(), (3,), 2, 2, scheme=scheme, reader=WithoutCopies(weights(tiny())))


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (8, {}, "num_attention_heads 12 cannot be divided over 8 ranks"),
        (2, {"lora_adapters": 1}, "LoRA adapters present"),
        (2, {"scheme": "moe-sp", "expert_parallel": False}, "expert parallel off"),
        (2, {"all2all_backend": "pplx"}, "backend pplx is not one of"),
        (2, {"scheme": "tp", "all2all_backend": "pplx"}, "unknown all2all backend 'pplx'"),
        (2, {"pad_to": 8, "graph_sizes": (1, 2)}, "not both"),
        (9, {"scheme": "tp", "dp": 9}, "n_routed_experts 24 cannot be divided over 9 ranks"),
        (9, {"scheme": "tp", "dp": 9, "expert_parallel": False}, "gate_proj.weight 48 cannot be divided over 9 ranks"),
    ],
)
def test_what_cannot_be_built_is_refused(size, options, message):
    config = tiny()

    def main(world):
        with pytest.raises(ValueError, match=message):
            build(world, config, **({"scheme": "full-sp"} | options))

    on_ranks(size, main)


def test_start_forgets_everything():
    config = tiny()

    def main(world):
        engine = build(world, config, scheme="tp")
        for _ in range(2):
            engine.start([3, 2])
            assert {len(rows) for by in engine.state().values() for rows in by.values()} == {0}
            engine.step([(0, 0, token_ids(config, 3))])
            held = engine.state()["model.layers.0.self_attn.cache.latent"]
            assert [len(held[0]), len(held[1])] == [3, 0]

    on_ranks(1, main)
