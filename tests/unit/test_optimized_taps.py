"""A tap's placement says how the ranks' pieces make up the value that one rank alone computes."""

import functools

import pytest
import torch
from test_optimized_helpers import ALTERNATING, PRESET, Seen, build, close, on_ranks, tiny
from test_optimized_sessions import continued

from optimized import subject

N, TP = 9, 2  # more keys than are chosen, so that they are scored


def pieces(world, config, scheme, *, expert_parallel=True):
    """Probe -> (placement, kind, value) on one rank, of a target step and draft step 0."""
    options = {"scheme": scheme, "aux_layers": (0, 1, 3), "expert_parallel": expert_parallel}
    engine, seen = build(world, config, **options), Seen()
    places = subject.taps(config, **options)
    seen.watch(engine, {module for module, *_ in places.values()})
    engine.start([N])
    # A draft that holds, so that the draft step has all rows.
    engine.step([(0, 0, continued(config, N - 1, 1), 1)])
    engine.draft([0], 0)
    out = {}
    for probe, (module, side, index, placement, kind) in places.items():
        (value,) = seen.inputs(module) if side == "in" else seen.outputs(module)
        value = value[index] if isinstance(value, tuple) else value
        out[probe] = placement, kind, value.flatten(1) if kind == "value" else value
    return out


@functools.cache
def alone(config):
    return on_ranks(1, lambda world: pieces(world, config, "tp"))[0]


def whole(placement, parts):
    """The value that the ranks' pieces make up."""
    if placement == "Replicate":
        assert all(part.shape == parts[0].shape for part in parts)
        for part in parts:
            close(part, parts[0])
        return parts[0]
    if placement == "Partial":
        return sum(parts)
    if placement == "Shard(0)":
        assert all(part.shape[0] == -(-N // TP) for part in parts)
    return torch.cat(parts, dim=int(placement == "Shard(1)"))[:N]


@pytest.mark.parametrize("preset", [PRESET, ALTERNATING], ids=["tiny", "alternating"])
@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_placements(scheme, preset):
    config = tiny(preset)
    compare(config, on_ranks(TP, lambda world: pieces(world, config, scheme)))


def test_placements_without_expert_parallelism():
    config = tiny()
    results = on_ranks(TP, lambda world: pieces(world, config, "tp", expert_parallel=False))
    compare(config, results)
    probe = "model.layers.2.mlp.experts.act_fn.out"
    assert results[0][probe][0] == "Shard(1)"
    close(torch.cat([result[probe][2] for result in results], dim=1), alone(config)[probe][2])


def compare(config, results):
    expected = alone(config)
    assert results[0].keys() == expected.keys()
    for probe, (_, kind, value) in expected.items():
        if kind in ("value", "set", "token", "accepted"):
            close(whole(results[0][probe][0], [result[probe][2] for result in results]), value)


def test_rows_of_moe_sp_change_at_the_borders():
    config = tiny(ALTERNATING)
    places = subject.taps(config, scheme="moe-sp", aux_layers=(), expert_parallel=True)
    at = {probe.removeprefix("model."): placement for probe, (_, _, _, placement, _) in places.items()}
    for i in (1, 2, 3):
        moe = i == 2
        assert at[f"layers.{i}.input_layernorm.out"] == "Replicate"
        assert at[f"layers.{i}.self_attn.out"] == ("Shard(0)" if moe else "Partial")
        assert at[f"layers.{i}.post_attention_layernorm.in"] == ("Shard(0)" if moe else "Replicate")
        assert at[f"layers.{i}.mlp.out"] == ("Shard(0)" if moe else "Partial")
    assert at["norm.out"] == at["layers.6.shared_head.norm.in"] == at["layers.6.eh_proj.in"] == "Replicate"
    places = subject.taps(tiny(), scheme="moe-sp", aux_layers=(), expert_parallel=True)
    assert [places[f"model.layers.{i}.input_layernorm.in"][3] for i in (1, 2, 3, 5)] == [
        "Replicate",
        "Replicate",
        "Shard(0)",
        "Replicate",
    ]
