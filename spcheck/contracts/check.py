"""Holds what the ranks logged against the tables; every breach is one sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from deepdiff import DeepDiff

from spcheck.contracts.collectives import Expected, expected_collectives
from spcheck.contracts.rows import expected_rows, phases_of_probe
from spcheck.phases import Phase, layer_of
from spcheck.plan import Plan

Reports = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Breach:
    """One broken rule; ``probe`` (a module for a collective), ``call`` and ``rank`` are where it broke first."""

    rule: str
    message: str
    subject: str
    probe: str | None = None
    call: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Checked:
    """A contract's result: how many entries were held against the table, and the breaches."""

    checked: int
    breaches: tuple[Breach, ...]


def check_rows(plan: Plan, reports: Reports) -> Checked:
    """Rows per firing of every probe, on every rank, of both subjects, and positions held by the caches."""
    checked, breaches = 0, []
    for subject, dataflow in (("reference", "reference"), ("candidate", plan.scheme)):
        for report in reports:
            log = report.get(subject)
            if log is None:
                continue
            seen = {(probe, call): rows for probe, call, rows in log["rows"]}
            checked += len(seen) + len(log.get("cached", {}))
            breaches += _wrong_rows(plan, subject, dataflow, report["rank"], seen)
            breaches += _wrong_caches(plan, subject, report["rank"], log.get("cached", {}))
    return Checked(checked, _first_rank_only(breaches))


def check_collectives(plan: Plan, reports: Reports) -> Checked:
    """Every collective of every forward on every rank of both subjects, in order."""
    checked, breaches = 0, []
    for subject, dataflow in (("reference", "reference"), ("candidate", plan.scheme)):
        tables = {(p.kind, p.call): expected_collectives(plan, dataflow, p) for p in plan.phases}
        for report in reports:
            for phase in plan.phases:
                seen = report.get(subject, {}).get("collectives", {}).get(f"{phase.kind} {phase.call}")
                if seen is None:
                    continue
                checked += len(seen)
                wanted = tables[phase.kind, phase.call]
                # Without SP a block's sum is done by the norm of the next layer.
                layers = dataflow != "tp"
                breaches += _wrong_collectives(subject, report["rank"], phase, wanted, seen, "error" in report, layers)
    return Checked(checked, _first_rank_only(breaches))


def check_work(plan: Plan, reports: Reports, other_choices: Collection[tuple[str, int]]) -> Checked:
    """Rows each expert computed: the reference's choices exactly, plus all padded rows' where these are routed.

    Rows routed without skipping: graph padding, and under SP the rows a shard adds. ``other_choices`` are the
    (probe, call) at which the candidate chose other experts, a finding of its own: only the total counts there.
    """
    wanted = _expert_totals(reports)
    done = _work_by_global_expert(plan, reports)
    breaches = []
    nothing = [0] * plan.config.n_routed_experts
    for layer, call in {**wanted, **done}:
        expected, counts = wanted.get((layer, call), nothing), done.get((layer, call), nothing)
        if (f"{layer}.mlp.gate.choose.out", call) in other_choices:
            expected, counts = [sum(expected)], [sum(counts)]
        breaches += _wrong_work(plan, f"{layer}.mlp.experts.work", call, expected, counts)
    return Checked(sum(len(counts) for counts in done.values()), tuple(breaches))


def _wrong_rows(
    plan: Plan, subject: str, dataflow: str, rank: int, seen: dict[tuple[str, int], list[int]]
) -> list[Breach]:
    breaches = []
    for (probe, call), rows in seen.items():
        phase = next((p for p in phases_of_probe(probe, plan) if p.call == call), None)
        wanted = expected_rows(probe, dataflow, phase, plan.case.tp) if phase else []
        if ".softmax." in probe and dataflow != "reference":
            rows = [sum(rows)]  # it may run over the rows in chunks
        if rows != wanted:
            message = f"{probe}: {_rows(rows)} on rank {rank}, {_rows(wanted)} expected under {dataflow}"
            breaches.append(Breach("rows", message, subject, probe, call, rank))
    return breaches


def _rows(counts: list[int]) -> str:
    return f"{', '.join(map(str, counts)) or 'no'} rows"


def _wrong_caches(plan: Plan, subject: str, rank: int, held: dict[str, list[int]]) -> list[Breach]:
    wanted = {name: list(plan.cache_phase(name).counts) for name in held if plan.cache_phase(name).real}
    actual = {name: held[name] for name in wanted}
    breaches = []
    for item in DeepDiff(wanted, actual, view="tree", verbose_level=2).values():
        for change in item:
            name, *request = change.path(output_format="list")
            where = f"request {request[0]}" if request else "all requests"
            message = f"{name}: {change.t2} positions held for {where} on rank {rank}, {change.t1} expected"
            breaches.append(Breach("rows", message, subject, name, 0, rank))
    return breaches


