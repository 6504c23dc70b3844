"""The work contract: rows that every expert computes, and rows that travel to the ranks that own it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spcheck.families.deepseek.rows import phase_of_probe
from spcheck.judge.contracts.check import Breach, Checked, Reports, first_of_each_place
from spcheck.judge.contracts.padded import Key, PaddedChoices
from spcheck.plan.dispatch import carries_ids, expert_rows, experts_per_rank, is_by_choice, members
from spcheck.plan.phases import Phase
from spcheck.plan.place import Place
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan


def check_work(plan: Plan, reports: Reports, other_choices: Collection[tuple[str, int]]) -> Checked:
    """Rows each expert computed: those of the reference's choices, and where padded rows are routed those of their own.

    Rows routed without skipping: graph padding, and under SP the rows a shard adds. Each of them must go where its own
    gate chose. ``other_choices`` are the (probe, call) at which the candidate chose other experts, a finding of its
    own: only the total counts there. A plain subject has no counts of work.
    """
    chosen = _chosen(plan, reports)
    checked = 0
    breaches: list[Breach] = []
    for subject, side in plan.sides:
        if not side.plain:
            excused = other_choices if subject == "candidate" else ()
            found, wrong = _Work(plan, subject, side, reports, excused).check(chosen)
            checked, breaches = checked + found, breaches + wrong
    return Checked(checked, first_of_each_place(breaches))


def _chosen(plan: Plan, reports: Reports) -> dict[Key, list[int]]:
    """Rows per global expert that the reference's real rows chose, over all data-parallel ranks."""
    totals: dict[Key, list[int]] = {}
    for report in reports:
        for probe, call, counts, _ in report.get("expert_rows", []):
            key = probe.removesuffix(".mlp.gate.choose.out"), call
            before = totals.get(key, [0] * plan.config.n_routed_experts)
            totals[key] = [a + b for a, b in zip(before, counts, strict=True)]
    return totals


def _key(probe: str, call: int) -> Key:
    return probe.removesuffix(".mlp.experts.work"), call


