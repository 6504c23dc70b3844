"""Every known bug of loading is told as the first cause, in every numerics, on the side that has it."""

import pytest

from fixtures.loading_mutants import LOADING_MUTANTS, LoadingMutant
from spcheck.case import Case
from tests.conftest import compare_case


@pytest.mark.parametrize(
    ("mutant", "numerics"),
    [pytest.param(m, n, id=f"{m.name}-{n}") for m in LOADING_MUTANTS for n in m.numerics],
)
def test_it_is_the_first_cause(mutant: LoadingMutant, numerics):
    with mutant.seam() as calls:
        comparison = compare_case(Case(**{**mutant.options, "numerics": numerics}))
    assert calls.count, "the mutated code never ran"
    verdict = comparison.verdict
    causes = [f for f in verdict.findings if f.kind not in ("reference", "failed", "divergence")]
    side = "reference: " if mutant.name.startswith("reference-") else ""
    assert verdict.outcome == "DIVERGED", verdict.findings
    assert causes[0].kind == "parameters", verdict.findings
    assert causes[0].outcome == "DIVERGED"
    assert causes[0].message.startswith(f"{side}{mutant.parameter} differs from the checkpoint on rank "), causes[0]
    assert mutant.says in causes[0].message, causes[0]
