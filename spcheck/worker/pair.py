"""The pair on one rank: reference first, then the candidate, measured phase by phase on the rank that owns the rows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from reference.checkpoint import CheckpointError
from spcheck.comm.interface import World
from spcheck.errors import SpcheckError
from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.worker.align import Aligned, align, align_alone
from spcheck.worker.built import EnginePool, own_groups, side_taps
from spcheck.worker.capture import TapError
from spcheck.worker.compare import Comparer
from spcheck.worker.marks import marks
from spcheck.worker.routed import Dispatch
from spcheck.worker.script import Script
from spcheck.worker.side import Side
from spcheck.worker.weights import lost_weights, weight_norms


def run_rank(world: World, plan: Plan, device: str, report: dict[str, Any], pool: EnginePool | None = None) -> None:
    """Runs the pair on this rank and device; ``report`` fills with plain data as it goes and is whole at the end.

    A failure leaves what was seen up to it in the report, says where, and is raised again. Engines built before are
    taken from the ``pool``.
    """
    report["rank"] = world.rank
    try:
        with torch.inference_mode():
            _Pair(world, plan, device, report, pool or EnginePool()).run()
    except Exception as error:
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            # What raises while no code of a subject runs is spcheck's own mistake, unless it says what is wrong.
            "internal": not world.trace.subject and not isinstance(error, SpcheckError | TapError | CheckpointError),
        }
        raise


class _Pair:
    """One run on one rank."""

    def __init__(self, world: World, plan: Plan, device: str, report: dict[str, Any], pool: EnginePool) -> None:
        self._world = world
        self._place = plan.place(world.rank)
        self._device = torch.device(device)
        self._script = Script(plan, self._device)
        self._report = report
        self._pool = pool

    def run(self) -> None:
        self._report |= {"probes": [], "expert_rows": [], "accepted": []}
        expected = list(self._reference())
        candidate = self._side("candidate", self._plan.candidate)
        reference_taps = side_taps(self._plan.reference, self._plan)
        compare = Comparer(self._script, self._world, reference_taps, candidate.taps, self._report)
        choices = [wanted.choices for _, wanted in expected]
        aligned = iter([wanted for _, wanted in expected])
        for phase, actual in self._values(candidate, choices):
            wanted = next(aligned)
            if phase.probed:
                compare(phase, wanted, actual)
        candidate.finish()
        compare.finish()
        self._report["marks"] = marks(self._world, self._plan, expected, reference_taps, self._report["probes"])
        if self._plan.grid is not None:
            mine = self._plan, self._world.rank, self._world.size
            self._report |= {"weight_norms": weight_norms(*mine), "lost_weights": lost_weights(*mine)}

    @property
    def _plan(self) -> Plan:
        """As far as it is known."""
        return self._script.plan

    def _reference(self) -> Iterator[tuple[Phase, Aligned]]:
        """Every forward and the caches of the reference, complete on the rank that owns the rows."""
        side = self._plan.reference
        if self._place.tp_rank < side.tp:
            reference = self._side("reference", side)
            yield from self._values(reference)
            reference.finish()
            return
        own_groups(self._world, side, self._plan.case)  # making a group takes all ranks of the world
        for phases in self._phases():
            yield phases[self._place.dp_rank], self._handed(side, phases)
            self._hear(phases, [])
        for phases in self._cache_phases:
            yield phases[self._place.dp_rank], self._handed(side, phases)

    def _handed(self, side: SidePlan, phases: Sequence[Phase]) -> Aligned:
        """What another rank ran alone."""
        if not self._is_aligned(phases):
            return Aligned()
        return align_alone([], {}, self._world, Dispatch(self._plan, side, self._place, phases, {}))

    def _values(
        self, side: Side, choices: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Iterator[tuple[Phase, Aligned]]:
        """Every forward and the caches of a side: the reference, or one that goes on with its ``choices``."""
        complete = align if side.plan.tp == self._place.tp else align_alone
        for number, phases in enumerate(self._phases()):
            phase = phases[self._place.dp_rank]
            if choices is not None:
                side.replay(phase, choices[number])
            pieces = side.run(phase)
            dispatch = Dispatch(self._plan, side.plan, self._place, phases, side.received)
            aligned = self._is_aligned(phases)
            yield phase, complete(pieces, side.taps, self._world, dispatch) if aligned else Aligned()
            if choices is None:
                self._hear(phases, side.sampled)
        for phases, pieces in zip(self._cache_phases, side.caches(), strict=True):
            dispatch = Dispatch(self._plan, side.plan, self._place, phases, {})
            yield phases[self._place.dp_rank], complete(pieces, side.cache_taps, self._world, dispatch)

    def _is_aligned(self, phases: Sequence[Phase]) -> bool:
        """Of a forward that is not compared only choices are exchanged, where they are replayed."""
        return phases[0].probed or self._plan.replays_choices

    def _hear(self, phases: Sequence[Phase], sampled: Sequence[int]) -> None:
        """Tells all ranks what the reference sampled on each data-parallel rank: its first rank says it."""
        if not self._script.generates:
            return
        mine = {"sampled": torch.tensor(sampled)} if self._place.tp_rank == 0 else {}
        incoming = self._world.swap([mine] * self._world.size)
        firsts = range(0, self._world.size, self._place.tp)
        self._script.hear(phases, [incoming[rank]["sampled"].tolist() for rank in firsts])
        self._report["accepted"] = self._plan.accepted

    def _phases(self) -> Iterator[tuple[Phase, ...]]:
        """The forwards in order, each as all data-parallel ranks have it; there may be more when one is over."""
        for number in count():
            known = self._plan.phases
            if number == len(known[0]):
                return
            yield tuple(phases[number] for phases in known)

    @property
    def _cache_phases(self) -> list[tuple[Phase, ...]]:
        return list(zip(*map(self._plan.cache_phases, range(self._place.dp)), strict=True))

    def _side(self, role: str, plan: SidePlan) -> Side:
        side = Side(plan, self._script, self._world, self._pool)
        self._report[role] = side.log
        side.start(self._device)
        return side
