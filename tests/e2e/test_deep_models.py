"""Models of more layers than the preset in float32: rounding adds up with depth, and a fault is still one."""

import pytest

from fixtures.mutants import MUTANTS
from spcheck.case import Case
from tests.conftest import compare_case


def verdict_of(layers, **options):
    overrides = (("num_hidden_layers", layers),)
    case = Case(requests=((17,),), tp=2, overrides=overrides, numerics="float32", backend="loopback", **options)
    return compare_case(case).verdict


@pytest.mark.parametrize(("layers", "seed"), [(16, 2), (61, 0)])
def test_a_healthy_deep_model_is_not_diverged(layers, seed):
    """How its sums round is the processor's matter, so a machine may find all of it within the bound."""
    verdict = verdict_of(layers, seed=seed)
    assert verdict.outcome in ("INCONCLUSIVE", "EQUIVALENT"), verdict.findings
    for finding in verdict.findings:
        assert f"a rounding difference may explain it in {layers + 1} layers" in finding.message  # one drafts


@pytest.mark.parametrize(
    ("name", "probe"),
    [
        ("moe-output-reduced-twice", "model.layers.2.mlp.out"),
        ("shared-expert-added-before-the-combine", "model.layers.2.mlp.out"),
        ("dropped-expert-groups-masked-with-zero", "model.layers.2.mlp.gate.choose.in"),
        ("one-rank-holds-another-replica", "model.layers.0.mlp.out"),
    ],
)
def test_a_fault_in_a_deep_model_is_diverged_and_named(name, probe):
    mutant = next(m for m in MUTANTS if m.name == name)
    with mutant.seam() as calls:
        verdict = verdict_of(16, seed=2)
    assert calls.count
    assert verdict.outcome == "DIVERGED", verdict.findings
    assert verdict.first_divergence["probe"] == probe
