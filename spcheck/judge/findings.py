"""From measured numbers and broken contracts to findings: one sentence and one outcome each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spcheck.families.deepseek.exact import STEP_BOUND
from spcheck.families.deepseek.rows import must_fire
from spcheck.judge.contracts.check import Breach, Checked
from spcheck.judge.contracts.exactness import Exactness
from spcheck.judge.contracts.sameness import ZERO, Degenerate
from spcheck.judge.merge import ProbeResult, RankReport
from spcheck.judge.outcome import Finding
from spcheck.judge.rounding import beyond_rounding, may_be_rounding, rounding_reason
from spcheck.judge.sentences import label, near_tie, place, sentence
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.subjects.protocol import CHOICES, STEERING

_GOES_ON = "; the run goes on with the reference's"
_SIDES = ("reference", "candidate")


def value_findings(
    plan: Plan,
    results: Sequence[ProbeResult],
    first: ProbeResult | None,
    exactness: Exactness | None,
    *,
    hinted: bool = True,
) -> list[Finding]:
    """The first value that is wrong, and every one at which the reference contradicts itself.

    The first has no hints where it is ``hinted`` at elsewhere why: rows or a forward are missing before it.
    """
    findings = []
    for r in results:
        if r.reference_replica is not None:
            message = (
                f"{label(r, plan)}: the reference differs from itself, first at {place(r.reference_replica, plan)}"
            )
            findings.append(Finding("reference", "INCONCLUSIVE", message, at_place(r, r.reference_replica)))
    if first is None:
        return findings
    choice = first.kind in CHOICES
    outcome, why = _outcome_of(plan, first, results, exactness)
    later = sum(1 for r in results[results.index(first) + 1 :] if r.over)
    more = f" ({later} later probes differ too)" if later else ""
    kind = "choice" if choice else "value"
    why += _GOES_ON if plan.case.generate and first.kind in STEERING else ""
    message = sentence(first, plan, hinted=hinted) + more + why
    return [*findings, Finding(kind, outcome, message, at_place(first, first.first))]


def token_findings(
    plan: Plan, results: Sequence[ProbeResult], first: ProbeResult | None, exactness: Exactness | None
) -> list[Finding]:
    """When generating, every other forward in which tokens or accepted drafts differ: the run went on behind them."""
    findings = []
    for r in results if plan.case.generate else ():
        if r.kind not in STEERING or r is first:
            continue
        if r.over:
            outcome, why = _outcome_of(plan, r, results, exactness)
            findings.append(Finding("token", outcome, sentence(r, plan) + why + _GOES_ON, at_place(r, r.first)))
        elif r.choices is not None and r.choices.within:
            findings.append(Finding("token", "EQUIVALENT", near_tie(r, plan) + _GOES_ON, at_place(r, r.flip)))
    return findings


def _outcome_of(
    plan: Plan, result: ProbeResult, results: Sequence[ProbeResult], exactness: Exactness | None
) -> tuple[str, str]:
    """The outcome that a difference means, the first or one of a token, and what to add to its sentence."""
    exact = exactness is not None and not exactness.doubts
    until_here = results[: results.index(result) + 1]
    if any(r.reference_replica is not None for r in until_here):
        return "INCONCLUSIVE", "; the reference differs from itself by then"
    if result.reference_nan:
        return "INCONCLUSIVE", "; the reference itself is not a number there"
    if any(map(beyond_rounding, results)):
        return "DIVERGED", ""
    if any(r.straddle is not None for r in until_here):
        return "INCONCLUSIVE", "; a rounding straddle came before, another --seed tells"
    if may_be_rounding(plan, result, exact=exact):
        return "INCONCLUSIVE", rounding_reason(plan)
    return "DIVERGED", ""


def exactness_findings(plan: Plan, results: Sequence[ProbeResult], exactness: Exactness | None) -> list[Finding]:
    """Two results that straddle a rounding boundary, and every doubt about exact arithmetic."""
    findings = []
    if straddled := next((r for r in results if r.straddle is not None), None):
        message = (
            f"{label(straddled, plan)}: both results are within {STEP_BOUND:.0e} of each other and are rounded to "
            f"different grid points, first at {place(straddled.straddle, plan)}; another --seed tells more"
        )
        findings.append(Finding("straddle", "INCONCLUSIVE", message, at_place(straddled, straddled.straddle)))
    for doubt in exactness.all_doubts if exactness else ():
        findings.append(Finding("guard", "INCONCLUSIVE", f"exactness is not guaranteed: {doubt}"))
    return findings


def degenerate_findings(degenerate: Sequence[Degenerate]) -> list[Finding]:
    """One for all probes at which the reference's rows are all zero or all alike: a pass says nothing about them."""
    if not degenerate:
        return []
    first, *others = degenerate
    rows = f"all {first.rows} rows" if first.rows > 1 else "the only row"
    what = "zero" if first.state == ZERO else "alike although their tokens differ"
    verb = "are" if first.rows > 1 else "is"
    message = f"{first.probe}: {rows} of the reference {verb} {what}: nothing was compared there"
    more = f" (and at {len(others)} more probe{'s' if len(others) > 1 else ''})" if others else ""
    nowhere = {"dp": None, "request": None, "position": None, "rank": None}
    return [Finding("degenerate", "INCONCLUSIVE", message + more, {"probe": first.probe, "call": None, **nowhere})]


