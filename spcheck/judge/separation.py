"""What tells the wrong rows of a probe from the right ones, if anything does. No torch.

The rows of a forward, on all data-parallel ranks, are known from the plan. A feature separates where it holds for
every wrong row and for no right one. Where several do, no one can say which of them is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from spcheck.judge.forward_rows import ForwardRow, Rows
from spcheck.judge.merge import ProbeResult
from spcheck.plan.plan import NO_ADAPTER, Plan

_FEW = 2  # rows that must be on either side of a threshold
_CHANCES = 8  # ways to choose as many rows as are wrong
_MOST_TOLD = 2  # features that fit equally
_MOST_EXPERTS = 2


@dataclass(frozen=True)
class Feature:
    """Rows that have something in common. ``kind``: of features of one kind the first that fits is told."""

    kind: str
    text: str
    rows: frozenset[ForwardRow] = field(repr=False)


def separation(plan: Plan, result: ProbeResult, rows: Rows, *, thresholds: bool) -> str | None:
    """``only request 1, on all its rows``: what holds for all wrong rows alone; None where nothing or too much does.

    With ``thresholds`` also where rows are wrong from some place on, which is a weaker thing to know.
    """
    if not rows.right or math.comb(len(rows.every), len(rows.wrong)) < _CHANCES:
        return None  # among few rows anything separates
    fitting: dict[str, Feature] = {}
    for feature in _features(plan, result.probe, rows):
        if feature.rows == rows.wrong:
            fitting.setdefault(feature.kind, feature)
    found = list(fitting.values()) or (list(_thresholds(rows)) if thresholds else [])
    if not found or len(found) > _MOST_TOLD:
        return None
    return " or ".join(f"only {feature.text}" if i == 0 else feature.text for i, feature in enumerate(found)) + (
        " (the same rows)" if len(found) > 1 else ""
    )


def _features(plan: Plan, probe: str, rows: Rows) -> Iterator[Feature]:
    yield from _owners(plan, rows)
    yield from _places(plan, rows)
    yield from _borders(plan, rows)
    yield from _experts(rows, beside_choice=".mlp.experts." in probe)


def _holding(rows: Rows, holds: Callable[[ForwardRow], bool]) -> frozenset[ForwardRow]:
    return frozenset(row for row in rows.every if holds(row))


def _owners(plan: Plan, rows: Rows) -> Iterator[Feature]:
    """Whose a row is: a data-parallel rank, a request, an adapter."""
    several = plan.case.dp > 1
    for dp in range(plan.case.dp):
        yield Feature("dp", f"on DP rank {dp}, on all its rows", frozenset(row for row in rows.every if row.dp == dp))
    for dp, request in sorted({(row.dp, row.request) for row in rows.every}):
        name = f"request {request}{f' of DP rank {dp}' if several else ''}"
        mine = frozenset(row for row in rows.every if (row.dp, row.request) == (dp, request))
        yield Feature("request", f"{name}, on all its rows", mine)
    if plan.case.lora_adapters:
        yield from _adapters(plan, rows)


def _adapters(plan: Plan, rows: Rows) -> Iterator[Feature]:
    used = {dp: plan.adapters(dp) for dp in range(plan.case.dp)}

    def adapter(row: ForwardRow) -> int:
        return used[row.dp][row.request]

    yield Feature("adapter", "rows with an adapter", _holding(rows, lambda row: adapter(row) != NO_ADAPTER))
    yield Feature("adapter", "rows without an adapter", _holding(rows, lambda row: adapter(row) == NO_ADAPTER))
    for number in range(plan.case.lora_adapters):
        having = frozenset(row for row in rows.every if adapter(row) == number)
        yield Feature("adapter", f"rows with adapter {number}", having)


def _places(plan: Plan, rows: Rows) -> Iterator[Feature]:
    """What a row is in its request."""
    yield Feature("position", "rows at position 0", _holding(rows, lambda row: row.position == 0))
    for dp in range(plan.case.dp) if plan.case.dp > 1 else ():
        first = frozenset(row for row in rows.every if row.dp == dp and row.position == 0)
        yield Feature("position", f"rows at position 0 of DP rank {dp}", first)
    last = plan.config.max_position_embeddings - 1
    yield Feature("position", "rows at the model's last position", _holding(rows, lambda row: row.position == last))
    several = len({(row.dp, row.request) for row in rows.every}) > 1
    each = "the last row of each request" if several else "the last row"
    yield Feature("last", each, _holding(rows, lambda row: row.is_last))
    yield Feature("position", each.replace("last", "first"), _holding(rows, lambda row: row.is_first))
    yield Feature("verified", "rows of drafted tokens that are verified", _holding(rows, lambda row: row.verified))
    yield Feature("decode", "requests that hold cached tokens", _holding(rows, lambda row: row.decodes))
    yield Feature("decode", "requests that begin here (a prompt)", _holding(rows, lambda row: not row.decodes))
    chosen = plan.config.index_topk
    if chosen is not None:
        few = _holding(rows, lambda row: row.position < chosen)
        yield Feature("keys", f"rows with at most {chosen} keys (index_topk)", few)
        yield Feature("keys", f"rows with more than {chosen} keys (index_topk)", frozenset(rows.every) - few)


def _borders(plan: Plan, rows: Rows) -> Iterator[Feature]:
    """Where a row lies among the ranks' shards."""
    ranks = sorted({row.rank for row in rows.every})
    if plan.case.tp == 1 or len(ranks) < 2:
        return
    ends = {rank: max(row.own for row in rows.every if row.rank == rank) for rank in ranks}
    for rank in ranks:
        mine = frozenset(row for row in rows.every if row.rank == rank)
        yield Feature("rank", f"on rank {rank}, on all rows of its shard", mine)
        if rank + 1 in ranks and (rank + 1) % plan.case.tp:
            yield Feature("border", f"the last row of rank {rank}'s shard", _holding(rows, _is_at(rank, ends[rank])))
        if rank % plan.case.tp:
            yield Feature("border", f"the first row of rank {rank}'s shard", _holding(rows, _is_at(rank, 0)))
    yield Feature("border", "the first row of each shard", _holding(rows, lambda row: row.own == 0))
    yield Feature("border", "the last row of each shard", _holding(rows, lambda row: row.own == ends[row.rank]))
    later = _holding(rows, lambda row: row.own == 0 and row.rank % plan.case.tp > 0)
    yield Feature("border", "the first row of each shard but the first", later)


