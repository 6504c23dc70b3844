"""What a dataflow costs: collectives with their bytes by layer, parameters and activations of one rank, by the tables.

Bytes are those of a collective's argument on one rank: what that rank hands in, whatever the wire carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from spcheck.families.deepseek.activations import Activation, largest_activations
from spcheck.families.deepseek.collectives import Expected, expected_collectives
from spcheck.families.deepseek.parameters import PARTS, parameters
from spcheck.judge.contracts.check import Reports
from spcheck.plan.phases import Phase, layer_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

BEYOND = "beyond the table"


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind and group at one place of a forward, on one rank.

    ``bytes`` of all their arguments; ``at_most`` where rows travel by choice. ``seen_count`` and ``seen_bytes`` are
    what the rank logged: a call counts at the place where the table has one, whatever it is, and a surplus one
    :data:`BEYOND`. None where the rank logged nothing.
    """

    place: str
    kind: str
    group: str
    count: int
    bytes: int
    at_most: bool
    seen_count: int | None
    seen_bytes: int | None


@dataclass(frozen=True)
class Forward:
    """One forward of any step on the first rank of a data-parallel rank, with its ``tokens``."""

    name: str
    step: int
    dp_rank: int
    tokens: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class SideAccount:
    """One side of the pair.

    ``dp_rank`` is the data-parallel rank with the most tokens in the case's own target step, and ``collectives`` are
    what a rank of it calls there. ``bytes_per_step``: what one rank of every data-parallel rank hands in there, idle
    ones too; ``bytes_per_token`` is that over all tokens of the step: padding costs bytes and is no token.
    ``seen_bytes_per_token`` is the mean over the ranks, None where one of them logged nothing. ``parameters`` are bytes
    of one rank by :data:`~spcheck.families.deepseek.parameters.PARTS`, ``activations`` the largest by part of the
    model.
    """

    name: str
    tp: int
    dp_rank: int
    collectives: int
    bytes_per_step: int
    bytes_per_token: float
    at_most: bool
    seen_bytes_per_token: float | None
    parameters: dict[str, int]
    activations: dict[str, Activation]
    forwards: tuple[Forward, ...]

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters on one rank."""
        return sum(self.parameters.values())

    @property
    def largest_activation(self) -> Activation:
        """Of all parts."""
        return max(self.activations.values(), key=lambda a: a.bytes)


def account(plan: Plan, reports: Reports = ()) -> dict[str, SideAccount]:
    """Both sides by the names under which ranks report; without reports the tables alone."""
    return {subject: _Account(plan, side, _logs(subject, reports)).side() for subject, side in plan.sides}


_Logs = dict[int, dict[str, list[dict[str, Any]]]]
"""Rank -> forward -> its collectives."""


def _logs(subject: str, reports: Reports) -> _Logs:
    return {report["rank"]: report.get(subject, {}).get("collectives", {}) for report in reports}


class _Account:
    """One side with what its ranks logged."""

    def __init__(self, plan: Plan, side: SidePlan, logs: _Logs) -> None:
        self.plan, self.plan_of_side, self.logs = plan, side, logs
        forwards = enumerate(plan.phases[0])
        self.step = next(i for i, p in forwards if (p.kind, p.step) == ("target", plan.own_step))
        self.targets = [phases[self.step] for phases in plan.phases]
        self.calls = [
            [expected_collectives(plan, side, dp_rank, i) for i in range(len(phases))]
            for dp_rank, phases in enumerate(plan.phases)
        ]

    def side(self) -> SideAccount:
        plan, side = self.plan, self.plan_of_side
        step = [calls[self.step] for calls in self.calls]
        tokens = sum(phase.real for phase in self.targets)
        fullest = max(range(plan.case.dp), key=lambda dp_rank: self.targets[dp_rank].real)
        seen = self.seen_in_step()
        return SideAccount(
            name=side.name,
            tp=side.tp,
            dp_rank=fullest,
            collectives=len(step[fullest]),
            bytes_per_step=sum(call.bytes for calls in step for call in calls),
            bytes_per_token=sum(call.bytes for calls in step for call in calls) / tokens,
            at_most=any(call.by_choice for calls in step for call in calls),
            seen_bytes_per_token=None if seen is None else seen / side.tp / tokens,
            parameters=self.parameters(),
            activations=largest_activations(plan, side),
            forwards=tuple(self.forwards()),
        )

    def seen_in_step(self) -> int | None:
        """Bytes of all ranks together in the case's own target step."""
        places = map(self.plan.place, range(self.plan.case.ranks))
        ran = [place for place in places if place.tp_rank < self.plan_of_side.tp]
        logs = [self.seen(place.rank, self.targets[place.dp_rank]) for place in ran]
        return None if None in logs else sum(call["bytes"] for log in logs for call in log or ())

    def seen(self, rank: int, phase: Phase) -> list[dict[str, Any]] | None:
        return self.logs.get(rank, {}).get(f"{phase.kind} {phase.call}")

    def parameters(self) -> dict[str, int]:
        held = parameters(self.plan, self.plan_of_side)
        return {part: sum(w.bytes for w in held if w.part == part) for part in PARTS}

    def forwards(self) -> Iterable[Forward]:
        for dp_rank, phases in enumerate(self.plan.phases):
            for phase, calls in zip(phases, self.calls[dp_rank], strict=True):
                name = self.plan.forward_name(phase.kind, phase.call)
                seen = self.seen(dp_rank * self.plan.case.tp, phase)
                yield Forward(name, phase.step, dp_rank, phase.real, _traffic(self.plan, phase, calls, seen))


def _traffic(
    plan: Plan, phase: Phase, wanted: Sequence[Expected], seen: Sequence[dict[str, Any]] | None
) -> tuple[Traffic, ...]:
    places = [_place(plan, phase, call.where) for call in wanted]
    placed = list(zip(places, wanted, strict=True))
    logged = zip(chain(places, repeat(BEYOND)), seen or (), strict=False)
    expected = _tally((place, c.kind, c.group, c.bytes) for place, c in placed)
    found = _tally((place, c["kind"], c["group"], c["bytes"]) for place, c in logged)
    by_choice = {(place, c.kind, c.group) for place, c in placed if c.by_choice}
    unseen = (None, None) if seen is None else (0, 0)
    return tuple(
        Traffic(*key, *expected.get(key, (0, 0)), key in by_choice, *found.get(key, unseen))
        for key in {**expected, **found}
    )


_Key = tuple[str, str, str]


def _tally(calls: Iterable[tuple[str, str, str, int]]) -> dict[_Key, tuple[int, int]]:
    """(place, kind, group) -> count and bytes, in the order of the first call of each."""
    totals: dict[_Key, tuple[int, int]] = {}
    for place, kind, group, size in calls:
        count, bytes_ = totals.get((place, kind, group), (0, 0))
        totals[place, kind, group] = count + 1, bytes_ + size
    return totals


def _place(plan: Plan, phase: Phase, where: str) -> str:
    """``embedding``, ``layer 2 moe``, ``exit``, ``logits``, ``draft step 0 (layer 5)``."""
    if phase.kind == "draft":
        return f"draft step {phase.draft} (layer {plan.mtp_layer(phase.draft)})"
    layer = layer_of(where)
    if layer is not None:
        return plan.layer_name(layer)
    ends = {"model.embed_tokens": "embedding", "model exit": "exit", "lm_head": "logits"}
    return ends.get(where, "aux states" if where.startswith("model.aux") else "row counts")
