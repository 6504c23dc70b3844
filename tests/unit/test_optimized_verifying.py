"""Steps that verify drafts: what follows them is what follows a step over the accepted tokens alone."""

import pytest
import torch
from test_optimized_helpers import Seen, build, on_ranks, tiny, token_ids
from test_optimized_sessions import Session, continued, drafted, plainly, same, same_state, sessions

from optimized.batch import Chunk
from optimized.forward_context import get_forward_context
from optimized.rejection_sampler import RejectionSampler

SCHEMES = ["tp", "moe-sp", "full-sp"]
GRAPHS = {"graph_sizes": (1, 2, 4, 8, 16, 32)}


@pytest.mark.parametrize(
    ("sampled", "drafted", "drafts", "accepted"),
    [
        ([5, 6, 7], [5, 6, 0], [2], [2]),
        ([5, 6, 7], [5, 9, 7], [2], [1]),
        ([5, 6, 7], [4, 6, 7], [2], [0]),
        ([5, 6, 7, 8], [1, 6, 2, 8], [0, 1, 0], [0, 1, 0]),
        ([1, 2, 3, 1, 2, 3, 9, 4], [1, 2, 1, 1, 3, 3, 9, 4], [2, 3, 0], [2, 1, 0]),
        ([3], [3], [0], [0]),
    ],
)
def test_leading_drafts_that_hold(sampled, drafted, drafts, accepted):
    out = RejectionSampler()(torch.tensor(sampled), torch.tensor(drafted), torch.tensor(drafts))
    assert out.dtype == torch.int64
    assert out.tolist() == accepted


def prompt_and_drafts(config, length, drafts, accepted, seed):
    """A prompt, and a chunk behind it of which so many drafts hold."""
    ids = continued(config, length, 1 + drafts, seed)
    return ids[:length], drafted(ids[length:], 1 + accepted)


MIXED = [(9, 3, 1), (4, 0, 0), (12, 2, 2), (7, 4, 0)]
"""(prompt, drafts, those that hold) of each request."""


