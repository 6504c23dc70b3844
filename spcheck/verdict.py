"""From merged results and contracts to findings, the first divergence and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.contracts.check import Breach, Checked, check_collectives, check_rows, check_work
from spcheck.contracts.rows import phases_of_probe
from spcheck.diagnose import hints
from spcheck.failure import Failure, divergence_sentence, explain
from spcheck.judge import BOUNDS, Finding, Verdict, outcome_of
from spcheck.merge import ProbeResult, RankReport, merge_probes
from spcheck.plan import Plan


@dataclass(frozen=True)
class Comparison:
    """Everything a finished or broken run gave: numbers, contracts, and the verdict on them."""

    plan: Plan
    results: list[ProbeResult]
    rows: Checked
    collectives: Checked
    work: Checked
    verdict: Verdict
    environment: dict[str, Any]
    failure: Failure | None = None

    @property
    def compared(self) -> int:
        """Probe and call pairs with at least one real row compared."""
        return len(_compared(self.results))

    @property
    def bitwise_equal(self) -> int:
        """Those of them that are equal in every element."""
        return _equal(self.results)


def conclude(plan: Plan, reports: Sequence[RankReport], environment: dict[str, Any], failure: str | None) -> Comparison:
    """Judges a run. ``failure`` is the sentence of a run that did not come to its end."""
    results = merge_probes(reports)
    rows = check_rows(plan, reports)
    collectives = check_collectives(plan, reports)
    other_choices = {(r.probe, r.call) for r in results if r.kind == "set" and r.over}
    work = check_work(plan, reports, other_choices) if failure is None else Checked(0, ())
    first = _first_over(results)
    broken = explain(reports) if failure else None
    findings = [Finding("failed", "FAILED", failure)] if failure else []
    if broken and broken.divergence:
        findings.append(Finding("divergence", "FAILED", divergence_sentence(broken.divergence)))
    findings += _value_findings(plan, results, first)
    findings += _pairing_findings(plan, results, reports) if failure is None else []
    findings += [_breach_finding(b) for c in (rows, collectives, work) for b in c.breaches]
    findings += _scheme_findings(plan, reports)
    verdict = Verdict(
        outcome=outcome_of(len(_compared(results)), _equal(results), findings),
        scheme=plan.scheme,
        reason=plan.reason,
        findings=tuple(findings),
        first_divergence=_first_divergence(results, first, findings),
    )
    return Comparison(plan, results, rows, collectives, work, verdict, environment, broken)


def _compared(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    return [r for r in results if r.rows]


def _equal(results: Sequence[ProbeResult]) -> int:
    return sum(r.bitwise_equal for r in _compared(results))


def sentence(result: ProbeResult, plan: Plan) -> str:
    """One result in words: ``model.layers.3.mlp.out: 4.1e-02 over bound 1.0e-12, first at request 0 token 9 ...``."""
    phase = next((p for p in plan.phases if (p.kind, p.call) == (result.phase, result.call)), None)
    why = "; ".join(hints(result, plan.case.tp, phase))
    return f"{label(result)}: {_size(result, plan)}{f'; {why}' if why else ''}"


def label(result: ProbeResult) -> str:
    """The probe's name, with the draft step where there is more than one forward."""
    return f"{result.probe} (draft step {result.call})" if result.phase == "draft" else result.probe


def _size(result: ProbeResult, plan: Plan) -> str:
    where = place(result.first or result.replica)
    if result.kind in ("set", "token"):
        return f"{result.rows_over} of {result.rows} rows chose otherwise, first at {where}"
    if not result.rows_over:
        return f"the ranks hold different values, first at {where}"
    bound = BOUNDS[plan.case.numerics]
    rows = f"{result.rows_over} of {result.rows} rows"
    size = f"{result.max_rel:.1e} over bound {bound:.1e} on {rows}, first at {where}"
    w = result.worst or {}
    if w.get("channel") is None:
        return size
    values = f"{w['actual']:.6g} for {w['expected']:.6g}"
    return f"{size}; largest at {place(w)}, row {w['row']} of its shard, channel {w['channel']}: {values}"


def place(where: dict[str, Any] | None) -> str:
    """``request 0 token 9, rank 1``."""
    if where is None or where.get("request") is None:
        return "no single row" if where is None else f"rank {where['rank']}"
    return f"request {where['request']} token {where['position']}, rank {where['rank']}"