def _wrong_collectives(
    subject: str,
    rank: int,
    phase: Phase,
    wanted: list[Expected],
    seen: list[dict[str, Any]],
    cut_short: bool,
    layers: bool,
) -> list[Breach]:
    """The first collective that differs; what follows it is its consequence. A crash may end the list early.

    With ``layers`` one that a module of another layer calls is another one: a surplus call may look like the next.
    """
    for number, (w, s) in enumerate(zip(wanted, seen, strict=False), start=1):
        same = (w.kind, w.group, list(w.shape), w.dtype, w.bytes)
        called = (s["kind"], s["group"], list(s["shape"]), s["dtype"], s["bytes"])
        if same != called or (layers and _other_layer(w.where, s["module"])):
            message = f"{_nth(phase, number)} on rank {rank} is {_seen(s)}, {_wanted(w)} expected"
            return [Breach("collectives", message, subject, s["module"] or w.where, phase.call, rank)]
    if len(seen) > len(wanted):
        surplus = seen[len(wanted)]
        message = f"{_nth(phase, len(wanted) + 1)} on rank {rank} is {_seen(surplus)}, none expected"
        return [Breach("collectives", message, subject, surplus["module"] or "engine", phase.call, rank)]
    if len(seen) < len(wanted) and not cut_short:
        missing = wanted[len(seen)]
        message = f"{_nth(phase, len(seen) + 1)} is missing on rank {rank}: {_wanted(missing)} expected"
        return [Breach("collectives", message, subject, missing.where, phase.call, rank)]
    return []


def _other_layer(wanted: str, seen: str) -> bool:
    layers = layer_of(wanted), layer_of(seen)
    return None not in layers and layers[0] != layers[1]


def _nth(phase: Phase, number: int) -> str:
    return f"collective {number} of {phase.kind} step {phase.call}"


def _seen(s: dict[str, Any]) -> str:
    return f"{s['kind']} {list(s['shape'])} {s['dtype']} on {s['group']} (in {s['module'] or 'the engine'})"


def _wanted(w: Expected) -> str:
    return f"{w.kind} {list(w.shape)} {w.dtype} on {w.group} (for {w.where})"


def _expert_totals(reports: Reports) -> dict[tuple[str, int], list[int]]:
    """(layer, call) -> rows per global expert that the reference's real rows chose."""
    totals: dict[tuple[str, int], list[int]] = {}
    for report in reports:
        for probe, call, counts in report.get("expert_rows", []):
            key = probe.removesuffix(".mlp.gate.choose.out"), call
            totals[key] = [a + b for a, b in zip(totals.get(key, [0] * len(counts)), counts, strict=True)]
    return totals


def _work_by_global_expert(plan: Plan, reports: Reports) -> dict[tuple[str, int], list[int]]:
    """(layer, call) -> rows each global expert computed; rank r holds the r-th block of E/ep experts."""
    local = plan.config.n_routed_experts // plan.case.tp
    done: dict[tuple[str, int], list[int]] = {}
    for report in reports:
        for probe, call, counts in report.get("candidate", {}).get("work", []):
            total = done.setdefault((probe.removesuffix(".mlp.experts.work"), call), [0] * plan.config.n_routed_experts)
            for expert, rows in enumerate(counts, start=report["rank"] * local):
                total[expert] += rows
    return done


def _wrong_work(plan: Plan, probe: str, call: int, wanted: list[int], done: list[int]) -> list[Breach]:
    phase = next(p for p in phases_of_probe(probe, plan) if p.call == call)
    if plan.case.skip_padding:
        wrong = [e for e, (w, d) in enumerate(zip(wanted, done, strict=True)) if w != d]
        rule = "padded rows skipped"
    else:
        wrong = [e for e, (w, d) in enumerate(zip(wanted, done, strict=True)) if d < w]
        rule = "every real row routed"
    if wrong:
        e = wrong[0]
        message = f"{probe}: expert {e} computed {done[e]} rows, the reference routed {wanted[e]} to it ({rule})"
        return [Breach("work", message, "candidate", probe, call)]
    rows = phase.shard_rows(plan.case.tp) * plan.case.tp if plan.scheme == "full-sp" else phase.padded
    extra = 0 if plan.case.skip_padding else (rows - phase.real) * plan.config.num_experts_per_tok
    if sum(done) != sum(wanted) + extra:
        message = f"{probe}: {sum(done)} rows computed by all experts, {sum(wanted) + extra} expected"
        return [Breach("work", message, "candidate", probe, call)]
    return []


def _first_rank_only(breaches: list[Breach]) -> tuple[Breach, ...]:
    """One breach per place: other ranks' breaches of the same rule at the same place say nothing new."""
    seen: dict[tuple[str, str, str | None, int | None], Breach] = {}
    for breach in breaches:
        seen.setdefault((breach.rule, breach.subject, breach.probe, breach.call), breach)
    return tuple(seen.values())
