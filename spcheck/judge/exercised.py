"""What a case did not exercise, although its model and settings have it: a pass says nothing about that. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.judge.generation import Generation
from spcheck.judge.notes import idle_settings, padded_rows
from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan

Reports = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Missed:
    """The ``names`` of what was not exercised, ``of`` as many as there are."""

    names: tuple[str, ...] = ()
    of: int = 0

    @property
    def count(self) -> int:
        """How many."""
        return len(self.names)

    @property
    def all(self) -> bool:
        """Whether nothing of this kind was exercised."""
        return self.count == self.of


@dataclass(frozen=True)
class NotExercised:
    """What did not happen in a run that came to its end.

    ``padded_rows`` has an entry where a side pads and no forward of the case had a padded row, the usual place of bugs.
    ``expert_slots`` are experts without a row, in layers that ran. ``sparse_choice`` are indexers that kept every key
    in all forwards, and ``top_k_skip`` those that had to choose in all of them: a forward in which no row has more than
    ``index_topk`` keys may leave the choice out. ``drafts_accepted`` are places among the drafts of a step of which
    none was ever accepted, where the case generates. ``settings`` are options and config keys that changed nothing.
    """

    padded_rows: Missed
    expert_slots: Missed
    sparse_choice: Missed
    top_k_skip: Missed
    drafts_accepted: Missed
    mtp_layers: Missed
    settings: Missed


def not_exercised(plan: Plan, reports: Reports, generation: Generation | None) -> NotExercised:
    """From the plan as it went, and the rows per expert that the ranks report."""
    used = _used_layers(plan)
    kept_all, always_chose = _indexers(plan, used)
    return NotExercised(
        padded_rows=_padded_rows(plan),
        expert_slots=_expert_slots(plan, reports, used),
        sparse_choice=kept_all,
        top_k_skip=always_chose,
        drafts_accepted=_drafts(plan, generation),
        mtp_layers=Missed(
            tuple(_layer(layer) for layer in plan.config.mtp_layers if layer not in used), len(plan.config.mtp_layers)
        ),
        settings=_settings(plan, generation),
    )


def _layer(layer: int) -> str:
    return f"model.layers.{layer}"


def _used_layers(plan: Plan) -> list[int]:
    """The main layers, and the MTP layers that some draft step used."""
    drafts = {plan.mtp_layer(phase.draft) for phase in _compared(plan) if phase.kind == "draft"}
    return [*range(plan.config.num_hidden_layers), *sorted(drafts)]


def _compared(plan: Plan) -> Iterator[Phase]:
    """The forwards of all data-parallel ranks that have a row and are compared."""
    for phases in plan.phases:
        yield from (phase for phase in phases if phase.probed and phase.real)


def _padded_rows(plan: Plan) -> Missed:
    if all(side.plain for _, side in plan.sides):
        return Missed()
    padded = any(padded_rows(plan, phase) for phase in _compared(plan))
    return Missed(() if padded else ("padded rows",), 1)


def _expert_slots(plan: Plan, reports: Reports, used: Sequence[int]) -> Missed:
    experts = plan.config.n_routed_experts
    layers = [layer for layer in used if plan.config.is_moe_layer(layer)]
    rows = {_layer(layer): [0] * experts for layer in layers}
    for report in reports:
        for probe, _, counts, _ in report.get("expert_rows", ()):
            name = probe.removesuffix(".mlp.gate.choose.out")
            rows[name] = [a + b for a, b in zip(rows[name], counts, strict=True)]
    empty = [f"{name}.mlp.experts.{e}" for name, counts in rows.items() for e, n in enumerate(counts) if not n]
    return Missed(tuple(empty), len(layers) * experts)


def _indexers(plan: Plan, used: Sequence[int]) -> tuple[Missed, Missed]:
    """Those that kept every key in all forwards, and those that had more keys than they keep in all forwards."""
    topk = plan.config.index_topk
    if topk is None:
        return Missed(), Missed()
    may_skip = any(not side.plain for _, side in plan.sides)  # a plain subject always scores
    kept_all, always_chose = [], []
    for layer in used:
        keys = [phase.keys for phase in _compared(plan) if _runs_in(plan, phase, layer)]
        name = f"{_layer(layer)}.self_attn.indexer"
        if keys and max(keys) <= topk:
            kept_all.append(name)
        if may_skip and keys and min(keys) > topk:
            always_chose.append(name)
    return Missed(tuple(kept_all), len(used)), Missed(tuple(always_chose), len(used))


def _runs_in(plan: Plan, phase: Phase, layer: int) -> bool:
    if phase.kind == "draft":
        return plan.mtp_layer(phase.draft) == layer
    return layer < plan.config.num_hidden_layers


def _drafts(plan: Plan, generation: Generation | None) -> Missed:
    """A case that generates nothing verifies no draft: it does not ask for it."""
    places = plan.case.mtp_steps if generation is not None else 0
    accepted = generation.accepted if generation is not None else []
    reached = {place for place, (count, _) in enumerate(accepted) if count}
    return Missed(tuple(f"draft {place}" for place in range(places) if place not in reached), places)


def _settings(plan: Plan, generation: Generation | None) -> Missed:
    idle = idle_settings(plan)
    if generation is not None and not generation.steps:
        idle.append("--generate")
    return Missed(tuple(idle), len(idle))
