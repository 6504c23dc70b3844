"""From a case to what every rank will do; impossible cases end here, before a process starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from reference.config import ModelConfig
from spcheck.case import Case, Requests
from spcheck.errors import UsageError
from spcheck.plan.checks import check_counts, check_lengths, check_requests, check_rows, check_settings, check_world
from spcheck.plan.grid import GRIDS, SMALL_HIDDEN, Grid
from spcheck.plan.model import Model, open_model
from spcheck.plan.phases import GraphPadding, Phase, layer_of, phases_of
from spcheck.plan.place import Place
from spcheck.plan.schemes import SidePlan, resolve_sides
from spcheck.plan.steps import Accepted, Step, steps_of
from spcheck.subjects.protocol import Tap

NO_ADAPTER = -1


@dataclass(frozen=True)
class Plan:
    """A case that can be run: its model's sizes, and who runs on either side in which dataflow, and why.

    ``accepted`` is what is known of the steps that generate: the drafts that the reference accepted in each.
    """

    case: Case
    model: Model
    reference: SidePlan
    candidate: SidePlan
    accepted: tuple[Accepted, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self.model.config

    @property
    def scheme(self) -> str:
        """The candidate's dataflow."""
        return self.candidate.scheme

    @property
    def reason(self) -> str:
        """The condition that decided it."""
        return self.candidate.reason

    @property
    def sides(self) -> tuple[tuple[str, SidePlan], tuple[str, SidePlan]]:
        """By the names under which ranks report."""
        return (self.reference.role, self.reference), (self.candidate.role, self.candidate)

    @property
    def dtype(self) -> str:
        """The working type of both subjects."""
        return "float64" if self.case.numerics == "exact" else self.case.numerics

    @property
    def wide_dtype(self) -> str:
        """The type of router and index scores, never below float32."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def grid(self) -> Grid | None:
        """The grid of exact numerics: the asked one, or the usual one of the model's size; None where nothing snaps."""
        if self.case.numerics != "exact":
            return None
        usual = "A" if self.config.hidden_size <= SMALL_HIDDEN else "B"
        return GRIDS[usual if self.case.grid == "auto" else self.case.grid]

    @property
    def replays_choices(self) -> bool:
        """Whether the candidate goes on with the reference's choices: rounding flips near ties below float64."""
        return self.dtype != "float64"

    def replays(self, tap: Tap) -> bool:
        """Whether it does so at a tap; when generating, with every token, so that one that differs ends nothing."""
        return tap.choice and (self.replays_choices or (self.case.generate > 0 and tap.steers))

    @property
    def has_moe(self) -> bool:
        """Whether any layer has experts: only then do data-parallel ranks depend on each other."""
        return any(self.config.is_moe_layer(layer) for layer in range(self.config.mtp_layers.stop))

    @cached_property
    def padding(self) -> GraphPadding:
        """How forwards are padded to the sizes of captured graphs."""
        return GraphPadding(self.case.pad_to, self.case.graph_sizes, agreed=self.case.dp > 1 and self.has_moe)

    @cached_property
    def _steps(self) -> tuple[tuple[Step, ...], int]:
        return steps_of(self.case, self.config.max_position_embeddings, self._previous, self.accepted)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The target steps in order, with their drafts, as far as they are known."""
        return self._steps[0]

    @property
    def own_step(self) -> int:
        """The place of the case's own step."""
        return self._steps[1]

    def going_on(self, accepted: Accepted) -> Plan:
        """The plan once the last known step's accepted drafts are known."""
        return replace(self, accepted=(*self.accepted, accepted))

    @property
    def _previous(self) -> Requests | None:
        """Stale rows need a step before; where none is given, it has a token in every row of the padded step."""
        if self.case.previous is not None or self.case.padding_content != "stale":
            return self.case.previous
        longest = self.config.max_position_embeddings
        chunk = self.case.prefill_chunk
        rows = self.padding.padded([sum(min(n, chunk or n) for n in here) for here in self.case.requests])
        return tuple(tuple(min(longest, n - at) for at in range(0, n, longest)) for n in rows)

    @cached_property
    def phases(self) -> list[tuple[Phase, ...]]:
        """The forwards of the run, for each data-parallel rank: per step the target, then the draft steps."""
        return phases_of(self.steps, self.padding)

    @cached_property
    def _by_call(self) -> list[dict[tuple[str, int], Phase]]:
        return [{(phase.kind, phase.call): phase for phase in phases} for phases in self.phases]

    def phase(self, kind: str, call: int, dp_rank: int = 0) -> Phase | None:
        """The forward of that kind and number; None for caches, and for one that is not known."""
        return self._by_call[dp_rank].get((kind, call))

    def place(self, rank: int) -> Place:
        """Where a rank of the world stands."""
        return Place(rank, self.case.tp, self.case.dp)

    def prompts(self, dp_rank: int) -> tuple[int, ...]:
        """Tokens that each request of a data-parallel rank is given, cached and new, by its number."""
        own = zip(self.case.requests[dp_rank], self.case.cached_tokens[dp_rank], strict=True)
        previous = self._previous
        return (*(new + held for new, held in own), *(previous[dp_rank] if previous else ()))

    def lengths(self, dp_rank: int) -> list[int]:
        """Positions that each request will hold at most."""
        drafts = self.case.mtp_steps
        generated = self.case.generate * (drafts + 1)
        own = len(self.case.requests[dp_rank])
        longest = [n + generated * (i < own) + max(drafts - 1, 0) for i, n in enumerate(self.prompts(dp_rank))]
        return [min(n, self.config.max_position_embeddings) for n in longest]

    def adapters(self, dp_rank: int) -> list[int]:
        """The LoRA adapter of each request: all of them in turn, over all data-parallel ranks, and then none."""
        before = sum(len(self.prompts(d)) for d in range(dp_rank))
        turns = self.case.lora_adapters + 1
        places = range(before, before + len(self.prompts(dp_rank)))
        return [NO_ADAPTER if i % turns == self.case.lora_adapters else i % turns for i in places]

    def cache_phases(self, dp_rank: int) -> list[Phase]:
        """The rows that caches must hold at the end: those of the main layers, then of each MTP layer that drafts."""
        used = sorted({self.mtp_layer(draft) for draft in range(self.case.mtp_steps)})
        return [self._cached(dp_rank, None), *(self._cached(dp_rank, layer) for layer in used)]

    def cache_phase(self, cache: str, dp_rank: int) -> Phase:
        """The one of a cache, by its name."""
        layer = layer_of(cache)
        return self._cached(dp_rank, layer if layer is not None and layer in self.config.mtp_layers else None)

    def _cached(self, dp_rank: int, layer: int | None) -> Phase:
        """What each request's last step left: it forgot what stood at its first row and behind, and wrote its rows.

        A main layer holds rejected drafts until the next step; an MTP layer has the rows of the draft steps it ran in.
        """
        last = {part.request: (step, i) for step in self.steps for i, part in enumerate(step.parts[dp_rank])}
        parts = [part for _, (step, i) in sorted(last.items()) for part in self._held(step, dp_rank, i, layer)]
        requests, starts, counts = (tuple(x) for x in zip(*parts, strict=True)) if parts else ((), (), ())
        return Phase("cache", 0, requests, starts, counts, sum(counts), layer or 0)

    def _held(self, step: Step, dp_rank: int, place: int, layer: int | None) -> list[tuple[int, int, int]]:
        """(request, start, rows) of what is held of the request at a place of its last step."""
        part = step.parts[dp_rank][place]
        if layer is None:
            return [(part.request, 0, part.end)]
        drafts = [j for j in range(step.draft_steps) if self.mtp_layer(j) == layer]
        later = [p for j in drafts if j for p in step.draft_parts(j)[dp_rank] if p.request == part.request]
        first = [(part.request, 0, step.kept[dp_rank][place].end)] if 0 in drafts else []
        return first + [(p.request, p.start, p.rows) for p in later]

    def mtp_layer(self, draft: int) -> int:
        """The layer that draft step ``draft`` uses: the MTP layers in turn."""
        return self.config.num_hidden_layers + draft % self.config.num_nextn_predict_layers

    def layer_name(self, layer: int) -> str:
        """``layer 2 moe``."""
        return f"layer {layer} {'moe' if self.config.is_moe_layer(layer) else 'dense'}"

    def forward_name(self, kind: str, call: int) -> str:
        """``target step``, ``draft step 1``; of another step than the case's own with its name before."""
        phase = self.phase(kind, call)
        if phase is None:
            return "caches after the last step"
        what = "target step" if kind == "target" else f"draft step {phase.draft}"
        step = self.steps[phase.step].name
        return f"{step}'s {what}" if step else what

    def probe_name(self, probe: str, kind: str, call: int) -> str:
        """A probe with the forward behind it, unless that is the case's own target step, or the probe is a cache."""
        phase = self.phase(kind, call)
        is_plain = phase is None or (kind == "target" and phase.step == self.own_step)
        return probe if is_plain else f"{probe} ({self.forward_name(kind, call)})"

    @property
    def folder(self) -> Path | None:
        """The checkpoint folder, or None where the weights are random."""
        return self.model.folder


def make_plan(case: Case) -> Plan:
    """Checks the case against its model and resolves the schemes.

    Raises:
        UsageError: the case cannot exist; the message says why in one sentence.
    """
    model = open_model(case)
    config = model.config
    check_requests(case)
    check_counts(case)
    check_settings(case)
    check_lengths(case, config)
    plan = Plan(case, model, *resolve_sides(case))
    if case.weights != "plain" and plan.folder is not None:
        raise UsageError(f"--weights {case.weights} is for random weights, and {case.model} has stored ones")
    check_rows(case, plan.steps)
    check_world(case, config, (plan.reference, plan.candidate))
    return plan
