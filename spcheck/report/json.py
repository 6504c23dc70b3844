"""A comparison as strict JSON: no NaN, no Infinity; numbers that are not finite are null."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from spcheck import __version__
from spcheck.families.deepseek.bounds import BOUNDS
from spcheck.families.deepseek.exact import STEP_BOUND
from spcheck.judge.contracts.check import Checked
from spcheck.judge.merge import total_choices
from spcheck.judge.notes import notes, weights_text
from spcheck.judge.verdict import Comparison
from spcheck.report.accounting import accounting_json
from spcheck.report.exercised import exercised_json
from spcheck.report.generation import generation_json

SCHEMA = "spcheck.diff/1"


def to_json(comparison: Comparison) -> str:
    """The whole result; a stored one can be judged again without a run."""
    return json.dumps(_strict(_document(comparison)), indent=2, allow_nan=False) + "\n"


def _document(c: Comparison) -> dict[str, Any]:
    case = c.plan.case
    return {
        "schema": SCHEMA,
        "spcheck": __version__,
        "outcome": c.verdict.outcome,
        "exit_code": c.verdict.exit_code,
        "scheme": c.verdict.scheme,
        "scheme_reason": c.verdict.reason,
        "sides": {name: asdict(side) for name, side in c.plan.sides},
        "case": case.id,
        "weights": weights_text(c.plan),
        "scaled": [asdict(change) for change in c.plan.model.scaled],
        "notes": notes(c.plan),
        "numerics": _numerics(c),
        "choices": asdict(total_choices(c.results)),
        "activations": {"compared": c.compared, "bitwise_equal": c.bitwise_equal},
        "contracts": {
            "rows": _contract(c.rows),
            "collectives": _contract(c.collectives),
            "work": _contract(c.work),
            "memory": _contract(c.memory),
            "parameters": _contract(c.parameters),
        },
        "accounting": accounting_json(c.accounting),
        "generation": generation_json(c.generation),
        "first_divergence": c.verdict.first_divergence,
        "findings": [asdict(f) for f in c.verdict.findings],
        "degenerate": [asdict(probe) for probe in c.degenerate],
        "not_exercised": exercised_json(c.not_exercised),
        "failure": None if c.failure is None else asdict(c.failure),
        "probes": [{**asdict(r), "median_rel": r.median_rel, "p99_rel": r.p99_rel} for r in c.results],
        "environment": c.environment,
    }


def _numerics(c: Comparison) -> dict[str, Any]:
    name = c.plan.case.numerics
    document: dict[str, Any] = {"name": name, "bound": BOUNDS[name]}
    if name == "exact":
        document |= {"step_bound": STEP_BOUND, "guard": asdict(c.exactness) if c.exactness else None}
    return document


def _contract(checked: Checked) -> dict[str, Any]:
    return {
        "held": not checked.breaches if checked.checked else None,
        "checked": checked.checked,
        "breaches": [asdict(breach) for breach in checked.breaches],
    }


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