def pairing_findings(plan: Plan, results: Sequence[ProbeResult], reports: Sequence[RankReport]) -> list[Finding]:
    """Forwards whose probes one side alone has, and probes that never fired."""
    by_forward: dict[tuple[str, int, str], list[ProbeResult]] = {}
    for r in results:
        if r.unpaired:
            by_forward.setdefault((r.phase, r.call, r.unpaired), []).append(r)
    ran = {(r.phase, r.call) for r in results if r.rows}
    ran |= {
        (kind, call) for kind, call, _ in by_forward if {(kind, call, side) for side in _SIDES} <= by_forward.keys()
    }
    findings = [_unpaired(plan, alone, ran) for alone in by_forward.values()]
    silent = {(name, probe) for r in reports for name, side in plan.sides for probe in _silent(plan, side, r)}
    for side, probe in sorted(silent):
        findings.append(Finding("silent", "DIVERGED", f"{probe}: declared by the {side}, and never fired"))
    return findings


def _unpaired(plan: Plan, alone: Sequence[ProbeResult], ran: set[tuple[str, int]]) -> Finding:
    """One finding for the probes of a forward that one side alone has; ``ran`` are forwards that both have."""
    first = alone[0]
    if (first.phase, first.call) in ran or first.phase == "cache":
        more = f", and {len(alone) - 1} more probes of this forward" if len(alone) > 1 else ""
        message = f"{label(first, plan)} was seen in the {first.unpaired} only{more}"
    else:
        other = "candidate" if first.unpaired == "reference" else "reference"
        probes = f"{len(alone)} probe{'s' if len(alone) > 1 else ''}"
        message = f"{plan.forward_name(first.phase, first.call)} did not run in the {other}: {probes} unpaired"
    return Finding("unpaired", "DIVERGED", message, at_place(first, None))


def _silent(plan: Plan, side: SidePlan, report: RankReport) -> list[str]:
    """Probes that never fired and had to."""
    silent: list[str] = report.get(side.role, {}).get("silent", [])
    dp_rank = plan.place(report["rank"]).dp_rank
    return [probe for probe in silent if must_fire(probe, plan, side, dp_rank)]


def breach_findings(checked: Checked) -> list[Finding]:
    """The first breach of each forward; one of a layer is followed by one of every layer behind it."""
    by_forward: dict[tuple[str, str, str, int | None], list[Breach]] = {}
    for breach in checked.breaches:
        by_forward.setdefault((breach.rule, breach.subject, breach.kind, breach.call), []).append(breach)
    return [_breach_finding(first, len(others)) for first, *others in by_forward.values()]


def _breach_finding(breach: Breach, others: int) -> Finding:
    # A reference that breaks its own contract proves nothing about the candidate. With other parameters it is another
    # model.
    decides = breach.subject == "candidate" or breach.rule == "parameters"
    outcome = "DIVERGED" if decides else "INCONCLUSIVE"
    nowhere = {"dp": None, "request": None, "position": None, "rank": breach.rank}
    at = None if breach.probe is None else {"probe": breach.probe, "call": breach.call, **nowhere}
    prefix = "" if breach.subject == "candidate" else "reference: "
    more = f" (and {others} more of this kind)" if others else ""
    return Finding(breach.rule, outcome, prefix + breach.message + more, at)


def scheme_findings(plan: Plan, reports: Sequence[RankReport]) -> list[Finding]:
    """A dataflow that is not the expected one, or not the required one."""
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


def at_place(result: ProbeResult, where: dict[str, Any] | None) -> dict[str, Any]:
    """The probe, the call and the place of a result, as a finding names it."""
    found = where or {}
    keys = ("dp", "request", "position", "rank")
    return {"probe": result.probe, "call": result.call, **{key: found.get(key) for key in keys}}
