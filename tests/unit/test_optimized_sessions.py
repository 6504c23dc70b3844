"""Sessions of target and draft steps through an engine, request by request; used by other test_optimized files."""

import functools
from itertools import pairwise

import torch
from test_optimized_helpers import Seen, build, close, groups, on_ranks, setup_of, token_ids, weights

import reference.subject
from optimized.batch import Chunk


class Session:
    """An engine between two starts. What a forward gave is request -> (hidden rows, tokens), real rows only."""

    def __init__(self, engine, config, lengths):
        self.engine, self.config, self.seen = engine, config, Seen()
        layers = [f"model.layers.{i}" for i in config.mtp_layers]
        heads = [f"{layer}.shared_head.sampler" for layer in layers]
        verifier = ["rejection_sampler"] if hasattr(engine, "rejection_sampler") else []
        self.seen.watch(engine, ["model", "sampler", *layers, *heads, *verifier])
        self.rows = {}
        engine.start(lengths)

    def step(self, chunks):
        """One target step; of a chunk with drafts the hidden rows that hold, and the token behind them."""
        chunks = [Chunk(*chunk) for chunk in chunks]
        self._forward(chunks)
        accepted = [0] * len(chunks)
        if any(chunk.drafts is not None for chunk in chunks):
            accepted = self.seen.outputs("rejection_sampler")[-1].tolist()
        hidden = self._parts(self.seen.outputs("model")[-1][0], [len(c.ids) for c in chunks])
        tokens = self._parts(self.seen.outputs("sampler")[-1], [c.num_drafts + 1 for c in chunks])
        out = {}
        for c, a, rows, ids in zip(chunks, accepted, hidden, tokens, strict=True):
            self.rows[c.request] = len(c.ids) - c.num_drafts + a
            out[c.request] = rows[: self.rows[c.request]], ids[a : a + 1]
        return out

    def draft(self, requests, step):
        """One draft step."""
        self.engine.draft(requests, step)
        counts = [self.rows[r] if step == 0 else 1 for r in requests]
        index = step % self.config.num_nextn_predict_layers
        layer = f"model.layers.{self.config.num_hidden_layers + index}"
        hidden = self._parts(self.seen.outputs(layer)[-1], counts)
        tokens = self.seen.outputs(f"{layer}.shared_head.sampler")[-1]
        return {r: (rows, tokens[i : i + 1]) for i, (r, rows) in enumerate(zip(requests, hidden, strict=True))}

    def _forward(self, chunks):
        self.engine.step(chunks)

    def _parts(self, x, counts):
        bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return [x[first:stop].clone() for first, stop in pairwise(bounds)]


class PlainSession(Session):
    """The same through an engine that takes one request at a time."""

    def step(self, chunks):
        """An ordinary step over new tokens, one request after the other."""
        return {r: out for c in chunks for r, out in super(PlainSession, self).step([c]).items()}

    def draft(self, requests, step):
        """One draft step, one request after the other."""
        return {r: super(PlainSession, self).draft([r], step)[r] for r in requests}

    def _forward(self, chunks):
        self.engine.step([chunk[:3] for chunk in chunks])


def plainly(config, play, lengths):
    """What ``play(session)`` gives through the reference on one rank."""

    def main(world):
        engine = reference.subject.build(setup_of(config, weights(config), groups(world), scheme="reference"))
        return play(PlainSession(engine, config, lengths))

    return on_ranks(1, main)[0]


def sessions(config, play, lengths, tp=2, **options):
    """The same through the optimized engine on ``tp`` ranks, rank by rank."""
    return on_ranks(tp, lambda world: play(Session(build(world, config, **options), config, lengths)))


def same(results, expected):
    """Two lists of what forwards gave are equal: tokens exactly, hidden rows to the last few bits."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.keys() == wanted.keys()
        for request, (hidden, tokens) in wanted.items():
            close(result[request][0], hidden)
            assert torch.equal(result[request][1], tokens)


def same_state(state, expected):
    """Every cache holds the same positions with the same values."""
    assert state.keys() == expected.keys()
    for name, by_request in expected.items():
        for request, rows in by_request.items():
            close(state[name][request], rows)


@functools.cache
def continued(config, length, more, seed=0):
    """A prompt and ``more`` tokens that the model itself puts behind it, one by one."""
    ids = token_ids(config, length, seed)

    def play(session):
        held, chunk = ids, ids
        while len(held) < length + more:
            chunk = session.step([(0, len(held) - len(chunk), chunk)])[0][1]
            held = torch.cat([held, chunk])
        return held

    return plainly(config, play, [length + more])


def drafted(true, wrong_from):
    """True tokens but for those from ``wrong_from`` on."""
    ids = true.clone()
    ids[wrong_from:] += 1
    return ids
