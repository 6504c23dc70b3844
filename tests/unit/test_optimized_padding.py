"""Persistent inputs, graph sizes, masks: what one step leaves behind never reaches the next one's real rows."""

import pytest
import torch
from test_optimized_agreement import check, check_rank
from test_optimized_helpers import Seen, build, on_ranks, tiny, token_ids
from test_optimized_sessions import continued, drafted

from optimized.buffers import GraphPadding, InputBuffers
from optimized.forward_context import get_forward_context

SCHEMES = ["tp", "moe-sp", "full-sp"]
GRAPHS = (1, 2, 4, 8, 16, 32)


def test_buffers_stay_and_keep_what_no_token_overwrites():
    inputs = InputBuffers(2, torch.float64, torch.device("cpu"))
    positions, mask = inputs.place(torch.arange(1, 6), 8)
    ids = inputs.place_ids(torch.arange(11, 16), 8)
    later, later_mask = inputs.place(torch.tensor([7, 8]), 4)
    later_ids = inputs.place_ids(torch.tensor([17]), 4)
    assert later.tolist() == [7, 8, 3, 4]
    assert later_ids.tolist() == [17, 12, 13, 14]
    assert later_mask.tolist() == [False, False, True, True]
    assert [x.data_ptr() for x in (positions, mask, ids)] == [x.data_ptr() for x in (later, later_mask, later_ids)]
    assert mask.tolist() == [False, False, True, True, False, True, True, True]


def test_buffers_grow_and_keep_their_values():
    inputs = InputBuffers(2, torch.float64, torch.device("cpu"))
    inputs.place_ids(torch.tensor([5, 6]), 2)
    inputs.place_hidden(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 2)
    assert inputs.place_ids(torch.tensor([7]), 4).tolist() == [7, 6, 0, 0]
    assert inputs.place_hidden(torch.tensor([[5.0, 6.0]]), 3).tolist() == [[5, 6], [3, 4], [0, 0]]


def test_which_graph_runs():
    by_size, by_number, none = GraphPadding(None, (8, 2, 4)), GraphPadding(6), GraphPadding()
    assert [by_size.of_target(n) for n in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]
    assert [by_size.of_draft(n) for n in (1, 5, 9)] == [2, 8, None]
    assert [by_number.of_target(n) for n in (1, 6, 7)] == [6, 6, None]
    assert by_number.of_draft(3) is None
    assert none.of_target(3) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_graph_sizes_pad_every_forward(scheme):
    check(tiny(), (5, 2, 4), 3, 2, scheme=scheme, graph_sizes=GRAPHS, content=float("nan"))

    def main(world):
        engine, seen = build(world, tiny(), scheme=scheme, graph_sizes=GRAPHS), Seen()
        seen.watch(engine, ["model", "model.layers.5"])
        engine.start([6, 3, 5])
        engine.step([(r, 0, token_ids(tiny(), n)) for r, n in enumerate((5, 2, 4))])
        for step in range(2):
            engine.draft([0, 1, 2], step)
        return [x[0].shape[0] for x in seen.outputs("model")], [x.shape[0] for x in seen.outputs("model.layers.5")]

    assert on_ranks(2, main) == [([16], [16, 4])] * 2


def stale_run(world, scheme, first, requests, steps, **options):
    """A case after another one on the same engine, whose rows stay behind in the padding."""
    config = tiny()
    engine, seen = build(world, config, scheme=scheme, **options), Seen()
    for case in (first, requests):
        engine.start([n + steps for n in case])
        seen = Seen()
        last = f"model.layers.{config.num_hidden_layers}"
        names = ["model", "lm_head", "sampler", last, f"{last}.shared_head.head", f"{last}.shared_head.sampler"]
        handles = seen.watch(engine, names)
        engine.step([(r, 0, token_ids(config, n, 100 * sum(case) + r)) for r, n in enumerate(case)])
        for step in range(steps):
            engine.draft(list(range(len(case))), step)
        for handle in handles:
            handle.remove()
    return seen, engine.state()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padding", [{"pad_to": 32}, {"graph_sizes": (32,)}])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("first", "second"), [((9,), (17,)), ((17,), (9,)), ((5, 4), (1,))])
