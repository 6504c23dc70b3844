"""The smallest contract example: 3 tokens, tp 2, with and without a forward context."""

import contextlib
import math

import pytest
import torch
from test_optimized_helpers import F64, Seen, build, close, groups, on_ranks, tiny, token_ids, weights

from optimized.batch import NewRows
from optimized.dataflows import DATAFLOWS
from optimized.dataflows.full_sp import sp_region
from optimized.forward_context import DPMetadata, set_forward_context
from optimized.loader import Loader
from optimized.parallel_config import ParallelConfig
from optimized.rotary import RotaryTable
from optimized.setup import Setup
from optimized.sp import SequenceParallel

N, TP = 3, 2
CPU = torch.device("cpu")


def setup_of(world, config, **options):
    group = groups(world)
    rotary = RotaryTable(config, F64, CPU)
    loader = Loader(weights(config), F64, CPU)
    return Setup(config, ParallelConfig(world.size), loader, group["tp"], group["ep"], rotary, **options)


def one_request(engine, n=N):
    engine.start([n])
    return engine.slots.batch([NewRows(0, 0, n)], engine.slots.held[0], n, engine.inputs)


def hidden_rows(config, n=N, seed=1):
    return torch.randn(n, config.hidden_size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def contexts():
    metadata = DPMetadata(torch.tensor([N]))
    return [contextlib.nullcontext, lambda: set_forward_context(N, None, metadata)]


@pytest.mark.parametrize("context", contexts(), ids=["no-context", "context"])
@pytest.mark.parametrize("layer", [0, 2], ids=["dense", "moe"])
def test_attention_sees_all_rows_and_the_rest_a_shard(layer, context):
    config = tiny()

    def main(world):
        engine = build(world, config, scheme="full-sp")
        batch, seen = one_request(engine), Seen()
        name = f"model.layers.{layer}"
        seen.watch(engine, [f"{name}.self_attn", f"{name}.mlp", name])
        with context():
            for _ in range(2):
                with sp_region(SequenceParallel(groups(world)["tp"]), hidden_rows(config)) as shard:
                    engine.model.layers[layer](shard, None, batch.positions, batch.attention)
        return [
            [args[0].shape[0] for args in seen.inputs(f"{name}.self_attn")],
            [args[0].shape[0] for args in seen.inputs(f"{name}.mlp")],
            [(h.shape[0], r.shape[0]) for h, r in seen.outputs(name)],
            [h for h, _ in seen.outputs(name)],
        ]

    for attention, mlp, returned, hidden in on_ranks(TP, main):
        assert attention == [3, 3]
        assert mlp == [2, 2]
        assert returned == [(2, 2), (2, 2)]
        assert torch.equal(*hidden)


@pytest.mark.parametrize("context", contexts(), ids=["no-context", "context"])
def test_mtp_projects_a_shard_and_gives_all_rows(context):
    config = tiny()

    def main(world):
        engine = build(world, config, scheme="full-sp")
        batch, seen = one_request(engine), Seen()
        layer = engine.model.layers[config.num_hidden_layers]
        seen.watch(engine, ["model.layers.5.eh_proj"])
        with context():
            out = layer(token_ids(config, N), hidden_rows(config), batch.positions, batch.attention)
        return [args[0].shape for args in seen.inputs("model.layers.5.eh_proj")], out

    results = on_ranks(TP, main)
    for projected, out in results:
        assert projected == [(2, 2 * config.hidden_size)]
        assert out.shape == (3, config.hidden_size)
        assert torch.equal(out, results[0][1])


def test_a_residual_at_the_entry_is_refused():
    def main(world):
        x = torch.zeros(3, 4)
        with (
            pytest.raises(ValueError, match="without a residual"),
            sp_region(SequenceParallel(groups(world)["tp"]), x, x),
        ):
            pass

    on_ranks(TP, main)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("zero_first", [False, True])
def test_fused_and_plain_eh_norm_agree(scheme, zero_first):
    config = tiny(mtp_zero_first_embedding=zero_first)

    def main(world):
        projected = []
        for fused in (True, False):
            setup = setup_of(world, tiny(mtp_zero_first_embedding=zero_first, fused_eh_norm=fused))
            layer = DATAFLOWS[scheme].build(setup).layers[config.num_hidden_layers]
            assert (layer.fused_eh_norm is not None) == fused
            projected.append(layer.embedded(token_ids(config, N), hidden_rows(config), torch.arange(N)))
        return projected

    for fused, plain in on_ranks(TP, main):
        close(fused, plain, 4e-16 * math.sqrt(config.hidden_size))
        assert bool(fused[0, : config.hidden_size].any()) != zero_first
        assert fused[1, : config.hidden_size].any()


def test_announced_rows_must_be_the_rows():
    config = tiny()

    def main(world):
        engine = build(world, config, scheme="full-sp")
        moe, x = engine.model.layers[2].mlp, hidden_rows(config)
        with (
            set_forward_context(3, None, DPMetadata(torch.tensor([3]))),
            pytest.raises(ValueError, match="announced 2"),
        ):
            moe(x)

    on_ranks(TP, main)
