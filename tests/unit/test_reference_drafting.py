"""Drafting and verification in the reference: rows of every draft step, what is forgotten, MTP layers in turn."""

import pytest
import torch
from reference_engines import RAW, close, engine_of, keep

from reference.engine import Chunk

PROMPT = 10


@pytest.fixture
def ids():
    return torch.randint(250, (21,), generator=torch.Generator().manual_seed(0))


def inputs_of(engine, layer: int) -> list[tuple]:
    """The arguments of every forward of an MTP layer: ids, hidden, positions, cache."""
    seen = []
    engine.model.layers[layer].register_forward_pre_hook(lambda _, args: seen.append(args))
    return seen


def greedy(engine, prompt, new: int) -> torch.Tensor:
    """The tokens that the model goes on with, one more than are run."""
    sampled = keep(engine, "sampler")
    engine.start([len(prompt) + new])
    engine.step([Chunk(0, 0, prompt)])
    for position in range(len(prompt), len(prompt) + new):
        engine.step([Chunk(0, position, sampled[-1])])
    return torch.cat(sampled)


def same_state(engine, other) -> bool:
    state, expected = engine.state(), other.state()
    return state.keys() == expected.keys() and all(close(rows[0], expected[name][0]) for name, rows in state.items())


def test_drafted_positions_are_written_again(ids):
    """Decoding after three draft steps leaves the MTP layer as a prefill of the longer request does."""
    drafted, plain = engine_of(), engine_of()
    sampled = keep(drafted, "sampler")
    drafted.start([30])
    drafted.step([(0, 0, ids)])
    for step in range(3):
        drafted.draft([0], step)
    assert drafted.state()["model.layers.3.self_attn.cache.latent"][0].shape[0] == 23
    logits, expected = (keep(engine, "model.layers.3.shared_head.head") for engine in (drafted, plain))
    drafted.step([(0, 21, sampled[0])])
    drafted.draft([0], 0)
    plain.start([30])
    plain.step([(0, 0, torch.cat((ids, sampled[0])))])
    plain.draft([0], 0)
    assert close(logits[0][-1], expected[0][-1])
    assert all(close(rows[0], plain.state()[name][0]) for name, rows in drafted.state().items())


def test_draft_step_zero_takes_the_next_tokens_and_the_sampled_one(ids):
    engine = engine_of()
    sampled, h = keep(engine, "sampler"), keep(engine, "model")
    seen = []
    engine.model.layers[3].register_forward_pre_hook(lambda _, args: seen.append(args))
    engine.start([21])
    engine.step([(0, 0, ids)])
    engine.draft([0], 0)
    rows, hidden, positions, _ = seen[0]
    assert torch.equal(rows, torch.cat((ids[1:], sampled[0])))
    assert torch.equal(hidden, h[0][0])
    assert positions.tolist() == list(range(21))


def test_later_draft_steps_recycle_the_normed_hidden(ids):
    engine = engine_of()
    normed, tokens = keep(engine, "model.layers.3.shared_head.norm"), keep(engine, "model.layers.3.shared_head.sampler")
    seen = []
    engine.model.layers[3].register_forward_pre_hook(lambda _, args: seen.append(args))
    engine.start([21])
    engine.step([(0, 0, ids)])
    for step in range(3):
        engine.draft([0], step)
    for step in (1, 2):
        rows, hidden, positions, _ = seen[step]
        assert torch.equal(rows, tokens[step - 1])
        assert torch.equal(hidden, normed[step - 1][-1:])
        assert positions.tolist() == [20 + step]


def test_several_mtp_layers_take_turns(ids):
    engine = engine_of(num_nextn_predict_layers=2)
    fired = []
    for layer in (3, 4):
        engine.model.layers[layer].register_forward_hook(lambda *_, layer=layer: fired.append(layer))
    engine.start([21])
    engine.step([(0, 0, ids)])
    for step in range(4):
        engine.draft([0], step)
    assert fired == [3, 4, 3, 4]
    assert torch.isfinite(engine.requests[0].next_draft.hidden).all()