def test_two_steps_of_one_padded_size_with_different_masks(scheme, padding, skip, first, second):
    options = {"skip_padding": skip, **padding}
    for result in on_ranks(2, lambda world: stale_run(world, scheme, first, second, 2, **options)):
        check_rank(result, tiny(), second, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_target_and_first_draft_share_a_context_whose_mask_is_whole_again(scheme):
    """3 rows padded to 5; a shard's mask has 3 flags, and the context's own has 5 before and after."""
    config = tiny()

    def main(world):
        engine = build(world, config, scheme=scheme, pad_to=5)
        masks, layers = [], [engine.model.layers[i] for i in (2, 5)]
        for layer in layers:
            layer.mlp.register_forward_pre_hook(lambda *_: masks.append(get_forward_context().is_padding.tolist()))
        contexts = []
        for module in (engine.model, layers[1]):
            module.register_forward_pre_hook(lambda *_: contexts.append(get_forward_context()))
            module.register_forward_hook(lambda *_: masks.append(get_forward_context().is_padding.tolist()))
        engine.start([3])
        engine.step([(0, 0, token_ids(config, 3))])
        engine.draft([0], 0)
        assert contexts[0] is contexts[1]
        return masks

    whole = [False] * 3 + [True] * 2
    shards = [[False] * 3, [True] * 3] if scheme != "tp" else [whole] * 2
    for rank, masks in enumerate(on_ranks(2, main)):
        assert masks == [shards[rank], whole] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_writes_no_cache_slot(scheme):
    def main(world):
        engine = build(world, tiny(), scheme=scheme, pad_to=8)
        engine.start([3, 2])
        engine.step([(1, 0, token_ids(tiny(), 2))])
        return engine.model.layers[2].self_attn.cache[:3].any(), engine.model.layers[2].self_attn.cache[3:].any(dim=1)

    for other, own in on_ranks(2, main):
        assert not other
        assert own.all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("skip", [True, False])
def test_an_idle_rank_is_all_padding_and_samples_nothing(scheme, skip):
    config = tiny()

    def main(world):
        engine, seen = build(world, config, scheme=scheme, dp=2, skip_padding=skip), Seen()
        watched = ["model.layers.5", "sampler", "model.layers.5.shared_head.sampler", "model.layers.2.mlp.gate"]
        seen.watch(engine, watched)
        idle = world.rank >= 2
        engine.start([] if idle else [6])
        engine.step([] if idle else [(0, 0, token_ids(config, 5))])
        for step in range(2):
            engine.draft([] if idle else [0], step)
        hidden = [args[1] for args in seen.inputs("model.layers.5")]
        sampled = [ids.shape[0] for name in watched if "sampler" in name for ids in seen.outputs(name)]
        return idle, [(x.shape[0], bool(x.any())) for x in hidden], sampled, engine.state()

    for idle, hidden, sampled, state in on_ranks(4, main):
        assert hidden == ([(1, False)] * 2 if idle else [(5, True), (1, True)])
        assert sampled == [0 if idle else 1] * 3
        assert all(bool(by_request) != idle for by_request in state.values())


@pytest.mark.parametrize(
    ("padding", "target", "draft"),
    [({"pad_to": 5}, [9, 5], [9, 5, 1]), ({"graph_sizes": (1, 2, 4, 8)}, [9, 4], [9, 2, 1])],
    ids=["pad_to", "graph_sizes"],
)
def test_rows_that_no_graph_holds_run_without_and_the_rows_that_hold_are_padded_anew(padding, target, draft):
    """A prompt of 9, then 4 rows of which 2 hold."""
    config = tiny()
    ids = continued(config, 9, 4)

    def main(world):
        engine, seen = build(world, config, scheme="full-sp", **padding), Seen()
        seen.watch(engine, ["model", "model.layers.5"])
        engine.start([13])
        engine.step([(0, 0, ids[:9])])
        engine.draft([0], 0)
        engine.step([(0, 9, drafted(ids[9:], 2), 3)])
        for step in range(2):
            engine.draft([0], step)
        return [x[0].shape[0] for x in seen.outputs("model")], [x.shape[0] for x in seen.outputs("model.layers.5")]

    assert on_ranks(2, main) == [(target, draft)] * 2
