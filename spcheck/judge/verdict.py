"""From merged results and contracts to findings, the first divergence and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spcheck.judge.contracts.accounting import SideAccount, account
from spcheck.judge.contracts.check import Checked, check_collectives, check_rows
from spcheck.judge.contracts.exactness import Exactness, check_exactness
from spcheck.judge.contracts.loading import check_parameters
from spcheck.judge.contracts.memory import check_memory
from spcheck.judge.contracts.sameness import Degenerate, degenerate_probes
from spcheck.judge.contracts.work import check_work
from spcheck.judge.exercised import NotExercised, not_exercised
from spcheck.judge.failure import Failure, divergence_sentence, explain
from spcheck.judge.findings import (
    at_place,
    breach_findings,
    degenerate_findings,
    exactness_findings,
    pairing_findings,
    scheme_findings,
    token_findings,
    value_findings,
)
from spcheck.judge.generation import Generation, generation_of
from spcheck.judge.merge import ProbeResult, RankReport, merge_probes
from spcheck.judge.outcome import Finding, Verdict, outcome_of
from spcheck.judge.rounding import is_definite
from spcheck.plan.plan import Plan

_CAUSES = ("scheme", "parameters", "memory", "unpaired", "rows")
"""Kinds of findings that explain wrong values, in the order in which they are told."""


@dataclass(frozen=True)
class Comparison:
    """Everything a finished or broken run gave: numbers, contracts, and the verdict on them."""

    plan: Plan
    results: list[ProbeResult]
    rows: Checked
    collectives: Checked
    work: Checked
    memory: Checked
    parameters: Checked
    exactness: Exactness | None
    verdict: Verdict
    accounting: dict[str, SideAccount]
    environment: dict[str, Any]
    generation: Generation | None = None
    failure: Failure | None = None
    degenerate: tuple[Degenerate, ...] = ()
    not_exercised: NotExercised | None = None

    @property
    def compared(self) -> int:
        """Probe and call pairs with at least one real row compared."""
        return len(_compared(self.results))

    @property
    def wants_coarser_grid(self) -> bool:
        """Whether the grid that was chosen for the model's size left too few bits, and the coarser one may do."""
        e, grid = self.exactness, self.plan.grid
        return e is not None and grid is not None and grid.name == "A" and self.plan.case.grid == "auto" and e.overfull

    @property
    def bitwise_equal(self) -> int:
        """Those of them that are equal in every element."""
        return _equal(self.results)


def conclude(plan: Plan, reports: Sequence[RankReport], environment: dict[str, Any], failure: str | None) -> Comparison:
    """Judges a run. ``failure`` is the sentence of a run that did not come to its end."""
    plan = _as_it_went(plan, reports)
    results = _in_order(plan, merge_probes(reports))
    rows = check_rows(plan, reports)
    collectives = check_collectives(plan, reports)
    other_choices = {(r.probe, r.call) for r in results if r.kind == "set" and r.over}
    work = check_work(plan, reports, other_choices) if failure is None else Checked(0, ())
    parameters = check_parameters(plan, reports)
    memory = check_memory(plan, reports)
    exactness = check_exactness(plan, reports)
    first = _first_over(plan, results)
    broken = explain(reports, plan.case.tp) if failure else None
    findings = [Finding("failed", "FAILED", failure)] if failure else []
    if broken and broken.divergence:
        findings.append(Finding("divergence", "FAILED", divergence_sentence(broken.divergence)))
    findings += breach_findings(parameters)  # before what may follow from them
    unpaired = pairing_findings(plan, results, reports) if failure is None else []
    causes = [f for f in (*unpaired, *breach_findings(rows)) if _explains(results, first, f)]
    findings += value_findings(plan, results, first, exactness, hinted=not causes)
    findings += token_findings(plan, results, first, exactness)
    degenerate = degenerate_probes(plan, reports) if failure is None else ()
    findings += degenerate_findings(degenerate)
    findings += exactness_findings(plan, results, exactness)
    findings += unpaired
    findings += [finding for checked in (rows, collectives, work, memory) for finding in breach_findings(checked)]
    findings += scheme_findings(plan, reports)
    findings = _causes_first(results, first, findings)
    verdict = Verdict(
        outcome=outcome_of(len(_compared(results)), _equal(results), findings),
        scheme=plan.scheme,
        reason=plan.reason,
        findings=tuple(findings),
        first_divergence=_first_divergence(results, first, findings),
    )
    spoken = generation_of(plan, reports)
    contracts = (rows, collectives, work, memory, parameters)
    return Comparison(
        plan,
        results,
        *contracts,
        exactness,
        verdict,
        accounting=account(plan, reports),
        environment=environment,
        generation=spoken,
        failure=broken,
        degenerate=degenerate,
        not_exercised=not_exercised(plan, reports, spoken) if failure is None else None,
    )


