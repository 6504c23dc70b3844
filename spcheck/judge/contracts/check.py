"""Holds what the ranks logged against the tables; every breach is one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepdiff import DeepDiff
from deepdiff.helper import notpresent

from spcheck.families.deepseek.collectives import Expected, expected_collectives
from spcheck.families.deepseek.rows import expected_rows, phase_of_probe
from spcheck.plan.phases import Phase, layer_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

Reports = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Breach:
    """One broken rule; ``probe`` (a module for a collective), ``kind``, ``call`` and ``rank``: where it broke first."""

    rule: str
    message: str
    subject: str
    probe: str | None = None
    call: int | None = None
    rank: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class Checked:
    """A contract's result: how many entries were held against the table, and the breaches."""

    checked: int
    breaches: tuple[Breach, ...]


def check_rows(plan: Plan, reports: Reports) -> Checked:
    """Rows per firing of every probe, on every rank, of both subjects, and positions held by the caches."""
    checked, breaches = 0, []
    for subject, side in plan.sides:
        for report in reports:
            log = report.get(subject)
            if log is None:
                continue
            seen = {(probe, call): rows for probe, call, rows in log["rows"]}
            checked += len(seen) + len(log.get("cached", {}))
            breaches += _wrong_rows(plan, subject, side, report["rank"], seen)
            breaches += _wrong_caches(plan, subject, report["rank"], log.get("cached", {}))
    return Checked(checked, first_of_each_place(breaches))


def check_collectives(plan: Plan, reports: Reports) -> Checked:
    """Every collective of every forward on every rank of both subjects, in order."""
    checked, breaches = 0, []
    for subject, side in plan.sides:
        for dp_rank in range(plan.case.dp):
            here = [r for r in reports if plan.place(r["rank"]).dp_rank == dp_rank]
            for number, phase in enumerate(plan.phases[dp_rank]):
                wanted = expected_collectives(plan, side, dp_rank, number)
                seen = [(r, calls) for r in here if (calls := _seen_calls(r, subject, phase)) is not None]
                checked += sum(len(calls) for _, calls in seen)
                wrong = [
                    _Calls(plan, subject, side, r["rank"], phase).wrong(wanted, calls, "error" in r)
                    for r, calls in seen
                ]
                breaches += [breach for found in wrong for breach in found]
    return Checked(checked, first_of_each_place(breaches))


def _seen_calls(report: dict[str, Any], subject: str, phase: Phase) -> list[dict[str, Any]] | None:
    """What a rank called in one forward of a subject; None where it did not come to it."""
    calls: list[dict[str, Any]] | None = (
        report.get(subject, {}).get("collectives", {}).get(f"{phase.kind} {phase.call}")
    )
    return calls


def _wrong_rows(
    plan: Plan, subject: str, side: SidePlan, rank: int, seen: Mapping[tuple[str, int], list[int]]
) -> list[Breach]:
    breaches = []
    for (probe, call), rows in seen.items():
        phase = phase_of_probe(probe, plan, call, plan.place(rank).dp_rank)
        wanted = expected_rows(probe, side, plan.config, phase) if phase else []
        if ".softmax." in probe and not side.plain:
            rows = [sum(rows)]  # it may run over the rows in chunks
        if rows != wanted:
            name = plan.probe_name(probe, phase.kind, call) if phase else probe
            message = f"{name}: {_rows(rows)} on rank {rank}, {_rows(wanted)} expected under {side.scheme}"
            breaches.append(Breach("rows", message, subject, probe, call, rank, phase.kind if phase else ""))
    return breaches


def _rows(counts: list[int]) -> str:
    return f"{', '.join(map(str, counts)) or 'no'} rows"


def _wrong_caches(plan: Plan, subject: str, rank: int, held: dict[str, list[int]]) -> list[Breach]:
    dp_rank = plan.place(rank).dp_rank
    phases = {name: plan.cache_phase(name, dp_rank) for name in held}
    wanted = {name: _held(phase, len(plan.prompts(dp_rank))) for name, phase in phases.items()}
    breaches = []
    for item in DeepDiff(wanted, held, view="tree", verbose_level=2).values():
        for change in item:
            name, *request = change.path(output_format="list")
            where = f"request {request[0]}" if request else "all requests"
            held_, wanted_ = (0 if x is notpresent else x for x in (change.t2, change.t1))
            message = f"{name}: {held_} positions held for {where} on rank {rank}, {wanted_} expected"
            breaches.append(Breach("rows", message, subject, name, 0, rank, "cache"))
    return breaches