def test_the_first_mtp_embedding_may_be_zeroed(ids):
    plain, zeroed = engine_of(), engine_of(mtp_zero_first_embedding=True)
    inputs = []
    for engine in (plain, zeroed):
        engine.model.layers[3].eh_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        engine.start([21])
        engine.step([(0, 0, ids)])
        engine.draft([0], 0)
    embedded, hidden = inputs[1].split(RAW["hidden_size"], dim=-1)
    assert embedded[0].abs().max() == 0
    assert torch.equal(embedded[1:], inputs[0][1:, : RAW["hidden_size"]])
    assert torch.equal(hidden, inputs[0][:, RAW["hidden_size"] :])


@pytest.mark.parametrize("mtp_layers", [1, 2])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_rejected_drafts_are_forgotten(ids, right, mtp_layers):
    """Behind a verification every layer holds what a run of the accepted tokens alone leaves there."""
    tokens = greedy(engine_of(), ids[:PROMPT], 4)
    drafts = tokens[1:4].clone()
    drafts[right:] = (drafts[right:] + 1) % 250
    verified, fresh = (engine_of(num_nextn_predict_layers=mtp_layers) for _ in range(2))
    sampled, accepted = keep(verified, "sampler"), keep(verified, "rejection_sampler")
    rows = inputs_of(verified, 3)
    verified.start([30])
    verified.step([Chunk(0, 0, ids[:PROMPT])])
    for step in range(4):
        verified.draft([0], step)
    verified.step([Chunk(0, PROMPT, torch.cat((tokens[:1], drafts)), drafts=3)])
    assert accepted[0].tolist() == [right]
    assert accepted[0].dtype == torch.int64
    assert torch.equal(sampled[1][: right + 1], tokens[1 : right + 2])
    assert verified.state()["model.layers.0.self_attn.cache.latent"][0].shape[0] == PROMPT + 4  # until the next step
    for step in range(3):
        verified.draft([0], step)
    step_zero = rows[-2 if mtp_layers == 2 else -3]
    assert torch.equal(step_zero[0], tokens[1 : right + 2])
    assert step_zero[2].tolist() == list(range(PROMPT, PROMPT + right + 1))

    verified.step([Chunk(0, PROMPT + right + 1, tokens[right + 1 : right + 2], drafts=0)])
    verified.draft([0], 0)
    fresh.start([30])
    fresh.step([Chunk(0, 0, torch.cat((ids[:PROMPT], tokens[: right + 2])))])
    fresh.draft([0], 0)
    assert same_state(verified, fresh)


def test_the_engine_goes_on_with_what_the_samplers_put_out(ids):
    """A hook may replace it: the drafts and the token behind them follow."""
    engine = engine_of()
    rows, sampled = inputs_of(engine, 3), torch.tensor([7, 8, 9])
    engine.sampler.register_forward_hook(lambda *_: sampled)
    engine.rejection_sampler.register_forward_hook(lambda *_: torch.tensor([1]))
    engine.start([21])
    engine.step([Chunk(0, 0, ids[:5], drafts=2)])
    engine.draft([0], 0)
    assert rows[0][0].tolist() == [*ids[1:4].tolist(), 8]


def test_an_ordinary_chunk_verifies_nothing(ids):
    engine = engine_of()
    sampled, logits, accepted = (keep(engine, name) for name in ("sampler", "lm_head", "rejection_sampler"))
    engine.start([21])
    engine.step([Chunk(0, 0, ids[:5])])
    assert accepted == []
    engine.step([Chunk(0, 5, ids[5:9], drafts=0), Chunk(0, 9, ids[9:], drafts=3)])
    assert [len(tokens) for tokens in sampled] == [1, 1, 4]
    assert [count.shape for count in accepted] == [(1,), (1,)]
    assert accepted[0].tolist() == [0]
    assert torch.equal(sampled[2], logits[2][-4:].argmax(dim=-1))


