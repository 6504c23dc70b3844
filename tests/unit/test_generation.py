"""What a run generated: turns, accepted drafts by position, tokens that differ and do not end the comparison."""

import json
from dataclasses import replace

import pytest

import optimized.linear
import spcheck.worker.weights
from fixtures.seams import edited
from reference.checkpoint import RandomWeights
from spcheck.case import Case
from spcheck.judge.generation import Generation, Speech, Turn
from spcheck.report.generation import generation_lines
from spcheck.report.json import to_json
from spcheck.report.text import to_text
from tests.conftest import compare_case

SMALL = {"tp": 2, "requests": ((5, 1),), "mtp_steps": 2, "generate": 3, "overrides": (("vocab_size", 2),)}


def case(**options):
    return Case(**{**SMALL, "backend": "loopback", **options})


def turn(drafts, accepted, sampled=(), drafted=(), **more):
    said = Speech(tuple(sampled), accepted, tuple(drafted))
    return Turn(
        **{"step": 1, "dp": 0, "request": 0, "position": 5, "reference": said, "candidate": said, **more}, drafts=drafts
    )


def test_accepted_drafts_by_position():
    turns = (turn((), None, [4]), turn((1, 2), 2, [1, 2, 3]), turn((1, 2), 0, [5, 2, 3]), turn((1,), 1, [1, 9]))
    generation = Generation(turns, 1)
    assert generation.accepted == [(2, 3), (1, 2)]
    assert generation.mean_accepted_length == 2.0  # three, one and two tokens of steps that verified
    assert generation.tokens == 1 + 3 + 1 + 2
    assert list(generation_lines(generation)) == [
        "generated    7 tokens of 1 request, 1 step after the first; both sides alike",
        "drafts       3 accepted of 5, by position 2/3, 1/2",
        "             mean accepted length 2.00, the model's own token counted",
    ]


def test_nothing_verified_has_no_mean_and_no_line():
    generation = Generation((turn((), None, [4]), turn((), None, [5])), 1)
    assert generation.mean_accepted_length is None
    assert len(list(generation_lines(generation))) == 1
    assert list(generation_lines(None)) == []


def test_a_turn_that_one_side_did_not_come_to_is_not_alike():
    here = turn((1,), 0, [2, 3])
    lines = list(generation_lines(Generation((here, replace(here, candidate=None)), 1)))
    assert lines[0].endswith("; 1 of 2 turns not reached by both")
    other = replace(here, candidate=Speech((3, 3), 0, ()))
    assert next(generation_lines(Generation((here, other), 2))).endswith("; 1 of 2 turns DIFFER")
    shorter = list(generation_lines(Generation((here, other), 2, ended=True)))[1]
    assert shorter.strip() == "2 steps were asked for, and no request has a position left"


def test_a_run_that_reaches_the_limit_says_so():
    comparison = compare_case(case(requests=((5, 5),), overrides=(("max_position_embeddings", 6),)))
    assert comparison.verdict.outcome == "EQUAL"
    assert (comparison.generation.asked, comparison.generation.ended) == (3, True)
    assert not compare_case(case(generate=1)).generation.ended


def test_turns_tell_what_a_run_did():
    """With seed 4 some drafts are accepted and some are not."""
    comparison = compare_case(case(seed=4))
    assert comparison.verdict.outcome == "EQUAL"
    g = comparison.generation
    assert [(t.step, t.request) for t in g.turns] == [(s, r) for s in range(4) for r in range(2)]
    for before, now in zip(g.turns, g.turns[2:], strict=False):
        assert now.drafts == before.reference.drafted
        assert now.position == before.position + len(before.reference.emitted)
        accepted = next((i for i, d in enumerate(now.drafts) if d != now.reference.sampled[i]), len(now.drafts))
        assert now.reference.accepted == accepted
    assert 0 < sum(a for a, _ in g.accepted) < sum(n for _, n in g.accepted) == 12
    document = json.loads(to_json(comparison))["generation"]
    assert document["tokens"] == g.tokens
    assert document["accepted_by_position"] == [{"accepted": a, "verified": n} for a, n in g.accepted]
    assert document["turns"][2]["reference"]["sampled"] == list(g.turns[2].reference.sampled)
    text = to_text(comparison, verbose=True)
    assert "by position " in text
    assert "tokens of each step (sampled behind a rejected draft) | accepted drafts | drafted then" in text


def test_a_token_that_differs_is_told_and_the_run_goes_on_with_the_references():
    """The candidate takes the worst token in one forward; what follows is compared on the reference's tokens."""
    wrong = edited(
        optimized.linear.GreedySampler,
        "forward",
        "return logits.argmax(dim=-1)",
        "return logits.argmin(-1) if logits.shape[0] == 6 else logits.argmax(-1)",  # the rows of steps that verify
    )
    healthy = compare_case(case())
    with wrong as calls:
        comparison = compare_case(case())
    assert calls.count
    wrongs = [r for r in comparison.results if r.over]
    assert {r.probe for r in wrongs} == {"sampler.out"}
    assert comparison.verdict.outcome == "DIVERGED"
    kinds = [f.kind for f in comparison.verdict.findings]
    assert kinds == ["choice", "token", "token"]
    assert all(f.message.endswith("the run goes on with the reference's") for f in comparison.verdict.findings)
    assert "by a margin of" in comparison.verdict.findings[1].message
    said, right = comparison.generation.turns, healthy.generation.turns
    assert [t.reference for t in said] == [t.reference for t in right]
    assert [t.step for t in said if not t.alike] == [1, 1, 2, 2, 3, 3]
    assert "DIFFER" in to_text(comparison)


class TwinTokens:
    """A head with every token twice, so that rounding alone decides which of the two is sampled."""

    def __init__(self, reader):
        self._reader = reader

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def tensor(self, name):
        value = self._reader.tensor(name)
        return value[:2].repeat(2, 1) if name == "lm_head.weight" else value


@pytest.mark.parametrize(("numerics", "outcome"), [("float32", "EQUIVALENT"), ("float64", "INCONCLUSIVE")])
def test_a_near_tie_is_told_and_is_no_divergence(numerics, outcome, monkeypatch):
    monkeypatch.setattr(
        spcheck.worker.weights, "_random_weights", lambda config, seed, _: TwinTokens(RandomWeights(config, seed))
    )
    noise = {"float32": "3e-7", "float64": "5e-16"}[numerics]
    product = "torch.mm(self.weight, hidden.t())"
    noisy = edited(optimized.linear.ParallelLMHead, "forward", product, f"{product} * (1 + self.tp.rank * {noise})")
    overrides = (("vocab_size", 4),)
    with noisy as calls:
        comparison = compare_case(case(numerics=numerics, overrides=overrides, mtp_steps=0))
    assert calls.count
    assert comparison.verdict.outcome == outcome, comparison.verdict.findings
    told = [f for f in comparison.verdict.findings if f.kind in ("token", "choice")]
    assert told
    assert all("the run goes on with the reference's" in f.message for f in told)
    assert any("by a margin of" in f.message for f in told)