def _as_it_went(plan: Plan, reports: Sequence[RankReport]) -> Plan:
    """The plan with the drafts that the reference accepted, as far as a rank came."""
    histories = [report.get("accepted", ()) for report in reports]
    accepted = max(histories, key=len, default=())
    return replace(plan, accepted=tuple(tuple(map(tuple, step)) for step in accepted))


def _in_order(plan: Plan, results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """By the forward they belong to: no rank need have seen all of them, since an idle one compares nothing."""
    forwards = {(phase.kind, phase.call): number for number, phase in enumerate(plan.phases[0])}
    return sorted(results, key=lambda r: forwards.get((r.phase, r.call), len(forwards)))


def _compared(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    return [r for r in results if r.rows]


def _equal(results: Sequence[ProbeResult]) -> int:
    return sum(r.bitwise_equal for r in _compared(results))


def _first_over(plan: Plan, results: Sequence[ProbeResult]) -> ProbeResult | None:
    """The first probe in execution order whose value is wrong: all that ran before it agreed.

    A value over its bound may still be rounding; what is no rounding is named before it.
    """
    over = [r for r in results if r.over]
    definite = [r for r in over if is_definite(plan, r)]
    return next(iter(definite or over), None)


def _first_divergence(
    results: Sequence[ProbeResult], first: ProbeResult | None, findings: Sequence[Finding]
) -> dict[str, Any] | None:
    """The earliest probe with a wrong value or a wrong row count, in execution order."""
    order = {(r.probe, r.call): i for i, r in reversed(list(enumerate(results)))}
    places = [at_place(first, first.first or first.replica)] if first else []
    places += [
        f.at
        for f in findings
        if f.kind in ("rows", "work", "unpaired", "collectives") and f.outcome == "DIVERGED" and f.at
    ]
    return min(places, key=lambda at: order.get((at["probe"], at["call"]), len(order)), default=None)


def _causes_first(results: Sequence[ProbeResult], first: ProbeResult | None, findings: list[Finding]) -> list[Finding]:
    """Another dataflow, other weights, missing forwards and too many rows look like wrong values: they come first."""
    if first is None:
        return findings
    found = [f for f in findings if f.kind in _CAUSES[:3] or _explains(results, first, f)]
    causes = sorted(found, key=lambda f: _CAUSES.index(f.kind))
    others = [f for f in findings if f not in causes]
    place = next((i for i, f in enumerate(others) if f.kind in ("value", "choice")), 0)
    return [*others[:place], *causes, *others[place:]]


def _explains(results: Sequence[ProbeResult], first: ProbeResult | None, finding: Finding) -> bool:
    """Whether a side had other rows, or left out a forward, before the first value that is wrong."""
    if first is None or finding.at is None or finding.kind not in ("rows", "unpaired"):
        return False
    order = {(r.probe, r.call): i for i, r in reversed(list(enumerate(results)))}
    until = order[first.probe, first.call]
    return order.get((finding.at["probe"], finding.at["call"]), until + 1) <= until
