"""The reference's caches, drafts and verification against transformers with caches of its own."""

from itertools import pairwise

import pytest
import torch
from generation import greedy, speculative
from hf_model import HfOracle
from recording import on_ranks, record, record_run
from sizes import raw_config
from torch import Tensor

from reference.checkpoint import RandomWeights
from reference.config import parse_config
from reference.engine import Chunk

BOUND = 1e-12  # relative to a row's largest element
MARGIN = 1e-6  # of the best token over the second, relative to a row's largest logit
BATCH, LENGTH, DRAFTS, NEW = 2, 19, 4, 24
CUTS = {"one-by-one": tuple(range(12, LENGTH)), "mixed": (4, 5, 9, 10, 16), "from-one-row": (1, 2, 3, 9)}
RUNS = [("one-by-one", 1), ("one-by-one", 2), ("mixed", 2), ("from-one-row", 1)]
GENERATED = {
    "v32-of-4-tokens": ("deepseek_v32", 24, 4, {0, 1, 2, 3}),
    "v32-of-61-tokens": ("deepseek_v32", 11, 61, {0, 1}),
    "v3-of-4-tokens": ("deepseek_v3", 27, 4, {0, 1, 2, 3}),
}
"""Model type, seed, vocabulary, and how many drafts of 3 are accepted at a time: few tokens are guessed more often."""


class Pair:
    """A config, weights, and transformers' model of them."""

    def __init__(self, model_type: str, seed: int = 11, **changes) -> None:
        raw = raw_config(model_type, **changes)
        self.config = parse_config(raw)
        self.reader = RandomWeights(self.config, seed)
        self.oracle = HfOracle(raw, self.reader)
        self.mtp = f"model.layers.{self.config.num_hidden_layers}"

    def ids(self, length: int) -> Tensor:
        return random_ids(self.config.vocab_size, length)


def random_ids(vocabulary: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (BATCH, length), generator=torch.Generator().manual_seed(12))


@pytest.fixture(scope="module", params=["deepseek_v32", "deepseek_v3"])
def pair(request):
    return Pair(request.param)


def row_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of a row, relative to the row's largest; infinite if the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    errors = (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1)
    return float(errors.nan_to_num(float("inf")).max())


def smallest_margin(logits: Tensor) -> float:
    best = logits.sort(dim=-1, descending=True).values
    return float(((best[..., 0] - best[..., 1]) / logits.abs().amax(dim=-1)).min())


def chunks_of(cuts) -> list[tuple[int, int]]:
    return list(pairwise((0, *cuts, LENGTH)))


@pytest.mark.parametrize(("cuts", "tp"), RUNS)
def test_every_step_of_a_decode(pair, cuts, tp, record_property):
    """Logits, residual streams, and the hidden states after the final norm."""
    ids, N = pair.ids(LENGTH), pair.config.num_hidden_layers
    ours = record(pair.config, pair.reader, ids, tp=tp, cuts=CUTS[cuts])
    probes = [f"model.aux.{i}" for i in range(N)] + ["model.out", "lm_head.out"]
    cache, found = pair.oracle.new_cache(), {}
    for number, (first, last) in enumerate(chunks_of(CUTS[cuts])):
        logits, streams = pair.oracle.forward(ids[:, first:last], cache)
        for probe, theirs in zip(probes, [*streams, logits], strict=True):
            found[f"step {number} {probe}"] = row_error(ours.forward(probe, BATCH, number), theirs)
    assert cache.get_seq_length() == LENGTH
    record_property("largest_relative_error", max(found.values()))
    assert {name: error for name, error in found.items() if error > BOUND} == {}


def test_the_choice_among_cached_keys_matters():
    """The same decode with all keys kept is another one, so the test above sees which were chosen."""
    few, all_keys = parse_config(raw_config()), parse_config(raw_config(index_topk=LENGTH))
    reader, ids = RandomWeights(few, 11), random_ids(few.vocab_size, LENGTH)
    decodes = [record(config, reader, ids, cuts=CUTS["one-by-one"]) for config in (few, all_keys)]
    last = len(CUTS["one-by-one"])
    assert row_error(*(ours.forward("lm_head.out", BATCH, last) for ours in decodes)) > 1e-3


