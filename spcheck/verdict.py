"""From merged results and contracts to findings, the first divergence and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spcheck.contracts.accounting import SideAccount, account
from spcheck.contracts.check import Breach, Checked, check_collectives, check_rows
from spcheck.contracts.exactness import Exactness, check_exactness
from spcheck.contracts.memory import check_memory
from spcheck.contracts.rows import must_fire
from spcheck.contracts.work import check_work
from spcheck.exact import STEP_BOUND
from spcheck.failure import Failure, divergence_sentence, explain
from spcheck.generation import Generation, generation_of
from spcheck.judge import BOUNDS, Finding, Verdict, outcome_of
from spcheck.merge import ProbeResult, RankReport, merge_probes
from spcheck.plan import Plan
from spcheck.schemes import SidePlan
from spcheck.sentences import CHOICES, STEERING, label, near_tie, place, sentence

_GOES_ON = "; the run goes on with the reference's"
_MANY = 4  # rows: one or two may be wrong by half in bfloat16, most of many are not


@dataclass(frozen=True)
class Comparison:
    """Everything a finished or broken run gave: numbers, contracts, and the verdict on them."""

    plan: Plan
    results: list[ProbeResult]
    rows: Checked
    collectives: Checked
    work: Checked
    memory: Checked
    exactness: Exactness | None
    verdict: Verdict
    accounting: dict[str, SideAccount]
    environment: dict[str, Any]
    generation: Generation | None = None
    failure: Failure | None = None

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
    results = merge_probes(reports)
    rows = check_rows(plan, reports)
    collectives = check_collectives(plan, reports)
    other_choices = {(r.probe, r.call) for r in results if r.kind == "set" and r.over}
    work = check_work(plan, reports, other_choices) if failure is None else Checked(0, ())
    contracts = (rows, collectives, work, check_memory(plan, reports))
    exactness = check_exactness(plan, reports)
    first = _first_over(plan.case.numerics, results)
    broken = explain(reports, plan.case.tp) if failure else None
    findings = [Finding("failed", "FAILED", failure)] if failure else []
    if broken and broken.divergence:
        findings.append(Finding("divergence", "FAILED", divergence_sentence(broken.divergence)))
    findings += _value_findings(plan, results, first, exactness)
    findings += _token_findings(plan, results, first, exactness)
    findings += _exactness_findings(plan, results, exactness)
    findings += _pairing_findings(plan, results, reports) if failure is None else []
    findings += [finding for checked in contracts for finding in _breach_findings(checked)]
    findings += _scheme_findings(plan, reports)
    findings = _causes_first(results, first, findings)
    verdict = Verdict(
        outcome=outcome_of(len(_compared(results)), _equal(results), findings),
        scheme=plan.scheme,
        reason=plan.reason,
        findings=tuple(findings),
        first_divergence=_first_divergence(results, first, findings),
    )
    costs = account(plan, reports)
    spoken = generation_of(plan, reports)
    return Comparison(plan, results, *contracts, exactness, verdict, costs, environment, spoken, broken)


def _as_it_went(plan: Plan, reports: Sequence[RankReport]) -> Plan:
    """The plan with the drafts that the reference accepted, as far as a rank came."""
    histories = [report.get("accepted", ()) for report in reports]
    accepted = max(histories, key=len, default=())
    return replace(plan, accepted=tuple(tuple(map(tuple, step)) for step in accepted))


def _compared(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    return [r for r in results if r.rows]


def _equal(results: Sequence[ProbeResult]) -> int:
    return sum(r.bitwise_equal for r in _compared(results))


def _first_over(numerics: str, results: Sequence[ProbeResult]) -> ProbeResult | None:
    """The first probe in execution order whose value is wrong: all that ran before it agreed.

    In bfloat16 a value over its bound may be rounding; what no rounding explains is named before it.
    """
    over = [r for r in results if r.over]
    plain = [r for r in over if not (numerics == "bfloat16" and r.kind not in CHOICES and not _beyond_rounding(r))]
    return next(iter(plain or over), None)


def _value_findings(
    plan: Plan, results: Sequence[ProbeResult], first: ProbeResult | None, exactness: Exactness | None
) -> list[Finding]:
    findings = []
    for r in results:
        if r.reference_replica is not None:
            message = (
                f"{label(r, plan)}: the reference differs from itself, first at {place(r.reference_replica, plan)}"
            )
            findings.append(Finding("reference", "INCONCLUSIVE", message, _at(r, r.reference_replica)))
    if first is None:
        return findings
    choice = first.kind in CHOICES
    exact = exactness is not None and not exactness.doubts
    outcome, why = _outcome_of_first(plan.case.numerics, first, results, exact=exact)
    later = sum(1 for r in results if r.over) - 1
    more = f" ({later} later probes differ too)" if later else ""
    kind = "choice" if choice else "value"
    why += _GOES_ON if plan.case.generate and first.kind in STEERING else ""
    return [*findings, Finding(kind, outcome, sentence(first, plan) + more + why, _at(first, first.first))]


def _token_findings(
    plan: Plan, results: Sequence[ProbeResult], first: ProbeResult | None, exactness: Exactness | None
) -> list[Finding]:
    """When generating, every other forward in which tokens or accepted drafts differ: the run went on behind them."""
    findings = []
    exact = exactness is not None and not exactness.doubts
    for r in results if plan.case.generate else ():
        if r.kind not in STEERING or r is first:
            continue
        if r.over:
            outcome, why = _outcome_of_first(plan.case.numerics, r, results, exact=exact)
            findings.append(Finding("token", outcome, sentence(r, plan) + why + _GOES_ON, _at(r, r.first)))
        elif r.choices is not None and r.choices.within:
            findings.append(Finding("token", "EQUIVALENT", near_tie(r, plan) + _GOES_ON, _at(r, r.flip)))
    return findings


def _outcome_of_first(
    numerics: str, first: ProbeResult, results: Sequence[ProbeResult], *, exact: bool
) -> tuple[str, str]:
    """The outcome that the first difference means, and what to add to its sentence."""
    until_first = results[: results.index(first) + 1]
    if any(r.reference_replica is not None for r in until_first):
        return "INCONCLUSIVE", "; the reference differs from itself by then"
    if first.reference_nan:
        return "INCONCLUSIVE", "; the reference itself is not a number there"
    if any(map(_beyond_rounding, results)):
        return "DIVERGED", ""
    if any(r.straddle is not None for r in until_first):
        return "INCONCLUSIVE", "; a rounding straddle came before, another --seed tells"
    if _rounding_may_explain(numerics, first, exact=exact):
        tells = "see the guard" if numerics == "exact" else "--numerics exact tells"
        return "INCONCLUSIVE", f"; a rounding difference may explain it, {tells}"
    return "DIVERGED", ""


def _rounding_may_explain(numerics: str, first: ProbeResult, *, exact: bool) -> bool:
    """Whether a correct candidate could differ like this in the working type."""
    if numerics == "exact":
        # Without the guarantee the run is a plain float64 run.
        return not exact and first.kind not in CHOICES and first.max_rel <= BOUNDS["float64"]
    if first.kind in CHOICES:
        # A near tie: below float64 it was replayed, and is no difference at all.
        return first.choices is not None and not first.choices.beyond
    # In bfloat16 no bound on finite values tells a bug from rounding.
    return numerics == "bfloat16"


def _exactness_findings(plan: Plan, results: Sequence[ProbeResult], exactness: Exactness | None) -> list[Finding]:
    findings = []
    if straddled := next((r for r in results if r.straddle is not None), None):
        message = (
            f"{label(straddled, plan)}: both results are within {STEP_BOUND:.0e} of each other and are rounded to "
            f"different grid points, first at {place(straddled.straddle, plan)}; another --seed tells more"
        )
        findings.append(Finding("straddle", "INCONCLUSIVE", message, _at(straddled, straddled.straddle)))
    for doubt in exactness.all_doubts if exactness else ():
        findings.append(Finding("guard", "INCONCLUSIVE", f"exactness is not guaranteed: {doubt}"))
    return findings


def _beyond_rounding(result: ProbeResult) -> bool:
    """Ranks that disagree, another shape, a candidate that is not finite or mostly wrong by half: never rounding."""
    gross = sum(rows for exponent, rows in result.histogram.items() if exponent >= 0)  # wrong by half and more
    most = result.kind not in CHOICES and 2 * gross > result.rows >= _MANY
    return result.replica is not None or (math.isinf(result.max_rel) and not result.reference_nan) or most


def _pairing_findings(plan: Plan, results: Sequence[ProbeResult], reports: Sequence[RankReport]) -> list[Finding]:
    findings = []
    for r in results:
        if r.unpaired:
            message = f"{label(r, plan)} was seen in the {r.unpaired} only"
            findings.append(Finding("unpaired", "DIVERGED", message, _at(r, None)))
    silent = {(name, probe) for r in reports for name, side in plan.sides for probe in _silent(plan, side, r)}
    for side, probe in sorted(silent):
        findings.append(Finding("silent", "DIVERGED", f"{probe}: declared by the {side}, and never fired"))
    return findings


def _silent(plan: Plan, side: SidePlan, report: RankReport) -> list[str]:
    """Probes that never fired and had to."""
    silent: list[str] = report.get(side.role, {}).get("silent", [])
    dp_rank = plan.place(report["rank"]).dp_rank
    return [probe for probe in silent if must_fire(probe, plan, side, dp_rank)]


def _breach_findings(checked: Checked) -> list[Finding]:
    """The first breach of each forward; one of a layer is followed by one of every layer behind it."""
    by_forward: dict[tuple[str, str, int | None], list[Breach]] = {}
    for breach in checked.breaches:
        by_forward.setdefault((breach.rule, breach.subject, breach.call), []).append(breach)
    return [_breach_finding(first, len(others)) for first, *others in by_forward.values()]


def _breach_finding(breach: Breach, others: int) -> Finding:
    # A reference that breaks its own contract proves nothing about the candidate.
    outcome = "DIVERGED" if breach.subject == "candidate" else "INCONCLUSIVE"
    nowhere = {"dp": None, "request": None, "position": None, "rank": breach.rank}
    at = None if breach.probe is None else {"probe": breach.probe, "call": breach.call, **nowhere}
    prefix = "" if breach.subject == "candidate" else "reference: "
    more = f" (and {others} more of this kind)" if others else ""
    return Finding(breach.rule, outcome, prefix + breach.message + more, at)


def _scheme_findings(plan: Plan, reports: Sequence[RankReport]) -> list[Finding]:
    findings = []
    for (name, side), outcome in zip(plan.sides, ("INCONCLUSIVE", "DIVERGED"), strict=True):
        active = {r[name]["scheme"] for r in reports if "scheme" in r.get(name, {})}
        if wrong := active - {side.scheme}:
            names = ", ".join(sorted(wrong))
            message = f"scheme {names} is active in the {name}, {side.scheme} expected ({side.reason})"
            findings.append(Finding("scheme", outcome, message))
    required = plan.case.require_scheme
    if required and required != plan.scheme:
        message = f"scheme {required} is required and {plan.scheme} ran: {plan.reason}"
        findings.append(Finding("required", "INCONCLUSIVE", message))
    return findings


def _first_divergence(
    results: Sequence[ProbeResult], first: ProbeResult | None, findings: Sequence[Finding]
) -> dict[str, Any] | None:
    """The earliest probe with a wrong value or a wrong row count, in execution order."""
    order = {(r.probe, r.call): i for i, r in reversed(list(enumerate(results)))}
    places = [_at(first, first.first or first.replica)] if first else []
    places += [
        f.at
        for f in findings
        if f.kind in ("rows", "work", "unpaired", "collectives") and f.outcome == "DIVERGED" and f.at
    ]
    return min(places, key=lambda at: order.get((at["probe"], at["call"]), len(order)), default=None)


def _causes_first(results: Sequence[ProbeResult], first: ProbeResult | None, findings: list[Finding]) -> list[Finding]:
    """Another dataflow, other weights and too many rows look like wrong values: these are told before them."""
    if first is None:
        return findings
    order = {(r.probe, r.call): i for i, r in reversed(list(enumerate(results)))}
    until = order[first.probe, first.call]

    def explains(f: Finding) -> bool:
        before = f.at is not None and order.get((f.at["probe"], f.at["call"]), until + 1) <= until
        return f.kind in ("scheme", "memory") or (f.kind == "rows" and before)

    causes = sorted(filter(explains, findings), key=lambda f: ("scheme", "memory", "rows").index(f.kind))
    place = next((i for i, f in enumerate(findings) if f.kind in ("value", "choice")), 0)
    others = [f for f in findings if f not in causes]
    return [*others[:place], *causes, *others[place:]]


def _at(result: ProbeResult, where: dict[str, Any] | None) -> dict[str, Any]:
    found = where or {}
    keys = ("dp", "request", "position", "rank")
    return {"probe": result.probe, "call": result.call, **{key: found.get(key) for key in keys}}