def _is_at(rank: int, own: int) -> Callable[[ForwardRow], bool]:
    return lambda row: (row.rank, row.own) == (rank, own)


def _experts(rows: Rows, *, beside_choice: bool) -> Iterator[Feature]:
    """Rows that chose an expert, or one of two. A single row tells something of the experts' own values alone."""
    if len(rows.wrong) < _FEW and not beside_choice:
        return
    by_expert = {
        expert: frozenset(row for row in rows.every if expert in row.experts)
        for expert in sorted({expert for row in rows.every for expert in row.experts})
    }
    bad = [expert for expert, chose in by_expert.items() if chose <= rows.wrong]
    if len(rows.wrong) < _FEW < len(bad) + 1:
        return  # each would do
    for count in range(1, _MOST_EXPERTS + 1):
        for experts in combinations(bad, count):
            names = " or ".join(map(str, experts))
            union = frozenset[ForwardRow]().union(*(by_expert[expert] for expert in experts))
            yield Feature("expert", f"rows that chose expert {names}", union)


def _thresholds(rows: Rows) -> Iterator[Feature]:
    """One number that parts wrong rows from right ones: a position, a row of the batch, a row of an expert."""
    if len(rows.wrong) < _FEW or len(rows.right) < _FEW:
        return
    several = len({(row.dp, row.request) for row in rows.every}) > 1
    least, most = min(row.position for row in rows.wrong), max(row.position for row in rows.right)
    if least > most:
        row = "" if several else f", row {min(row.index for row in rows.wrong)} of the batch"
        yield Feature("position", f"from position {least} on{row}", rows.wrong)
        return
    if max(row.position for row in rows.wrong) < min(row.position for row in rows.right):
        yield Feature("position", f"up to position {max(row.position for row in rows.wrong)}", rows.wrong)
        return
    first = min(row.index for row in rows.wrong)
    if several and first > max(row.index for row in rows.right):
        yield Feature("row", f"from row {first} of the batch on", rows.wrong)
        return
    yield from _overfull(rows)


def _overfull(rows: Rows) -> Iterator[Feature]:
    """Rows behind the n-th of one of their experts, in the order of all ranks."""
    taken: dict[int, int] = {}
    places: dict[ForwardRow, int] = {}
    for row in sorted(rows.every, key=lambda row: (row.rank, row.own)):
        for expert in row.experts:
            taken[expert] = taken.get(expert, 0) + 1
        places[row] = max((taken[expert] for expert in row.experts), default=0)
    if not taken:
        return
    limit = max(places[row] for row in rows.right)
    if all(places[row] > limit for row in rows.wrong):
        yield Feature("capacity", f"rows behind the {limit}th row of an expert: its capacity?", rows.wrong)