@pytest.mark.parametrize("drafts", [None, 2])
def test_the_token_behind_a_chunk_may_be_known(ids, drafts):
    engine = engine_of()
    rows = inputs_of(engine, 3)
    engine.rejection_sampler.register_forward_hook(lambda *_: torch.tensor([1]))
    engine.start([21])
    engine.step([Chunk(0, 0, ids[:6], drafts=drafts, following=int(ids[6]))])
    engine.draft([0], 0)
    kept = 6 if drafts is None else 5
    assert rows[0][0].tolist() == [*ids[1:kept].tolist(), int(ids[6])]


@pytest.mark.parametrize("cuts", [(7,), (1, 2, 13)])
def test_a_prompt_in_chunks_drafts_like_a_whole_one(ids, cuts):
    whole, chunked = engine_of(), engine_of()
    for engine, ends in ((whole, (21,)), (chunked, (*cuts, 21))):
        engine.start([30])
        for first, last in zip((0, *ends), ends, strict=False):
            engine.step([(0, first, ids[first:last], None, int(ids[last]) if last < 21 else None)])
            for step in range(3):
                engine.draft([0], step)
    assert same_state(chunked, whole)


def test_some_requests_may_go_on_drafting(ids):
    together, alone = engine_of(), engine_of()
    logits, expected = (keep(engine, "model.layers.3.shared_head.head") for engine in (together, alone))
    together.start([9, 12, 12])
    together.step([Chunk(0, 0, ids[:9]), Chunk(1, 0, ids[9:]), Chunk(2, 0, ids[:12])])
    for step, requests in enumerate(([0, 1, 2], [0, 1], [1], [])):
        together.draft(requests, step)
    alone.start([12])
    alone.step([Chunk(0, 0, ids[9:])])
    for step in range(3):
        alone.draft([0], step)
    assert len(logits) == 6
    assert all(torch.equal(logits[i], theirs) for i, theirs in zip((1, 4, 5), expected, strict=True))
    held = together.state()["model.layers.3.self_attn.cache.latent"]
    assert {request: len(rows) for request, rows in held.items()} == {0: 10, 1: 14, 2: 12}


def test_mtp_layers_in_turn_hold_positions_of_their_own_steps(ids):
    """A position that an MTP layer never saw is no key there, and no row of its cache."""
    engine = engine_of(model_type="deepseek_v3", num_nextn_predict_layers=2)
    keys = {layer: keep(engine, f"model.layers.{layer}.self_attn.softmax") for layer in (3, 4)}
    latent = "model.layers.{}.self_attn.cache.latent"

    def attended(layer: int, call: int) -> list[int]:
        return keys[layer][call][-1, 0].nonzero().flatten().tolist()

    engine.start([30])
    engine.step([Chunk(0, 0, ids[:PROMPT])])
    for step in range(4):
        engine.draft([0], step)
    assert [attended(3, 0), attended(3, 1)] == [list(range(10)), [*range(10), 11]]
    assert [attended(4, 0), attended(4, 1)] == [[10], [10, 12]]
    assert {layer: len(engine.state()[latent.format(layer)][0]) for layer in (3, 4)} == {3: 11, 4: 2}

    engine.step([Chunk(0, 10, ids[10:13], drafts=2)])
    assert latent.format(4) not in engine.state()
    assert len(engine.state()[latent.format(3)][0]) == 10
    rows = inputs_of(engine, 4)
    for step in range(2):
        engine.draft([0], step)
    (position,) = rows[0][2].tolist()
    assert attended(3, 2) == list(range(position))
    assert attended(4, 2) == [position]


@pytest.mark.parametrize(("rows", "drafts"), [(1, 1), (3, 3), (3, 7), (3, -1), (0, None), (0, 0)])
def test_a_chunk_has_more_rows_than_drafts(ids, rows, drafts):
    engine = engine_of()
    engine.start([21, 21])
    with pytest.raises(ValueError, match=rf"request 1: {drafts or 0} drafts in a chunk of {rows} rows"):
        engine.step([Chunk(1, 0, ids[:rows], drafts)])
