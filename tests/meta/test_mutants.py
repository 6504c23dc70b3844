"""Every known bug, through the real pipeline: it must die in its case, at the right probe, and only there."""

from functools import lru_cache

import pytest

from fixtures.mutants import MUTANTS, Mutant
from spcheck.case import Case
from spcheck.launch.threads import ThreadHost
from spcheck.plan.plan import make_plan
from spcheck.run import judged


def run(options):
    plan = make_plan(Case(**{"backend": "loopback", **options}))
    log = ThreadHost().run(plan)
    return log.reports, judged(plan, log)


@lru_cache(maxsize=32)
def healthy_run(options):
    """What the case gives without a bug; it must be sound."""
    reports, comparison = run(dict(options))
    passing = ("EQUAL", "EQUIVALENT") if dict(options).get("numerics") == "float64" else ("EQUAL",)
    assert comparison.verdict.outcome in passing, comparison.verdict.findings
    return reports


def seen(reports):
    """What a run computed and did, without what differs from run to run anyway."""
    return [{k: v for k, v in report.items() if k != "failed_at"} for report in reports]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_it_is_noticed(mutant: Mutant):
    healthy = healthy_run(tuple(mutant.kills.items()))
    with mutant.seam() as calls:
        reports, comparison = run(mutant.kills)
    assert calls.count, "the mutated code never ran"
    assert seen(reports) != seen(healthy), "the mutant changed nothing"

    found = comparison.verdict
    assert found.outcome == mutant.outcome, found.findings
    kinds = {f.kind for f in found.findings}
    assert mutant.kinds == kinds if mutant.only else mutant.kinds <= kinds, found.findings
    first = found.first_divergence
    assert (first and first["probe"]) == mutant.probe
    if first is not None:
        assert first["call"] == mutant.call
    assert any(mutant.hint in f.message for f in found.findings) or not mutant.hint, found.findings


@pytest.mark.parametrize(
    ("mutant", "options"),
    [(m, options) for m in MUTANTS for options in m.survives],
    ids=lambda value: value.name if isinstance(value, Mutant) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_it_is_silent_where_it_changes_nothing(mutant: Mutant, options):
    with mutant.seam() as calls:
        _, comparison = run(options)
    assert calls.count, "the mutated code never ran"
    assert comparison.verdict.outcome == "EQUAL", comparison.verdict.findings