@pytest.mark.parametrize(("cuts", "tp"), RUNS)
def test_drafts_on_caches(pair, cuts, tp, record_property):
    """A draft behind every chunk, the tokens of which are then not taken: hidden states, logits, tokens."""
    ids, chunks = pair.ids(LENGTH), chunks_of(CUTS[cuts])

    def behind(b: int, last: int) -> int | None:
        return int(ids[b, last]) if last < LENGTH else None

    def drive(engine) -> None:
        engine.start([LENGTH + DRAFTS] * BATCH)
        for first, last in chunks:
            engine.step([Chunk(b, first, ids[b, first:last], following=behind(b, last)) for b in range(BATCH)])
            for step in range(DRAFTS):
                engine.draft(range(BATCH), step)

    ours = record_run(pair.config, pair.reader, drive, tp=tp)
    cache, found = pair.oracle.new_cache(), {}
    for number, (first, last) in enumerate(chunks):
        logits, streams = pair.oracle.forward(ids[:, first:last], cache)
        token = ids[:, last:][:, :1] if last < LENGTH else logits[:, -1:].argmax(dim=-1)
        rows = torch.cat((ids[:, first + 1 : last], token), dim=1)
        theirs = pair.oracle.draft_cached(streams[-1], rows, cache, DRAFTS)
        drafts = range(number * DRAFTS, (number + 1) * DRAFTS)
        for name, probe in {"normed": "out", "logits": "shared_head.head.out"}.items():
            whole = torch.cat([ours.forward(f"{pair.mtp}.{probe}", BATCH, i) for i in drafts], dim=1)
            found[f"draft {number} {name}"] = row_error(whole, theirs[name])
        tokens = torch.cat([ours.forward(f"{pair.mtp}.shared_head.sampler.out", BATCH, i) for i in drafts], dim=1)
        assert smallest_margin(theirs["logits"][:, -DRAFTS:]) > MARGIN
        assert torch.equal(tokens, theirs["tokens"])
    record_property("largest_relative_error", max(found.values()))
    assert {name: error for name, error in found.items() if error > BOUND} == {}


def test_a_draft_needs_no_cache(pair):
    """transformers' own draft on caches is the one that runs all rows in every step."""
    ids, cache = pair.ids(LENGTH), pair.oracle.new_cache()
    for first, last in chunks_of(CUTS["mixed"])[:-1]:
        _, streams = pair.oracle.forward(ids[:, first:last], cache)
        pair.oracle.forward_mtp(streams[-1], ids[:, first + 1 : last + 1], cache)
    logits, streams = pair.oracle.forward(ids[:, last:], cache)
    rows = torch.cat((ids[:, last + 1 :], logits[:, -1:].argmax(dim=-1)), dim=1)
    cached = pair.oracle.draft_cached(streams[-1], rows, cache, DRAFTS)
    logits, streams = pair.oracle.forward(ids)
    tokens, draft_logits = pair.oracle.draft(streams[-1], ids, logits, DRAFTS)
    assert torch.equal(cached["tokens"], tokens[:, 1:])
    assert row_error(cached["logits"][:, -DRAFTS:], draft_logits) <= BOUND


@pytest.fixture(scope="module", params=GENERATED)
def generated(request):
    """A pair, prompts, what transformers generates of them, and how many drafts of 3 are accepted at a time."""
    model_type, seed, vocabulary, seen = GENERATED[request.param]
    pair = Pair(model_type, seed, vocab_size=vocabulary)
    prompts = pair.ids(9)
    tokens, logits = pair.oracle.generate(prompts, NEW)
    assert smallest_margin(logits) > MARGIN
    assert tokens.shape == (BATCH, NEW)
    return pair, prompts, tokens, seen


@pytest.mark.parametrize("tp", [1, 2])
def test_generation(generated, tp):
    pair, prompts, expected, _ = generated
    for tokens in on_ranks(pair.config, pair.reader, lambda engine: greedy(engine, prompts, NEW), tp=tp):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("tp", [1, 2])
def test_generation_with_drafts(generated, tp):
    """The tokens are those of the model alone, whether all, some or none of a draft are accepted."""
    pair, prompts, expected, seen = generated
    for tokens, verified in on_ranks(pair.config, pair.reader, lambda e: speculative(e, prompts, NEW, 3), tp=tp):
        assert torch.equal(tokens, expected)
        assert {each.accepted for each in verified if len(each.drafts) == 3} == seen
        assert {len(each.drafts) for each in verified} > {0, 3}  # near the end fewer, by one request before the other


def test_drafts_behind_a_verification(generated):
    """Each is the draft of transformers, without caches, of the prompt and the tokens so far."""
    pair, prompts, expected, _ = generated
    [(_, verified)] = on_ranks(pair.config, pair.reader, lambda e: speculative(e, prompts, NEW, 3))
    ids = torch.cat((prompts, expected), dim=1)[:1]
    logits, streams = pair.oracle.forward(ids)
    for each in (each for each in verified if each.request == 0 and len(each.drafts) == 3):
        known = prompts.shape[1] + each.emitted - 1
        tokens, draft_logits = pair.oracle.draft(streams[-1][:, :known], ids[:, :known], logits[:, :known], 3)
        assert smallest_margin(draft_logits) > MARGIN
        assert torch.equal(torch.cat((expected[0, each.emitted - 1 : each.emitted], each.drafts)), tokens[0])