def _held(phase: Phase, requests: int) -> list[int]:
    """Positions of each request."""
    rows = Counter(request for request, _ in phase.rows)
    return [rows[request] for request in range(requests)]


@dataclass(frozen=True)
class _Calls:
    """The collectives of one forward on one rank."""

    plan: Plan
    subject: str
    side: SidePlan
    rank: int
    phase: Phase

    def wrong(self, wanted: list[Expected], seen: list[dict[str, Any]], cut_short: bool) -> list[Breach]:
        """The first collective that differs; what follows it is its consequence. A crash may end the list early."""
        for number, (w, s) in enumerate(zip(wanted, seen, strict=False), start=1):
            if not self._same(w, s):
                return [self._breach(number, f"on rank {self.rank} is {_seen(s)}, {_wanted(w)} expected", s, w)]
        if len(seen) > len(wanted):
            surplus = seen[len(wanted)]
            message = f"on rank {self.rank} is {_seen(surplus)}, none expected"
            return [self._breach(len(wanted) + 1, message, surplus, None)]
        if len(seen) < len(wanted) and not cut_short:
            missing = wanted[len(seen)]
            message = f"is missing on rank {self.rank}: {_wanted(missing)} expected"
            return [self._breach(len(seen) + 1, message, None, missing)]
        return []

    def _same(self, w: Expected, s: dict[str, Any]) -> bool:
        """One that a module of another layer calls is another one: a surplus call may look like the next.

        Without SP a block's sum is done by the norm of the next layer.
        """
        shape = list(s["shape"])
        if w.by_choice:  # how many rows travel is held against the choices themselves (work.py)
            if shape[0] != sum(s["sizes"]) or shape[0] > w.shape[0]:
                return False
            called: list[Any] = [s["kind"], s["group"], shape[1:], s["dtype"]]
            return called == [w.kind, w.group, list(w.shape[1:]), w.dtype] and not self._other_layer(w, s)
        if w.sizes is not None and list(w.sizes) != list(s["sizes"]):
            return False
        called = [s["kind"], s["group"], shape, s["dtype"], s["bytes"]]
        return called == [w.kind, w.group, list(w.shape), w.dtype, w.bytes] and not self._other_layer(w, s)

    def _other_layer(self, w: Expected, s: dict[str, Any]) -> bool:
        wanted, seen = layer_of(w.where), layer_of(s["module"])
        if wanted is None or seen is None:
            return False
        # Without SP in all of its layers the sum of one is done by the norm of the next.
        open_sum = self.side.scheme in ("tp", "moe-sp") and (w.kind, w.group) == ("all_reduce", "tp")
        return seen - wanted not in ((0, 1) if open_sum else (0,))

    def _breach(self, number: int, message: str, seen: dict[str, Any] | None, wanted: Expected | None) -> Breach:
        where = (seen or {}).get("module") or (wanted.where if wanted else "engine")
        forward = self.plan.forward_name(self.phase.kind, self.phase.call)
        message = f"collective {number} of {forward} {message}"
        return Breach("collectives", message, self.subject, where, self.phase.call, self.rank, self.phase.kind)


def _seen(s: dict[str, Any]) -> str:
    sizes = f" sizes {list(s['sizes'])}" if s.get("sizes") else ""
    return f"{s['kind']} {list(s['shape'])}{sizes} {s['dtype']} on {s['group']} (in {s['module'] or 'the engine'})"


def _wanted(w: Expected) -> str:
    shape = ["*", *w.shape[1:]] if w.by_choice else list(w.shape)
    sizes = f" sizes {list(w.sizes)}" if w.sizes is not None else ""
    return f"{w.kind} [{', '.join(map(str, shape))}]{sizes} {w.dtype} on {w.group} (for {w.where})"


def first_of_each_place(breaches: Sequence[Breach]) -> tuple[Breach, ...]:
    """One breach per place: other ranks' breaches of the same rule at the same place say nothing new."""
    seen: dict[tuple[str, str, str | None, int | None], Breach] = {}
    for breach in breaches:
        seen.setdefault((breach.rule, breach.subject, breach.probe, breach.call), breach)
    return tuple(seen.values())