class _Work:
    """What the experts of one side did."""

    def __init__(
        self, plan: Plan, subject: str, side: SidePlan, reports: Reports, excused: Collection[tuple[str, int]]
    ) -> None:
        self.plan, self.subject, self.side, self.reports, self.excused = plan, subject, side, reports, excused
        self.local = experts_per_rank(plan.case, plan.config)
        self.padded = PaddedChoices(plan, subject, side, reports)

    def check(self, chosen: Mapping[Key, list[int]]) -> tuple[int, list[Breach]]:
        """How many counts there are, and what is wrong with them."""
        if misshapen := self.misshapen():
            return 1, misshapen
        checked, breaches = 0, []
        for rank, done in self.done():
            checked += sum(len(counts) for counts in done.values())
            for layer, call in {**chosen, **done}:
                nothing = [0] * self.plan.config.n_routed_experts
                expected, counts = chosen.get((layer, call), nothing), done.get((layer, call), nothing)
                breaches += self.astray((layer, call), rank)
                by_expert = (f"{layer}.mlp.gate.choose.out", call) not in self.excused
                breaches += self.wrong((layer, call), expected, counts, rank, by_expert=by_expert)
        return checked, breaches + list(self.wrong_travel())

    def log(self, report: dict[str, Any]) -> list[tuple[str, int, list[int]]]:
        log: list[tuple[str, int, list[int]]] = report.get(self.subject, {}).get("work", [])
        return log

    def misshapen(self) -> list[Breach]:
        """Ranks with another number of experts than the case gives them: their counts cannot be held against any."""
        return [
            Breach("work", f"{probe}: rank {report['rank']} has {len(counts)} experts, {self.local} expected",
                   self.subject, probe, call, report["rank"])
            for report in self.reports for probe, call, counts in self.log(report) if len(counts) != self.local
        ]  # fmt: skip

    def done(self) -> Iterator[tuple[int | None, dict[Key, list[int]]]]:
        """Rows that each global expert computed: over all ranks (None), or on each that has channels of all experts."""
        if not self.plan.case.expert_parallel:
            for report in self.reports:
                yield report["rank"], {_key(probe, call): counts for probe, call, counts in self.log(report)}
            return
        done: dict[Key, list[int]] = {}
        for report in self.reports:
            for probe, call, counts in self.log(report):
                total = done.setdefault(_key(probe, call), [0] * self.plan.config.n_routed_experts)
                for expert, rows in enumerate(counts, start=report["rank"] * self.local):
                    total[expert] += rows
        yield None, done

    def wrong(self, key: Key, wanted: list[int], done: list[int], rank: int | None, *, by_expert: bool) -> list[Breach]:
        probe, call = f"{key[0]}.mlp.experts.work", key[1]
        skipped = self.plan.case.skip_padding
        padding = self.padded.rows_of_experts(key, rank)
        wrong = [e for e, (w, p, d) in enumerate(zip(wanted, padding, done, strict=True)) if w + p != d]
        where = "" if rank is None else f" on rank {rank}"
        extra = 0 if skipped else self.padded_rows(probe, call) * self.plan.config.num_experts_per_tok
        if wrong and by_expert:
            e = wrong[0]
            rule = " (padded rows skipped)" if skipped else f", and the gate {padding[e]} padded rows"
            rows = f"{done[e]} row{'s' if done[e] != 1 else ''}"
            message = f"expert {e} computed {rows}{where}, the reference routed {wanted[e]} to it{rule}"
        elif sum(done) != sum(wanted) + extra:
            message = f"{sum(done)} rows computed by all experts{where}, {sum(wanted) + extra} expected"
        else:
            return []
        return [self.breach(key, message, rank)]

    def astray(self, key: Key, rank: int | None) -> list[Breach]:
        """Padded rows that do not go where their own gate chose."""
        return [self.breach(key, message, holder) for holder, message in self.padded.astray(key, rank)]

    def breach(self, key: Key, message: str, rank: int | None) -> Breach:
        """One breach of the work of a layer."""
        probe, call = f"{key[0]}.mlp.experts.work", key[1]
        phase = phase_of_probe(probe, self.plan, call)
        name = self.plan.probe_name(probe, phase.kind, call) if phase else probe
        return Breach("work", f"{name}: {message}", self.subject, probe, call, rank, phase.kind if phase else "")

    def padded_rows(self, probe: str, call: int) -> int:
        """Rows that are no token, over all data-parallel ranks."""
        phases = [phase_of_probe(probe, self.plan, call, d) for d in range(self.plan.case.dp)]
        return sum(expert_rows(self.side, phase) - phase.real for phase in phases if phase is not None)

    def wrong_travel(self) -> Iterator[Breach]:
        """All-to-all: to each rank go the rows that chose one of its experts, and no others."""
        if not is_by_choice(self.side, self.plan.case):
            return
        chosen = self.rows_to_ranks()
        for report in self.reports:
            phases = self.plan.phases[self.plan.place(report["rank"]).dp_rank]
            for phase in (phase for phase in phases if phase.probed):
                calls = report.get(self.subject, {}).get("collectives", {}).get(f"{phase.kind} {phase.call}", [])
                yield from self.wrong_ways(report["rank"], phase, calls)
                for call in _travelling(calls):
                    layer = call["module"].partition(".mlp.")[0]
                    if (f"{layer}.mlp.gate.choose.out", phase.call) not in self.excused:
                        wanted = chosen.get((layer, phase.call, self.scope(report["rank"])), [])
                        yield from self.wrong_sizes(report["rank"], phase, call, wanted)

    def wrong_ways(self, rank: int, phase: Phase, calls: list[dict[str, Any]]) -> Iterator[Breach]:
        """Hidden states and weights go with the ids, to the same ranks, and the results come back by the same way."""
        by_module: dict[str, list[dict[str, Any]]] = {}
        for call in calls:
            if call["kind"] == "all_to_all" and len(call["shape"]) == 2:
                by_module.setdefault(call["module"], []).append(call)
        for module, (first, *others) in by_module.items():
            ways = [(call["sizes"], call["receive"]) for call in (first, *others)]
            there, back = ways[0], (ways[0][1], ways[0][0])
            if ways[1:] != [there, there, back]:
                name = self.plan.probe_name(module, phase.kind, phase.call)
                message = f"{name}: rank {rank} sends and receives {ways}: what goes there together must come back"
                yield Breach("work", message, self.subject, f"{module}.work", phase.call, rank)

    def scope(self, rank: int) -> int:
        """Whose rows a rank sends: its own shard's, or without SP those of its data-parallel rank."""
        return rank if self.side.sharded else self.plan.place(rank).peers.start

    def rows_to_ranks(self) -> Mapping[tuple[str, int, int], list[int]]:
        """(layer, call, scope) -> rows that chose an expert of each rank of the world."""
        out: dict[tuple[str, int, int], list[int]] = {}
        for report in self.reports:
            for probe, call, _, to_rank in report.get("expert_rows", []):
                key = probe.removesuffix(".mlp.gate.choose.out"), call, self.scope(report["rank"])
                out[key] = [a + b for a, b in zip(out.get(key, [0] * len(to_rank)), to_rank, strict=True)]
        return out

    def wrong_sizes(self, rank: int, phase: Phase, call: dict[str, Any], wanted: list[int]) -> list[Breach]:
        place, group = self.plan.place(rank), members(self.side, self.plan.case, rank)
        if self.plan.case.expert_parallel:
            real = [wanted[member] if wanted else 0 for member in group]
            to_rank = self.padded.rows_to_ranks((call["module"].partition(".mlp.")[0], phase.call), rank)
            padding = [to_rank[member] for member in group]
        else:  # every rank has channels of every expert
            real = [phase.real] * len(group)
            padding = [0 if self.plan.case.skip_padding else self.own_padding(place, phase)] * len(group)
        if [r + p for r, p in zip(real, padding, strict=True)] == list(call["sizes"]):
            return []
        rule = f"{real} chose experts there" + (f", and {padding} padded rows" if any(padding) else "")
        name = self.plan.probe_name(call["module"], phase.kind, phase.call)
        message = f"{name}: rank {rank} sends {list(call['sizes'])} rows to the ranks of {call['group']}, {rule}"
        return [Breach("work", message, self.subject, f"{call['module']}.work", phase.call, rank)]

    def own_padding(self, place: Place, phase: Phase) -> int:
        if not self.side.sharded:
            return phase.padded - phase.real
        return phase.shard_rows(place.tp) - len(phase.owned(place.tp_rank, place.tp))


def _travelling(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each layer the one call that carries expert ids."""
    return [c for c in calls if carries_ids(c["kind"], c["dtype"], len(c["shape"]))]
