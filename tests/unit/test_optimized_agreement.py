"""tp and full-sp are one model: whatever the ranks, padding, skipping and chunking."""

import functools

import pytest
import torch
from test_optimized_helpers import F64, Seen, build, close, fill_padding, on_ranks, tiny, token_ids

from optimized import subject

NAN = float("nan")


def run(world, config, requests, steps=2, content=None, split=None, **options):
    """Model outputs [real rows], drafted hidden and logits [real rows], sampled ids, caches of one rank."""
    engine = build(world, config, **options)
    seen, real = Seen(), [sum(requests)]
    last = [f"model.layers.{i}" for i in config.mtp_layers]
    heads = [f"{name}.shared_head.head" for name in last]
    seen.watch(engine, ["model", "lm_head", "sampler", *last, *heads, *[f"{n}.shared_head.sampler" for n in last]])
    if content is not None:
        fill_padding(engine, config, real, content)
    engine.start([n + max(0, steps - 1) for n in requests])
    ids = [token_ids(config, n, 100 * sum(requests) + seed) for seed, n in enumerate(requests)]
    for chunks in split(ids) if split else [[(r, 0, x) for r, x in enumerate(ids)]]:
        engine.step(chunks)
    for step in range(steps):
        real[0] = sum(requests) if step == 0 else len(requests)
        engine.draft(list(range(len(requests))), step)
    return seen, engine.state()


def values(seen, config, requests, steps):
    """What must not depend on the dataflow."""
    n = sum(requests)
    out = [state[:n] for state in seen.outputs("model")[-1]]
    out += [seen.outputs("lm_head")[-1][:n], seen.outputs("sampler")[-1]]
    for step in range(steps):
        name = f"model.layers.{config.num_hidden_layers + step % len(config.mtp_layers)}"
        call, rows = step // len(config.mtp_layers), n if step == 0 else len(requests)
        out += [seen.outputs(name)[call][:rows], seen.outputs(f"{name}.shared_head.head")[call][:rows]]
        out.append(seen.outputs(f"{name}.shared_head.sampler")[call])
    return out


@functools.cache
def baseline(config, requests, steps, aux_layers):
    seen, state = on_ranks(1, lambda world: run(world, config, requests, steps, scheme="tp", aux_layers=aux_layers))[0]
    return values(seen, config, requests, steps), state


def check(config, requests, steps, tp, aux_layers=(), **options):
    results = on_ranks(tp, lambda world: run(world, config, requests, steps, aux_layers=aux_layers, **options))
    for result in results:
        check_rank(result, config, requests, steps, aux_layers)


def check_rank(result, config, requests, steps, aux_layers=()):
    """One rank's outputs and caches are those of the model on one rank."""
    (seen, state), (expected, caches) = result, baseline(config, requests, steps, aux_layers)
    for a, b in zip(values(seen, config, requests, steps), expected, strict=True):
        close(a, b)
    assert state.keys() == caches.keys()
    for name, by_request in state.items():
        assert by_request.keys() == caches[name].keys()
        for request, rows in by_request.items():
            close(rows, caches[name][request])


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("requests", [(1,), (2,), (3,), (17,), (1, 5, 2)])
def test_schemes_and_sizes(scheme, tp, requests):
    check(tiny(), requests, 2, tp, scheme=scheme)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("content", [0.0, 3.0, NAN])
@pytest.mark.parametrize("pad_to", [5, 8])
def test_padding_never_reaches_a_real_row(scheme, skip, content, pad_to):
    check(tiny(), (3, 2), 2, 2, scheme=scheme, pad_to=pad_to, skip_padding=skip, content=content)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("aux_layers", [(0,), (2, 5), (5, 0, 3)])
def test_auxiliary_states(scheme, aux_layers):
    check(tiny(), (5,), 1, 2, aux_layers=aux_layers, scheme=scheme)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("overrides", [{"num_nextn_predict_layers": 2}, {"mtp_zero_first_embedding": True}])
def test_four_draft_steps(scheme, overrides):
    check(tiny(**overrides), (4, 1), 4, 2, scheme=scheme)