def verification(config, cases, *, alone):
    """Prompts, a verifying step, drafts, and decoding behind them; ``alone``: steps over the accepted tokens.

    The first request is decoded on, those behind it are not drafted for any longer than one step.
    """
    given = [prompt_and_drafts(config, n, drafts, accepted, seed) for seed, (n, drafts, accepted) in enumerate(cases)]
    kept = [1 + accepted for _, _, accepted in cases]

    def play(session):
        everyone = list(range(len(cases)))
        session.step([(r, 0, prompt) for r, (prompt, _) in enumerate(given)])
        for step in range(3):
            session.draft(everyone, step)
        chunks = [(r, len(prompt), ids, len(ids) - 1) for r, (prompt, ids) in enumerate(given)]
        if alone:
            chunks = [(r, start, ids[: kept[r]]) for r, start, ids, _ in chunks]
        out = [session.step(chunks)]
        held = [session.engine.state()["model.layers.0.self_attn.cache.latent"][r].shape[0] for r in everyone]
        out += [session.draft(everyone, 0), session.draft([0], 1), session.draft([0], 2)]
        start = len(given[0][0]) + kept[0]
        out.append(session.step([(0, start, out[0][0][1], None if alone else 0)]))
        out.append(session.draft([0], 0))
        return out, held, session.engine.state()

    return play


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("cases", "padding"),
    [([(9, 3, 0)], {}), ([(9, 3, 3)], {"pad_to": 16}), (MIXED, {}), (MIXED, {"pad_to": 16}), (MIXED, GRAPHS)],
    ids=["none", "all-pad_to", "mixed", "mixed-pad_to", "mixed-graphs"],
)
def test_verification(cases, scheme, padding):
    """Rejected drafts are held until the request's next step, and seen by nothing behind it."""
    config = tiny()
    lengths = [n + drafts + 4 for n, drafts, _ in cases]
    expected, _, state = plainly(config, verification(config, cases, alone=True), lengths)
    for results, held, own in sessions(
        config, verification(config, cases, alone=False), lengths, scheme=scheme, **padding
    ):
        same(results, expected)
        assert held == [n + 1 + drafts for n, drafts, _ in cases]
        for name, by_request in state.items():
            rows = {r: own[name][r][: len(wanted)] for r, wanted in by_request.items()}
            same_state({name: rows}, {name: by_request})
            assert len(own[name][0]) == len(by_request[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_caches_behind_rejected_drafts_are_those_of_a_prompt(scheme):
    """After the next step and its drafts, every cache is what one prefill of the accepted tokens leaves."""
    config = tiny()
    ids = continued(config, 9, 5)

    def decoded(session):
        session.step([(0, 0, ids[:9])])
        for step in range(3):
            session.draft([0], step)
        session.step([(0, 9, drafted(ids[9:12], 2), 2)])
        for step in range(3):
            session.draft([0], step)
        session.step([(0, 11, ids[11:], 2)])
        session.draft([0], 0)
        return session.engine.state()

    def prefilled(session):
        session.step([(0, 0, ids)])
        session.draft([0], 0)
        return session.engine.state()

    expected = plainly(config, prefilled, [16])
    for state in sessions(config, decoded, [16], scheme=scheme):
        same_state(state, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padding", [{}, GRAPHS], ids=["", "graph_sizes"])
def test_one_dp_rank_verifies_and_the_others_know_it(scheme, padding):
    """Rank 0 verifies, 1 decodes, 2 is idle; only a step in which nobody verifies hands its context on."""
    config = tiny()
    prompt, ids = prompt_and_drafts(config, 9, 3, 1, 0)
    other = token_ids(config, 6, 1)

    def play(dp_rank, *, alone):
        chunks = [
            [[(0, 0, prompt)], [(0, 9, ids[:2]) if alone else (0, 9, ids, 3)], [(0, 11, ids[:1])]],
            [[(0, 0, other[:3])], [(0, 3, other[3:5])], [(0, 5, other[5:])]],
            [[], [], []],
        ][dp_rank]

        def played(session):
            out = []
            for step_chunks in chunks:
                out.append(session.step(step_chunks))
                out += [session.draft([0] if step_chunks else [], step) for step in range(2)]
            return out

        return played

    def main(world):
        dp_rank, calls, contexts = world.rank // 2, [], []
        engine = build(world, config, scheme=scheme, dp=3, calls=calls, **padding)
        for module in (engine.model, engine.model.layers[config.num_hidden_layers]):
            module.register_forward_pre_hook(lambda *_: contexts.append(get_forward_context()))
        results = play(dp_rank, alone=False)(Session(engine, config, [14] if dp_rank < 2 else []))
        agreed = [call[1:] for call in calls if call[0] == "dp_cpu"]
        return results, agreed, [contexts[i] is contexts[i + 1] for i in (0, 3, 6)]

    for rank, (results, agreed, shared) in enumerate(on_ranks(6, main)):
        dp_rank = rank // 2
        assert agreed == [("all_reduce", (3, 3))] * 7
        assert shared == [True, False, True]
        if dp_rank < 2:
            same(results, plainly(config, play(dp_rank, alone=True), [14]))


def test_the_sampler_sees_the_rows_before_the_drafts_and_the_verifier_fires_only_where_drafts_are_verified():
    config = tiny()
    ids = token_ids(config, 12)

    def main(world):
        engine, seen = build(world, config, scheme="tp", pad_to=8), Seen()
        seen.watch(engine, ["sampler", "rejection_sampler"])
        engine.start([9, 9])
        engine.step([(0, 0, ids[:4]), (1, 0, ids[:3])])
        engine.step([(1, 3, ids[3:7], 3), (0, 4, ids[4:6])])
        engine.step([(0, 6, ids[6:7], 0)])
        rows = [len(logits) for (logits,) in seen.inputs("sampler")]
        return rows, [len(tokens) for tokens in seen.outputs("sampler")], seen.outputs("rejection_sampler")

    ((rows, tokens, accepted),) = on_ranks(1, main)
    assert rows == tokens == [2, 5, 1]
    assert [(x.dtype, len(x)) for x in accepted] == [(torch.int64, 2), (torch.int64, 1)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_accepted_can_be_said_from_outside(scheme):
    """A hook's number of accepted drafts counts, and a known token is what follows whatever was sampled."""
    config = tiny()
    prompt, ids = prompt_and_drafts(config, 9, 3, 3, 0)

    def main(world):
        engine = build(world, config, scheme=scheme)
        engine.rejection_sampler.register_forward_hook(lambda _, args, out: torch.ones_like(out))
        session = Session(engine, config, [14])
        session.step([(0, 0, prompt)])
        session.draft([0], 0)
        session.step([(0, 9, ids, 3, 7)])
        session.rows[0] = 2
        return [session.draft([0], 0)]

    def alone(session):
        session.step([(0, 0, prompt)])
        session.draft([0], 0)
        session.step([(0, 9, ids[:2], None, 7)])
        return [session.draft([0], 0)]

    (expected,) = sessions(config, alone, [14], tp=1, scheme="tp")
    for results in on_ranks(2, main):
        same(results, expected)


def ones(n):
    return torch.ones(n, dtype=torch.int64)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([("step", [Chunk(0, 0, ones(3), 3)])], "request 0 has 3 new rows, of which 3 cannot be drafts"),
        ([("step", [(1, 0, ones(2), -1)])], "request 1 has 2 new rows, of which -1 cannot be drafts"),
        ([("step", [(1, 0, ones(0))])], "request 1 has 0 new rows, of which 0 cannot be drafts"),
        ([("draft", [0], 0)], "a draft step needs a target step before it"),
        ([("step", [(0, 0, ones(2))]), ("draft", [1], 0)], r"the requests of the target step, \[0\], not \[1\]"),
        ([("step", [(0, 0, ones(2))]), ("draft", [0], 1)], "draft step 1 needs draft step 0 before it"),
        (
            [("step", [(0, 0, ones(1))]), ("draft", [0], 0), ("step", [(0, 1, ones(1))]), ("draft", [0], 1)],
            "draft step 1 needs draft step 0 before it",
        ),
        (
            [
                ("step", [(0, 0, ones(1)), (1, 0, ones(1))]),
                *(("draft", requests, step) for step, requests in enumerate([[0, 1], [1], [0]])),
            ],
            "draft step 1 was not for request 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(moves, message):
    *before, (name, *arguments) = moves

    def main(world):
        engine = build(world, tiny(), scheme="tp")
        engine.start([8, 8])
        for move, *given in before:
            getattr(engine, move)(*given)
        with pytest.raises(ValueError, match=message):
            getattr(engine, name)(*arguments)

    on_ranks(1, main)


def test_a_model_without_mtp_layers_cannot_draft():
    def main(world):
        engine = build(world, tiny(num_nextn_predict_layers=0), scheme="tp")
        engine.start([2])
        engine.step([(0, 0, token_ids(tiny(), 2))])
        with pytest.raises(ValueError, match="without MTP layers cannot draft"):
            engine.draft([0], 0)

    on_ranks(1, main)
