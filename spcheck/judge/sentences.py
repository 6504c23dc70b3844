"""One result, and one place, in words. No torch."""

from __future__ import annotations

from typing import Any

from spcheck.judge.diagnose import hints
from spcheck.judge.merge import ProbeResult
from spcheck.plan.plan import Plan
from spcheck.subjects.protocol import CHOICES


def sentence(result: ProbeResult, plan: Plan, *, hinted: bool = True) -> str:
    """One result in words: ``model.layers.3.mlp.out: 4.1e-02 over bound 1.0e-12, first at request 0 token 9 ...``.

    Without hints where the cause is told elsewhere; what was measured stays.
    """
    why = "; ".join(hints(result, plan) if hinted else filter(None, [result.note]))
    return f"{label(result, plan)}: {_size(result, plan)}{f'; {why}' if why else ''}"


def label(result: ProbeResult, plan: Plan) -> str:
    """The probe's name, with the forward unless it is the last target step."""
    return plan.probe_name(result.probe, result.phase, result.call)


def _size(result: ProbeResult, plan: Plan) -> str:
    where = place(result.first or result.replica, plan)
    if not result.rows_over:
        return f"the ranks hold different values, first at {where}"
    if result.kind == "accepted":
        return f"{result.rows_over} of {result.rows} requests accepted another number of drafts, first at {where}"
    if result.kind in CHOICES:
        return f"{result.rows_over} of {result.rows} rows chose otherwise, first at {where}{_margin(result)}"
    bound = result.bound
    rows = f"{result.rows_over} of {result.rows} rows"
    limit = f"over bound {bound:.1e}" if bound else "where every bit must be equal,"
    size = f"{result.max_rel:.1e} {limit} on {rows}, first at {where}"
    w = result.worst or {}
    if w.get("channel") is None:
        return size
    values = f"{w['actual']:.6g} for {w['expected']:.6g}"
    return f"{size}; largest at {place(w, plan)}, row {w['row']} of its shard, channel {w['channel']}: {values}"


def near_tie(result: ProbeResult, plan: Plan) -> str:
    """Tokens that differ by no more than the error of their scores, in words."""
    within = result.choices.within if result.choices else 0
    tokens = f"{within} of {result.rows} tokens chosen otherwise"
    return f"{label(result, plan)}: {tokens}, first at {place(result.flip, plan)}{_margin(result)}"


def _margin(result: ProbeResult) -> str:
    """How wide the widest flip of a choice is in the reference's scores, and how far the scores themselves are off."""
    c = result.choices
    if c is None or c.flip_margin is None:
        return ""
    return f", by a margin of {c.flip_margin:.1e} where the scores differ by {c.score_error:.1e}"


def place(where: dict[str, Any] | None, plan: Plan) -> str:
    """``request 0 token 9, rank 1``, with the data-parallel rank where there are several."""
    if where is None or where.get("request") is None:
        return "no single row" if where is None else f"rank {where['rank']}"
    dp_rank = f"DP rank {where['dp']} " if plan.case.dp > 1 else ""
    request, own = where["request"], len(plan.case.requests[where["dp"]])
    of = f"request {request}" if request < own else f"previous step's request {request - own}"
    return f"{dp_rank}{of} token {where['position']}, rank {where['rank']}"
