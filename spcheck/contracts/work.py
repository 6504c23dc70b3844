"""The work contract: rows that every expert computes, and rows that travel to the ranks that own it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spcheck.contracts.check import Breach, Checked, Reports, first_of_each_place
from spcheck.contracts.rows import phases_of_probe
from spcheck.phases import Phase
from spcheck.plan import Plan

_Key = tuple[str, int]
"""(layer, call)."""


def check_work(plan: Plan, reports: Reports, other_choices: Collection[tuple[str, int]]) -> Checked:
    """Rows each expert computed: the reference's choices exactly, plus all padded rows' where these are routed.

    Rows routed without skipping: graph padding, and under SP the rows a shard adds. ``other_choices`` are the
    (probe, call) at which the candidate chose other experts, a finding of its own: only the total counts there.
    """
    if plan.candidate.plain:
        return Checked(0, ())
    misshapen = _misshapen(plan, reports)
    if misshapen:
        return Checked(1, first_of_each_place(misshapen))
    wanted = _chosen(plan, reports)
    checked, breaches = 0, []
    for rank, done in _work(plan, reports):
        checked += sum(len(counts) for counts in done.values())
        for layer, call in {**wanted, **done}:
            nothing = [0] * plan.config.n_routed_experts
            expected, counts = wanted.get((layer, call), nothing), done.get((layer, call), nothing)
            if (f"{layer}.mlp.gate.choose.out", call) in other_choices:
                expected, counts = [sum(expected)], [sum(counts)]
            breaches += _wrong_work(plan, f"{layer}.mlp.experts.work", call, expected, counts, rank)
    travelled = _wrong_travel(plan, reports, other_choices)
    return Checked(checked, first_of_each_place([*breaches, *travelled]))


def _local_experts(plan: Plan) -> int:
    """Experts of which a rank has a part."""
    experts = plan.config.n_routed_experts
    return experts // plan.case.ranks if plan.case.expert_parallel else experts


def _misshapen(plan: Plan, reports: Reports) -> list[Breach]:
    """Ranks that hold another number of experts than the case gives them: their counts cannot be held against any."""
    local, breaches = _local_experts(plan), []
    for report in reports:
        for probe, call, counts in report.get("candidate", {}).get("work", []):
            if len(counts) != local:
                message = f"{probe}: rank {report['rank']} has {len(counts)} experts, {local} expected"
                breaches.append(Breach("work", message, "candidate", probe, call, report["rank"]))
    return breaches


def _chosen(plan: Plan, reports: Reports) -> dict[_Key, list[int]]:
    """Rows per global expert that the reference's real rows chose, over all data-parallel ranks."""
    totals: dict[_Key, list[int]] = {}
    for report in reports:
        for probe, call, counts, _ in report.get("expert_rows", []):
            key = probe.removesuffix(".mlp.gate.choose.out"), call
            before = totals.get(key, [0] * plan.config.n_routed_experts)
            totals[key] = [a + b for a, b in zip(before, counts, strict=True)]
    return totals


def _work(plan: Plan, reports: Reports) -> Iterator[tuple[int | None, dict[_Key, list[int]]]]:
    """Rows that each global expert computed: over all ranks (None), or on each that has channels of all experts."""
    logs = {r["rank"]: r.get("candidate", {}).get("work", []) for r in reports}
    if not plan.case.expert_parallel:
        for rank, log in logs.items():
            yield rank, {_key(probe, call): counts for probe, call, counts in log}
        return
    local = _local_experts(plan)
    done: dict[_Key, list[int]] = {}
    for rank, log in logs.items():
        for probe, call, counts in log:
            total = done.setdefault(_key(probe, call), [0] * plan.config.n_routed_experts)
            for expert, rows in enumerate(counts, start=rank * local):
                total[expert] += rows
    yield None, done


def _key(probe: str, call: int) -> _Key:
    return probe.removesuffix(".mlp.experts.work"), call


