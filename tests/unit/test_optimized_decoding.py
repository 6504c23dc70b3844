"""Decoding and drafting over caches: whatever the chunks, the reference says the same."""

from itertools import pairwise

import pytest
import torch
from test_optimized_helpers import Seen, build, on_ranks, tiny, token_ids
from test_optimized_sessions import Session, continued, plainly, same, same_state, sessions

SCHEMES = ["tp", "moe-sp", "full-sp"]
PADDINGS = [{}, {"pad_to": 16}, {"graph_sizes": (1, 2, 4, 8, 32)}]


def agree(config, play, lengths, **options):
    """``play`` gives a list of what forwards gave, and ends with the state."""
    *expected, state = plainly(config, play, lengths)
    for *results, own in sessions(config, play, lengths, **options):
        same(results, expected)
        same_state(own, state)


def decode_with_drafts(ids, steps=2):
    """A prompt of 6 and then one token a step, each step with drafts. 8 keys are chosen: at first all, later not."""

    def play(session):
        out = []
        for start, end in pairwise([0, *range(6, len(ids) + 1)]):
            out.append(session.step([(0, start, ids[start:end])]))
            out += [session.draft([0], step) for step in range(steps)]
        return [*out, session.engine.state()]

    return play


@pytest.mark.parametrize("padding", PADDINGS, ids=["", "pad_to", "graph_sizes"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_with_drafts(scheme, padding):
    """Every step's tentative rows in the MTP cache are gone in the next; padding holds rows of steps before."""
    config = tiny()
    ids = continued(config, 6, 6)
    agree(config, decode_with_drafts(ids), [14], scheme=scheme, **padding)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_without_indexer_decodes(scheme):
    config = tiny(model_type="deepseek_v3", index_topk=None, index_n_heads=None, index_head_dim=None)
    agree(config, decode_with_drafts(token_ids(config, 10)), [12], scheme=scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sizes", [(3, 8, 2), (1, 1, 11), (12, 1)])
def test_a_prompt_in_chunks_is_a_prompt_in_one(scheme, sizes):
    """Known tokens follow the chunks, so that the MTP layer reads the prompt and no guess."""
    config, ids = tiny(), token_ids(tiny(), 13)

    def in_chunks(session):
        start = 0
        for size in sizes:
            end = start + size
            out = session.step([(0, start, ids[start:end], None, int(ids[end]) if end < len(ids) else None)])
            drafts = session.draft([0], 0)
            start = end
        return [_last_row(out), _last_row(drafts), session.draft([0], 1), session.engine.state()]

    def in_one(session):
        out = session.step([(0, 0, ids)])
        return [_last_row(out), _last_row(session.draft([0], 0)), session.draft([0], 1), session.engine.state()]

    *expected, state = plainly(config, in_one, [14])
    for *results, own in sessions(config, in_chunks, [14], scheme=scheme):
        same(results, expected)
        same_state(own, state)


def _last_row(out):
    return {request: (hidden[-1:], tokens) for request, (hidden, tokens) in out.items()}


@pytest.mark.parametrize("padding", PADDINGS, ids=["", "pad_to", "graph_sizes"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_requests_come_and_go_and_stop_drafting(scheme, padding):
    """A request at its limit drafts no more; in a draft step of none a padding row runs."""
    config = tiny()
    a, b, c = (token_ids(config, n, n) for n in (9, 5, 3))

    def play(session):
        out = [session.step([(1, 0, b), (0, 0, a)])]
        out += [session.draft(requests, step) for step, requests in enumerate([[1, 0], [0, 1], [0], [], []])]
        out.append(session.step([(2, 0, c)]))
        out += [session.draft(requests, step) for step, requests in enumerate([[2], [2]])]
        out.append(session.step([(0, 9, a[:1]), (2, 3, b[:2]), (1, 5, c)]))
        out += [session.draft(requests, step) for step, requests in enumerate([[0, 2, 1], [1, 0], [1]])]
        return [*out, session.engine.state()]

    agree(config, play, [12, 10, 8], scheme=scheme, **padding)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_two_mtp_layers_each_holds_its_own_steps_until_the_next_one(scheme):
    config = tiny(num_nextn_predict_layers=2)
    ids = token_ids(config, 7)

    def play(session):
        held = []
        for start, end in ((0, 4), (4, 7)):
            session.step([(0, start, ids[start:end])])
            for step in range(4):
                session.draft([0], step)
            state = session.engine.state()
            held.append([len(state[f"model.layers.{i}.self_attn.cache.latent"][0]) for i in (4, 5, 6)])
        session.step([(0, 7, ids[:1])])
        state = session.engine.state()
        return [*held, [len(state[f"model.layers.{i}.self_attn.cache.latent"][0]) for i in (4, 5, 6)]]

    # Of the drafts from positions 4 and 7 on, steps 1 and 3 are the second layer's, step 2 the first one's again.
    assert sessions(config, play, [10], scheme=scheme) == [[[4, 5, 2], [7, 8, 2], [8, 7, 0]]] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_drafts_of_two_mtp_layers(scheme):
    config = tiny(num_nextn_predict_layers=2)
    a, b = token_ids(config, 10), token_ids(config, 4, 1)

    def play(session):
        out = [session.step([(0, 0, a), (1, 0, b)])]
        return out + [session.draft([0, 1], step) for step in range(5)]

    expected = plainly(config, play, [14, 8])
    for results in sessions(config, play, [14, 8], scheme=scheme):
        same(results, expected)


@pytest.mark.parametrize(("topk", "scored"), [(8, [False, False, True]), (9, [False] * 3), (2, [True] * 3)])
def test_keys_are_scored_only_where_some_are_left_out(topk, scored):
    """4, 8 and 9 keys. Keys are kept in any case: the third step scores those of the first two."""
    config = tiny(index_topk=topk)
    ids = token_ids(config, 9)

    def main(world):
        engine = build(world, config, scheme="tp")
        session, seen, fired = Session(engine, config, [9, 1]), Seen(), []
        names = ["k_norm", "k_rope", "q_rope", "head_weights", "score", "choose"]
        indexer = "model.layers.3.self_attn.indexer"
        for start, end in ((0, 4), (4, 8), (8, 9)):
            seen.out.clear()
            handles = seen.watch(engine, [f"{indexer}.{name}" for name in names])
            session.step([(0, start, ids[start:end]), *([(1, 0, ids[:1])] if start == 0 else [])])
            fired.append([name for name in names if seen.outputs(f"{indexer}.{name}")])
            (chosen,) = seen.outputs(f"{indexer}.choose")
            assert chosen.shape[1] == min(topk, end)
            for handle in handles:
                handle.remove()
        return fired

    always, where_scored = ["k_norm", "k_rope"], ["q_rope", "head_weights", "score"]
    assert on_ranks(1, main) == [[[*always, *(where_scored if s else []), "choose"] for s in scored]]
    agree(config, decode_with_drafts(ids), [11], scheme="full-sp")


def test_an_idle_rank_scores_nothing():
    def main(world):
        engine, seen = build(world, tiny(), scheme="tp"), Seen()
        seen.watch(engine, ["model.layers.0.self_attn.indexer.score", "model.layers.0.self_attn.indexer.choose"])
        engine.start([])
        engine.step([])
        engine.draft([], 0)
        (chosen,) = seen.outputs("model.layers.0.self_attn.indexer.choose")
        return seen.outputs("model.layers.0.self_attn.indexer.score"), chosen.shape

    assert on_ranks(1, main) == [([], (1, 0))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_hidden_buffer_stays_and_padding_holds_what_was_there(scheme):
    config = tiny()
    ids = token_ids(config, 6)

    def main(world):
        engine, seen = build(world, config, scheme=scheme, graph_sizes=(4, 8)), Seen()
        seen.watch(engine, ["model"])
        inputs = []
        layer = engine.model.layers[config.num_hidden_layers]
        layer.register_forward_pre_hook(lambda _, args: inputs.append((args[1].data_ptr(), args[1].clone())))
        session = Session(engine, config, [7, 4])
        session.step([(0, 0, ids), (1, 0, ids[:2])])
        for step in range(2):
            session.draft([0, 1], step)
        recycled = engine.drafted.hidden.clone()
        session.draft([1], 2)
        target, held = seen.outputs("model")[0][0], [x for _, x in inputs]
        assert len({place for place, _ in inputs}) == 1
        assert [len(x) for x in held] == [8, 4, 4]
        assert torch.equal(held[0], target[:8])
        assert torch.equal(held[1][2:], target[2:4])
        assert torch.equal(held[2][:1], recycled[1:])
        assert torch.equal(held[2][1:], held[1][1:])
        engine.start([1])
        assert not engine.inputs.hidden.any()

    on_ranks(2, main)


def test_many_long_requests():
    """64 requests, one of them decoding at position 800: its row is that of the request alone."""
    config = tiny(num_hidden_layers=3)
    ids = token_ids(config, 801)

    def play(others):
        def played(session):
            session.step([(0, 0, ids[:800])])
            session.draft([0], 0)
            session.step([(r, 0, ids[r : 2 * r + 1]) for r in others])
            session.draft(others, 0)
            requests = [0, *others]
            out = session.step([(0, 800, ids[800:]), *((r, r + 1, ids[r : r + 1]) for r in others)])
            drafts = [session.draft(requests, step) for step in range(2)]
            return [{0: result[0]} for result in (out, *drafts)]

        return played

    lengths = [802, *range(4, 67)]
    alone, crowded = (sessions(config, play(o), lengths, tp=1, scheme="tp")[0] for o in ([], list(range(1, 64))))
    same(crowded, alone)
