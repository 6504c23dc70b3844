"""A reference that is zero, or the same whatever the token, proves nothing: INCONCLUSIVE, and the probe is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import optimized.sp
from optimized.experts import FusedExperts
from spcheck.case import NUMERICS, Case
from spcheck.report.json import to_json
from spcheck.report.text import to_text
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden" / "deepseek_v32"


def folder_with(tmp_path, change):
    """The golden checkpoint, each tensor as ``change(name, tensor)`` makes it."""
    folder = tmp_path / "changed"
    folder.mkdir()
    shutil.copy(GOLDEN / "config.json", folder)
    tensors = load_file(GOLDEN / "model.safetensors")
    save_file({name: change(name, x).contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def zeroed(end):
    return lambda name, x: torch.zeros_like(x) if end in name else x


def compared(**options):
    return compare_case(Case(**{"requests": ((17,),), "tp": 2, "backend": "loopback", **options}))


def degenerate(comparison):
    return [finding for finding in comparison.verdict.findings if finding.kind == "degenerate"]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("end", "probes"),
    [
        ("down_proj", ["model.layers.0.mlp.out", "model.layers.1.mlp.experts.out", "model.layers.2.mlp.out"]),
        ("o_proj", ["model.layers.0.self_attn.out", "model.layers.1.self_attn.out", "model.layers.2.self_attn.out"]),
        ("lm_head", ["lm_head.out", "sampler.in"]),
        ("", ["model.embed_tokens.out", "model.layers.0.mlp.act_fn.out", "model.norm.out", "lm_head.out"]),
    ],
)
def test_zeros_are_no_pass(tmp_path, end, probes, numerics):
    comparison = compared(model=folder_with(tmp_path, zeroed(end)), numerics=numerics)
    assert comparison.verdict.outcome == "INCONCLUSIVE"
    (finding,) = degenerate(comparison)
    named = [probe["probe"] for probe in json.loads(to_json(comparison))["degenerate"]]
    assert set(probes) <= set(named)
    rows = "all 17 rows" if named[0] != "sampler.in" else "the only row"
    assert finding.message.startswith(f"{named[0]}: {rows} of the reference")
    assert "zero: nothing was compared there" in finding.message
    assert finding.message in to_text(comparison)


def test_only_what_is_zero_is_named(tmp_path):
    comparison = compared(model=folder_with(tmp_path, zeroed("lm_head")))
    assert [probe.probe for probe in comparison.degenerate] == ["lm_head.out", "sampler.in"]


@pytest.mark.parametrize("numerics", NUMERICS)
def test_tokens_that_make_no_difference_are_no_pass(tmp_path, numerics):
    """Every token has the embedding of the first one."""

    def same(name, x):
        return x[:1].expand_as(x) if "embed_tokens" in name else x

    comparison = compared(model=folder_with(tmp_path, same), numerics=numerics)
    assert comparison.verdict.outcome == "INCONCLUSIVE"
    (finding,) = degenerate(comparison)
    first = "model.embed_tokens.out: all 17 rows of the reference are alike although their tokens differ"
    assert finding.message.startswith(first)
    assert {"zero"} != {probe.state for probe in comparison.degenerate} == {"alike"}


def test_one_row_is_zero_as_well(tmp_path):
    comparison = compared(model=folder_with(tmp_path, zeroed("lm_head")), requests=((1,),), mtp_steps=0)
    assert comparison.verdict.outcome == "INCONCLUSIVE"
    assert "lm_head.out: the only row of the reference is zero" in degenerate(comparison)[0].message


def test_a_row_of_another_rank_is_enough(tmp_path):
    """Both data-parallel ranks have one row: no rank by itself sees two."""

    def halves(name, x):
        return x[:1].expand_as(x) if "embed_tokens" in name else x

    found = compared(model=folder_with(tmp_path, halves), requests=((1,), (1,)), tp=1, mtp_steps=0)
    assert found.degenerate[0].probe == "model.embed_tokens.out"
    assert found.degenerate[0].rows == 2
    assert not compared(requests=((1,), (1,)), tp=1, mtp_steps=0).degenerate


def test_an_attention_output_that_is_summed_twice_does_not_pass(tmp_path, monkeypatch):
    plain = optimized.sp.SequenceParallel.sp_reduce_scatter
    monkeypatch.setattr(optimized.sp.SequenceParallel, "sp_reduce_scatter", lambda *args: 2 * plain(*args))
    assert compared(model=str(GOLDEN)).verdict.outcome == "DIVERGED"
    comparison = compared(model=folder_with(tmp_path, zeroed("o_proj")))
    assert comparison.verdict.outcome != "EQUAL"
    assert degenerate(comparison)


def test_a_difference_is_worse(tmp_path, monkeypatch):
    plain = optimized.sp.SequenceParallel.sp_all_gather
    monkeypatch.setattr(optimized.sp.SequenceParallel, "sp_all_gather", lambda *args: 2 * plain(*args))
    comparison = compared(model=folder_with(tmp_path, zeroed("lm_head")))
    assert comparison.verdict.outcome == "DIVERGED"
    assert degenerate(comparison)


LEGITIMATE = {
    "one row": {"requests": ((1,),)},
    "rows of one key": {"requests": ((1, 1, 1),), "mtp_steps": 0},
    "one key of many": {"overrides": (("index_topk", 1),)},
    "one expert for each token": {"overrides": (("num_experts_per_tok", 1),)},
    "a vocabulary of one": {"overrides": (("vocab_size", 1),), "generate": 2},
    "a vocabulary of two": {"overrides": (("vocab_size", 2),), "requests": ((1, 1, 2),), "generate": 1},
    "few index heads": {"overrides": (("index_n_heads", 1),), "requests": ((1, 2),)},
    "no first embedding": {"overrides": (("mtp_zero_first_embedding", True),), "requests": ((1, 1),)},
    "several MTP layers": {"overrides": (("num_nextn_predict_layers", 3),), "mtp_steps": 3, "requests": ((4, 4),)},
    "decoding": {"requests": ((1, 1),), "cached": ((9, 9),), "mtp_steps": 2, "generate": 1},
    "adapters": {"requests": ((3, 3),), "lora_rank": 2, "lora_adapters": 1, "scheme": "tp"},
    "the step before": {"previous": ((5,),), "padding_content": "stale", "graph_sizes": (32,)},
}
POOL = EnginePool()


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", LEGITIMATE)
def test_rows_that_may_be_alike_are_no_finding(name, numerics):
    case = Case(**{"requests": ((17,),), "tp": 2, "backend": "loopback", "numerics": numerics, **LEGITIMATE[name]})
    assert not degenerate(compare_case(case, POOL))


def test_an_expert_that_gets_no_row_hides_a_fault_and_is_named(monkeypatch):
    """Those that are named compute twice too much, and nothing differs."""
    healthy = compared(model=str(GOLDEN), requests=((3,),))
    slots = json.loads(to_json(healthy))["not_exercised"]["expert_slots"]
    assert 0 < slots["count"] == len(slots["names"]) < slots["of"] == 16
    assert f"not exercised {slots['count']} of 16 expert slots without a row" in to_text(healthy)
    plain_init, plain_forward = FusedExperts.__init__, FusedExperts.forward

    def init(self, loader, experts, channels):
        plain_init(self, loader, experts, channels)
        self.layer = loader.prefix.removesuffix(".")

    def doubled(scaled):
        """Not their weights, which are compared by themselves, but what these experts make of them."""

        def forward(self, hidden, ids, weights):
            factors = torch.tensor([2.0 if f"{self.layer}.{e}" in scaled else 1.0 for e in range(8)] + [1.0])
            return plain_forward(self, hidden, ids, weights * factors.to(weights.dtype)[ids])

        return forward

    unused = set(slots["names"])
    monkeypatch.setattr(FusedExperts, "__init__", init)
    monkeypatch.setattr(FusedExperts, "forward", doubled(unused))
    assert compared(model=str(GOLDEN), requests=((3,),)).verdict.outcome == "EQUAL"
    used = {f"model.layers.1.mlp.experts.{e}" for e in range(8)} - unused
    monkeypatch.setattr(FusedExperts, "forward", doubled(used))
    assert compared(model=str(GOLDEN), requests=((3,),)).verdict.outcome == "DIVERGED"


def test_a_run_that_broke_off_says_nothing_of_it(monkeypatch):
    def broken(*_):
        raise ValueError("as planned")

    monkeypatch.setattr(optimized.sp.SequenceParallel, "sp_shard", broken)
    comparison = compared()
    assert comparison.verdict.outcome == "FAILED"
    assert comparison.not_exercised is None
    assert comparison.degenerate == ()
    assert "not exercised" not in to_text(comparison)
    assert json.loads(to_json(comparison))["not_exercised"] is None