def _first_over(results: Sequence[ProbeResult]) -> ProbeResult | None:
    """The first probe in execution order whose value is wrong: all that ran before it agreed."""
    return next((r for r in results if r.over), None)


def _value_findings(plan: Plan, results: Sequence[ProbeResult], first: ProbeResult | None) -> list[Finding]:
    findings = []
    for r in results:
        if r.reference_replica is not None:
            message = f"{label(r)}: the reference differs from itself, first at {place(r.reference_replica)}"
            findings.append(Finding("reference", "INCONCLUSIVE", message, _at(r, r.reference_replica)))
    if first is None:
        return findings
    choice = first.kind in ("set", "token")
    outcome, why = _outcome_of_first(plan.case.numerics, first, results)
    later = sum(1 for r in results if r.over) - 1
    more = f" ({later} later probes differ too)" if later else ""
    kind = "choice" if choice else "value"
    return [*findings, Finding(kind, outcome, sentence(first, plan) + more + why, _at(first, first.first))]


def _outcome_of_first(numerics: str, first: ProbeResult, results: Sequence[ProbeResult]) -> tuple[str, str]:
    """The outcome that the first difference means, and what to add to its sentence."""
    until_first = results[: results.index(first) + 1]
    if any(r.reference_replica is not None for r in until_first):
        return "INCONCLUSIVE", "; the reference differs from itself by then"
    if first.reference_nan:
        return "INCONCLUSIVE", "; the reference itself is not a number there"
    if _rounding_may_explain(numerics, first) and not any(map(_beyond_rounding, results)):
        return "INCONCLUSIVE", "; a rounding difference may explain it, --numerics float64 tells"
    return "DIVERGED", ""


def _rounding_may_explain(numerics: str, first: ProbeResult) -> bool:
    """Whether a correct candidate could differ like this in the working type.

    Below float64 a rounding difference flips a near tie, and all that follows differs for that reason alone. In
    bfloat16 no bound on finite values tells a bug from rounding.
    """
    return numerics == "bfloat16" or (numerics == "float32" and first.kind in ("set", "token"))


def _beyond_rounding(result: ProbeResult) -> bool:
    """Ranks that disagree, another shape, a candidate that is not finite: no rounding explains these anywhere."""
    return result.replica is not None or (math.isinf(result.max_rel) and not result.reference_nan)


def _pairing_findings(plan: Plan, results: Sequence[ProbeResult], reports: Sequence[RankReport]) -> list[Finding]:
    findings = []
    for r in results:
        if r.unpaired:
            message = f"{label(r)} was seen in the {r.unpaired} only"
            findings.append(Finding("unpaired", "DIVERGED", message, _at(r, None)))
    silent = {(side, probe) for r in reports for side in ("reference", "candidate") for probe in r[side]["silent"]}
    for side, probe in sorted(s for s in silent if phases_of_probe(s[1], plan)):
        findings.append(Finding("silent", "DIVERGED", f"{probe}: declared by the {side}, and never fired"))
    return findings


def _breach_finding(breach: Breach) -> Finding:
    # A reference that breaks its own contract proves nothing about the candidate.
    outcome = "DIVERGED" if breach.subject == "candidate" else "INCONCLUSIVE"
    at = None
    if breach.probe is not None:
        at = {"probe": breach.probe, "call": breach.call, "request": None, "position": None, "rank": breach.rank}
    prefix = "" if breach.subject == "candidate" else "reference: "
    return Finding(breach.rule, outcome, prefix + breach.message, at)


def _scheme_findings(plan: Plan, reports: Sequence[RankReport]) -> list[Finding]:
    active = {r["candidate"]["scheme"] for r in reports if "scheme" in r.get("candidate", {})}
    findings = []
    if wrong := active - {plan.scheme}:
        active_names = ", ".join(sorted(wrong))
        message = f"scheme {active_names} is active in the candidate, {plan.scheme} expected ({plan.reason})"
        findings.append(Finding("scheme", "DIVERGED", message))
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


def _at(result: ProbeResult, where: dict[str, Any] | None) -> dict[str, Any]:
    found = where or {"request": None, "position": None, "rank": None}
    return {"probe": result.probe, "call": result.call, **{k: found[k] for k in ("request", "position", "rank")}}