@pytest.mark.parametrize(
    "overrides", [{"n_shared_experts": 2}, {"n_group": 1, "topk_group": 1}, {"norm_topk_prob": False}]
)
def test_other_routers(overrides):
    check(tiny(**overrides), (6,), 1, 2, scheme="full-sp")


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_a_model_without_indexer(scheme):
    config = tiny(model_type="deepseek_v3", index_topk=None, index_n_heads=None, index_head_dim=None)
    assert not config.has_indexer
    check(config, (9, 2), 2, 2, scheme=scheme)


def one_by_one(ids):
    """Token by token, requests side by side as long as they last."""
    longest = max(len(x) for x in ids)
    return [[(r, p, x[p : p + 1]) for r, x in enumerate(ids) if p < len(x)] for p in range(longest)]


def two_chunks(ids):
    return [
        [(r, 0, x[: len(x) // 2]) for r, x in enumerate(ids)],
        [(r, len(x) // 2, x[len(x) // 2 :]) for r, x in enumerate(ids)],
    ]


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("split", [one_by_one, two_chunks])
def test_chunked_prefill_is_prefill(scheme, split):
    config, requests = tiny(), (13, 13)
    expected, caches = baseline(config, requests, 0, ())
    rows = [12, 25]
    for seen, state in on_ranks(2, lambda world: run(world, config, requests, 0, split=split, scheme=scheme)):
        last = seen.outputs("model")[-1][0]
        close(last[[last.shape[0] // 2 - 1, -1]], expected[0][rows])
        assert torch.equal(seen.outputs("sampler")[-1], expected[2])
        for name, by_request in state.items():
            for request, held in by_request.items():
                close(held, caches[name][request])


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_one_row_per_request_after_draft_step_0(scheme):
    config = tiny()

    def main(world):
        seen, state = run(world, config, (3, 4), 3, scheme=scheme, pad_to=8)
        held = state["model.layers.5.self_attn.cache.latent"]
        return [out.shape[0] for out in seen.outputs("model.layers.5")], [len(held[r]) for r in (0, 1)]

    assert on_ranks(2, main) == [([8, 2, 2], [5, 6])] * 2


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("skip", [True, False])
def test_expert_work(scheme, skip):
    """3 real rows, padded to 5, and to 6 where shards need it: 4 experts a row."""
    config = tiny()

    def main(world):
        engine, seen = build(world, config, scheme=scheme, pad_to=5, skip_padding=skip), Seen()
        seen.watch(engine, ["model.layers.2.mlp.experts.permute"])
        engine.start([3])
        engine.step([(0, 0, token_ids(config, 3))])
        counts = seen.outputs("model.layers.2.mlp.experts.permute")[0][1]
        assert counts.shape == (config.n_routed_experts // 2,)
        return int(counts.sum())

    rows = 3 if skip else 5 if scheme == "tp" else 6
    assert sum(on_ranks(2, main)) == rows * config.num_experts_per_tok


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("aux_layers", [(), (0, 3, 5)])
def test_every_tap_stands_somewhere(scheme, aux_layers):
    config = tiny()

    def main(world):
        engine, seen = build(world, config, scheme=scheme, aux_layers=aux_layers), Seen()
        places = subject.taps(config, scheme=scheme, aux_layers=aux_layers, expert_parallel=True)
        seen.watch(engine, {module for module, *_ in places.values()})
        engine.start([10])  # more keys than are chosen, so that they are scored
        engine.step([(0, 0, token_ids(config, 10), 1)])
        engine.draft([0], 0)
        for module, side, index, _, _ in places.values():
            (value,) = seen.inputs(module) if side == "in" else seen.outputs(module)
            value = value if isinstance(value, tuple) else (value,)
            assert isinstance(value[index], torch.Tensor), module

    on_ranks(2, main)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_bfloat16_runs_throughout(scheme):
    config = tiny()

    def main(world):
        return run(world, config, (5, 2), 2, scheme=scheme, dtype=torch.bfloat16, pad_to=8, content=NAN)

    expected, _ = baseline(config, (5, 2), 2, ())
    for seen, state in on_ranks(2, main):
        hidden = seen.outputs("model")[-1][0][:7]
        assert hidden.dtype == torch.bfloat16
        assert all(rows.dtype == torch.bfloat16 for by_request in state.values() for rows in by_request.values())
        # Routing flips are possible, so only the bulk must agree; exact figures are the comparing tool's business.
        assert (hidden.to(F64) - expected[0]).abs().median() < 0.05
