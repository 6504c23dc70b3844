"""From a case to what every rank will do; impossible cases end here, before a process starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from reference.config import ModelConfig
from spcheck.case import Case, Requests
from spcheck.checks import check_counts, check_requests, check_rows, check_settings, check_world
from spcheck.exact import GRIDS, SMALL_HIDDEN, Grid
from spcheck.model import load_model, preset_names
from spcheck.phases import GraphPadding, Phase, Step, layer_of, phases_of
from spcheck.place import Place
from spcheck.schemes import SidePlan, resolve_sides

NO_ADAPTER = -1


@dataclass(frozen=True)
class Plan:
    """A case that can be run: its model's sizes, and who runs on either side in which dataflow, and why."""

    case: Case
    config: ModelConfig
    reference: SidePlan
    candidate: SidePlan

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
    def replays(self) -> bool:
        """Whether the candidate goes on with the reference's choices: rounding flips near ties below float64."""
        return self.dtype != "float64"

    @property
    def has_moe(self) -> bool:
        """Whether any layer has experts: only then do data-parallel ranks depend on each other."""
        return any(self.config.is_moe_layer(layer) for layer in range(self.config.mtp_layers.stop))

    @cached_property
    def padding(self) -> GraphPadding:
        """How forwards are padded to the sizes of captured graphs."""
        return GraphPadding(self.case.pad_to, self.case.graph_sizes, agreed=self.case.dp > 1 and self.has_moe)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The target steps in order: the previous one, if any, then the case's own. Own requests come first."""
        own = Step(tuple(tuple(range(len(here))) for here in self.case.requests), self.case.requests)
        previous = self._previous
        if previous is None:
            return (own,)
        numbers = zip(self.case.requests, previous, strict=True)
        later = tuple(tuple(range(len(first), len(first) + len(then))) for first, then in numbers)
        return Step(later, previous), own

    @property
    def _previous(self) -> Requests | None:
        """Stale rows need a step before; where none is given, it has a token in every row of the padded step."""
        if self.case.previous is not None or self.case.padding_content != "stale":
            return self.case.previous
        longest = max(self.config.max_position_embeddings - max(self.case.mtp_steps - 1, 0), 1)
        rows = self.padding.padded([sum(here) for here in self.case.requests])
        return tuple(tuple(min(longest, n - at) for at in range(0, n, longest)) for n in rows)

    @cached_property
    def phases(self) -> list[tuple[Phase, ...]]:
        """The forwards of the run, for each data-parallel rank: per step the target, then the draft steps."""
        return phases_of(self.steps, self.case.mtp_steps, self.padding)

    def place(self, rank: int) -> Place:
        """Where a rank of the world stands."""
        return Place(rank, self.case.tp, self.case.dp)

    def requests(self, dp_rank: int) -> tuple[int, ...]:
        """New tokens of all requests of a data-parallel rank, by their number."""
        return tuple(n for step in reversed(self.steps) for n in step.tokens[dp_rank])

    def lengths(self, dp_rank: int) -> list[int]:
        """Positions that each request will hold at most."""
        return [n + max(self.case.mtp_steps - 1, 0) for n in self.requests(dp_rank)]

    def adapters(self, dp_rank: int) -> list[int]:
        """The LoRA adapter of each request: all of them in turn, over all data-parallel ranks, and then none."""
        before = sum(len(self.requests(d)) for d in range(dp_rank))
        turns = self.case.lora_adapters + 1
        places = range(before, before + len(self.requests(dp_rank)))
        return [NO_ADAPTER if i % turns == self.case.lora_adapters else i % turns for i in places]

    def cache_phases(self, dp_rank: int) -> list[Phase]:
        """The rows that caches must hold at the end: those of the main layers, then of each MTP layer that drafts."""
        used = sorted({self.mtp_layer(draft) for draft in range(self.case.mtp_steps)})
        return [self._cached(dp_rank, None), *(self._cached(dp_rank, layer) for layer in used)]

    def cache_phase(self, cache: str, dp_rank: int) -> Phase:
        """The one of a cache: positions 0.. of each request, drafted ones too in an MTP layer."""
        layer = layer_of(cache)
        return self._cached(dp_rank, layer if layer is not None and layer in self.config.mtp_layers else None)

    def _cached(self, dp_rank: int, layer: int | None) -> Phase:
        counts = self.requests(dp_rank)
        if layer is not None:
            drafts = [j for j in range(self.case.mtp_steps) if self.mtp_layer(j) == layer]
            later = sum(1 for j in drafts if j > 0)
            counts = tuple(n * (0 in drafts) + later for n in counts)
        return Phase("cache", 0, tuple(range(len(counts))), (0,) * len(counts), counts, sum(counts), layer or 0)

    def mtp_layer(self, draft: int) -> int:
        """The layer that draft step ``draft`` uses: the MTP layers in turn."""
        return self.config.num_hidden_layers + draft % self.config.num_nextn_predict_layers

    def layer_name(self, layer: int) -> str:
        """``layer 2 moe``."""
        return f"layer {layer} {'moe' if self.config.is_moe_layer(layer) else 'dense'}"

    def forward_name(self, kind: str, call: int) -> str:
        """``target step``, ``draft step 1``; where there is a step before, its own are the ``previous step's``."""
        step, draft = (call, 0) if kind == "target" else divmod(call, max(self.case.mtp_steps, 1))
        previous = "previous step's " if kind != "cache" and step < len(self.steps) - 1 else ""
        return (
            previous
            + {"target": "target step", "draft": f"draft step {draft}", "cache": "caches after the last step"}[kind]
        )

    @property
    def folder(self) -> Path | None:
        """The checkpoint folder, or None where a preset gets random weights."""
        return None if self.case.model in preset_names() else Path(self.case.model)


def make_plan(case: Case) -> Plan:
    """Checks the case against its model and resolves the schemes.

    Raises:
        UsageError: the case cannot exist; the message says why in one sentence.
    """
    config = load_model(case)
    check_requests(case)
    check_counts(case)
    check_settings(case)
    plan = Plan(case, config, *resolve_sides(case))
    check_rows(case, config, plan.steps)
    check_world(case, config, (plan.reference, plan.candidate))
    return plan
