"""Decoding as a user runs it: mixed batches, generation on processes, many requests, long contexts, failures."""

import json
import subprocess
import sys

import pytest

import optimized.engine
from fixtures.seams import edited
from spcheck.case import Case
from spcheck.report.text import to_text
from tests.conftest import compare_case

MIXED = ["--tp", "2", "--requests", "1@40,5@0,3@12", "--mtp-steps", "2"]


def spcheck(*words):
    command = [sys.executable, "-m", "spcheck", "diff", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def equal(**options):
    comparison = compare_case(Case(**{"tp": 2, "backend": "loopback", **options}))
    assert comparison.verdict.outcome == "EQUAL", comparison.verdict.findings
    return comparison


def test_a_mixed_batch_in_the_order_it_was_asked_for(tmp_path):
    target = tmp_path / "result.json"
    done = spcheck(*MIXED, "--json", str(target))
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert "tokens 1@40,5,3@12" in lines[0]
    assert "--requests 1@40,5,3@12 " in next(line for line in lines if line.startswith("repeat"))
    result = json.loads(target.read_text())
    assert result["generation"] is None
    latent = {p["probe"]: p["rows"] for p in result["probes"] if p["phase"] == "cache"}
    assert latent["model.layers.0.self_attn.cache.latent"] == 41 + 5 + 15
    assert latent["model.layers.5.self_attn.cache.latent"] == 42 + 6 + 16


def test_generation_on_processes():
    done = spcheck(
        *("--tp", "2", "--requests", "1@9,5/-", "--mtp-steps", "2", "--generate", "2"),
        *("--set", "vocab_size=2", "--backend", "gloo", "-v"),
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert any(line.startswith("generated step 2  ") for line in lines)
    assert any(line.startswith("generated    ") and line.endswith("both sides alike") for line in lines)
    assert any(line.startswith("drafts  ") for line in lines)
    assert sum(line.startswith("step 2  d0 r") for line in lines) == 2


def test_the_same_tokens_in_one_piece_or_behind_cached_ones_sample_the_same():
    """As one prefill, as a chunk behind cached tokens, as one token that is decoded, and in three pieces."""
    runs = [
        equal(requests=((9 - held,),), cached=((held,),), mtp_steps=2, generate=generate, prefill_chunk=chunk)
        for held, generate, chunk in ((0, 1, None), (4, 1, None), (8, 1, None), (0, 3, 4))
    ]
    said = [[turn.reference for turn in run.generation.turns][:2] for run in runs]
    assert [(turns[0].sampled, turns[0].drafted, turns[1].emitted) for turns in said] == 4 * [
        (said[0][0].sampled, said[0][0].drafted, said[0][1].emitted)
    ]


def test_sixty_four_requests_of_mixed_length():
    new = tuple((1, 3, 1, 2)[i % 4] for i in range(32))
    held = tuple(i * 2 % 37 for i in range(32))
    comparison = equal(
        requests=(new, new[::-1]),
        cached=(held, held[::-1]),
        mtp_steps=2,
        graph_sizes=(32, 64),
        padding_content="nan",
        overrides=(("num_hidden_layers", 3),),
    )
    rows = {r.probe: r.rows for r in comparison.results if r.phase == "draft" and r.call == 3}
    assert rows["model.layers.3.hnorm.out"] == 64


@pytest.mark.parametrize("held", [200, 2047])
def test_a_long_context_of_which_256_keys_are_chosen(held):
    """With 200 keys all of them are, and nothing is scored."""
    options = {"index_topk": 256, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    comparison = equal(requests=((1, 2),), cached=((held, 4),), mtp_steps=1, overrides=tuple(options.items()))
    probes = {r.probe: r for r in comparison.results if r.phase == "target"}
    assert ("model.layers.0.self_attn.indexer.choose.in" in probes) == (held > 256)
    assert probes["model.layers.0.self_attn.indexer.choose.out"].rows == 3
    caches = {r.probe: r.rows for r in comparison.results if r.phase == "cache"}
    assert caches["model.layers.1.self_attn.cache.index_key"] == held + 1 + 6


def test_a_rank_that_fails_in_a_draft_step_is_told_with_the_step():
    broken = edited(
        optimized.engine.Engine,
        "_draft_next",
        "last = self.drafted.of(requests)",
        "last = self.drafted.of(requests)\n"
        "    assert max(last.positions) < 7 or self.setup.tp.rank == 0, 'broken here'",
    )
    with broken as calls:
        comparison = compare_case(
            Case(tp=2, requests=((5,),), mtp_steps=2, generate=2, backend="loopback", overrides=(("vocab_size", 1),))
        )
    assert calls.count
    assert comparison.verdict.outcome == "FAILED"
    assert (comparison.generation.steps, comparison.generation.ended) == (2, False)
    assert "turns not reached by both" in to_text(comparison)
    assert "AssertionError: broken here in optimized.subject, generated step 1's draft step 1" in (
        comparison.verdict.findings[0].message
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--requests", "1@4096"], "1 new and 4096 cached tokens are more than max_position_embeddings 4096"),
        (["--requests", "0@40"], "a request of 40 cached tokens needs at least 1 new token, not 0 (0@40)"),
        (["--requests", "3@-2"], "a request cannot hold -2 cached tokens (--requests 3@-2)"),
        (["--requests", "3@"], "'3@' is no list of new@cached tokens such as 5,1@40,3@12"),
        (["--requests", "3@4@5"], "'3@4@5' is no list of new@cached tokens"),
        (["--tokens", "3", "--previous", "1@3"], "'1@3' is no list of whole numbers"),
        (["--tokens", "3", "--generate", "-1"], "--generate must be 0 or more, not -1"),
        (
            ["--tokens", "3", "--set", "num_nextn_predict_layers=0", "--mtp-steps", "1"],
            "--mtp-steps 1 needs an MTP layer",
        ),
    ],
)
def test_one_sentence_and_exit_2(words, sentence):
    done = spcheck("--tp", "2", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
