"""Hints of whole runs: one change of the optimized model each, and what the first finding says of it."""

import pytest

import optimized.attention
import optimized.dataflows.full_sp
import optimized.decoder
import optimized.engine
import optimized.moe
import optimized.norms
import optimized.router
import optimized.sp
from fixtures.seams import edited
from spcheck.case import Case
from tests.conftest import compare_case

DEFAULT = {"tp": 2, "requests": ((17,),)}
ADAPTED = {"tp": 2, "requests": ((5, 1, 11),), "lora_rank": 4, "lora_adapters": 2}


def without_shared(owner=optimized.moe.MoE):
    return edited(owner, "forward", "routed + self.shared_experts(x)", "routed + 0 * self.shared_experts(x)")


CHANGES = {
    "two shards exchanged": (
        lambda: edited(
            optimized.sp.SequenceParallel,
            "sp_all_gather",
            "self.group.all_gather(x)",
            "self.group.all_gather(x).unflatten(0, (self.group.size, -1)).flip(0).flatten(0, 1)",
        ),
        {"tp": 2, "requests": ((18,),)},
        "hold",
    ),
    "no shared expert": (without_shared, DEFAULT, "model.layers.2.mlp.shared_experts.out is missing in it?"),
    "a factor of 1.02": (
        lambda: edited(optimized.router.Weigh, "forward", "chosen * self.gamma", "chosen * (self.gamma * 1.02)"),
        DEFAULT,
        "1.02 x the reference: scaled?",
    ),
    "an embedding that is zero": (
        lambda: edited(optimized.decoder.MtpParts, "embedded", "if self.zero_first_embedding", "if True"),
        DEFAULT,
        "only rows at position 0",
    ),
    "a residual in float32": (
        lambda: edited(
            optimized.norms.ResidualRMSNorm,
            "forward",
            "self.normalise(total), total",
            "self.normalise(total), total.float().to(total.dtype)",
        ),
        DEFAULT,
        "all its values are float32 numbers: a cast?",
    ),
    "a draft that starts with another request's row": (
        lambda: edited(
            optimized.engine.Engine,
            "_draft_next",
            "last.tokens, last.hidden",
            "last.tokens.flip(0), last.hidden.flip(0)",
        ),
        {"tp": 2, "requests": ((5, 9, 4),), "mtp_steps": 2},
        "holds the value of",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_cause_is_named(name):
    seam, options, hint = CHANGES[name]
    with seam():
        comparison = compare_case(Case(backend="loopback", **options))
    findings = [f.message for f in comparison.verdict.findings]
    assert comparison.verdict.outcome == "DIVERGED"
    assert any(hint in message for message in findings), findings