def _wrong_work(
    plan: Plan, probe: str, call: int, wanted: list[int], done: list[int], rank: int | None
) -> list[Breach]:
    skipped = plan.case.skip_padding
    pairs = enumerate(zip(wanted, done, strict=True))
    wrong = [e for e, (w, d) in pairs if (w != d if skipped else d < w)]
    where = "" if rank is None else f" on rank {rank}"
    if wrong:
        e = wrong[0]
        rule = "padded rows skipped" if skipped else "every real row routed"
        message = f"{probe}: expert {e} computed {done[e]} rows{where}, the reference routed {wanted[e]} to it ({rule})"
        return [Breach("work", message, "candidate", probe, call, rank)]
    extra = 0 if skipped else _padded_rows(plan, probe, call) * plan.config.num_experts_per_tok
    if sum(done) != sum(wanted) + extra:
        message = f"{probe}: {sum(done)} rows computed by all experts{where}, {sum(wanted) + extra} expected"
        return [Breach("work", message, "candidate", probe, call, rank)]
    return []


def _padded_rows(plan: Plan, probe: str, call: int) -> int:
    """Rows that are no token, over all data-parallel ranks."""
    phases = [_phase(plan, probe, call, d) for d in range(plan.case.dp)]
    return sum(_dispatched(plan, phase) - phase.real for phase in phases)


def _dispatched(plan: Plan, phase: Phase) -> int:
    tp = plan.case.tp
    return phase.shard_rows(tp) * tp if plan.candidate.sharded else phase.padded


def _phase(plan: Plan, probe: str, call: int, dp_rank: int) -> Phase:
    return next(p for p in phases_of_probe(probe, plan, dp_rank) if p.call == call)


def _wrong_travel(plan: Plan, reports: Reports, other_choices: Collection[tuple[str, int]]) -> list[Breach]:
    """All-to-all: to each rank go the rows that chose one of its experts, and of padding at most all."""
    if plan.case.all2all_backend != "all_to_all":
        return []
    breaches = []
    chosen = _rows_to_ranks(plan, reports)
    for report in reports:
        for phase in plan.phases[plan.place(report["rank"]).dp_rank]:
            calls = report.get("candidate", {}).get("collectives", {}).get(f"{phase.kind} {phase.call}", [])
            for call in _travelling(calls):
                layer = call["module"].partition(".mlp.")[0]
                if (f"{layer}.mlp.gate.choose.out", phase.call) not in other_choices:
                    wanted = chosen.get((layer, phase.call, _scope(plan, report["rank"])), [])
                    breaches += _wrong_sizes(plan, report["rank"], phase, call, wanted)
    return breaches


def _travelling(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each layer the one call that carries expert ids."""
    return [c for c in calls if c["kind"] == "all_to_all" and c["dtype"] == "int64" and len(c["shape"]) == 2]


def _scope(plan: Plan, rank: int) -> int:
    """Whose rows a rank sends: its own shard's, or without SP those of its data-parallel rank."""
    return rank if plan.candidate.sharded else plan.place(rank).peers.start


def _rows_to_ranks(plan: Plan, reports: Reports) -> Mapping[tuple[str, int, int], list[int]]:
    """(layer, call, scope) -> rows that chose an expert of each rank of the world."""
    out: dict[tuple[str, int, int], list[int]] = {}
    for report in reports:
        for probe, call, _, to_rank in report.get("expert_rows", []):
            key = probe.removesuffix(".mlp.gate.choose.out"), call, _scope(plan, report["rank"])
            out[key] = [a + b for a, b in zip(out.get(key, [0] * len(to_rank)), to_rank, strict=True)]
    return out


def _wrong_sizes(plan: Plan, rank: int, phase: Phase, call: dict[str, Any], wanted: list[int]) -> list[Breach]:
    place = plan.place(rank)
    group = range(plan.case.ranks) if plan.candidate.sharded else range(place.tp_rank, plan.case.ranks, place.tp)
    if plan.case.expert_parallel:
        least = [wanted[member] if wanted else 0 for member in group]
    else:
        least = [phase.real] * len(group)  # every rank has channels of every expert
    padding = 0 if plan.case.skip_padding else _own_padding(plan, rank, phase)
    if all(low <= sent <= low + padding for low, sent in zip(least, call["sizes"], strict=True)):
        return []
    rule = f"{least} chose experts there" + (f", and {padding} rows are padding" if padding else "")
    message = f"{call['module']}: rank {rank} sends {list(call['sizes'])} rows to the ranks of {call['group']}, {rule}"
    return [Breach("work", message, "candidate", f"{call['module']}.work", phase.call, rank)]


def _own_padding(plan: Plan, rank: int, phase: Phase) -> int:
    place = plan.place(rank)
    if not plan.candidate.sharded:
        return phase.padded - phase.real
    return phase.shard_rows(place.tp) - len(phase.owned(place.tp_rank, place.tp))
