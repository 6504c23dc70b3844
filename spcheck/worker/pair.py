"""The pair on one rank: reference first, then the candidate, measured phase by phase on the rank that owns the rows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.checkpoint import CheckpointError
from spcheck.comm.interface import World
from spcheck.errors import SpcheckError
from spcheck.phases import Phase
from spcheck.plan import Plan
from spcheck.schemes import SidePlan
from spcheck.worker.align import Aligned, align, align_alone
from spcheck.worker.built import EnginePool, own_groups, side_taps
from spcheck.worker.capture import TapError
from spcheck.worker.compare import Comparer
from spcheck.worker.routed import Dispatch
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


def token_ids(plan: Plan, dp_rank: int = 0) -> list[Tensor]:
    """The new tokens of each request of a data-parallel rank; a longer request starts with the tokens of a shorter one.

    One in four is the first or last of a rank's part of the vocabulary, where an index is most easily off by one.
    """
    vocab, tp = plan.config.vocab_size, plan.case.tp
    part = -(-vocab // tp)
    edges = sorted({min(token, vocab - 1) for rank in range(tp) for token in (rank * part, (rank + 1) * part - 1)})
    seed = [plan.case.seed, dp_rank] if dp_rank else [plan.case.seed]
    counts = plan.requests(dp_rank)
    return [_tokens(np.random.default_rng([*seed, i]), n, vocab, edges) for i, n in enumerate(counts)]


def _tokens(random: np.random.Generator, count: int, vocab: int, edges: list[int]) -> Tensor:
    drawn = [(random.integers(0, vocab), random.random() < 0.25, random.choice(edges)) for _ in range(count)]
    return torch.tensor([int(edge if at_edge else token) for token, at_edge, edge in drawn])


class _Pair:
    """One run on one rank."""

    def __init__(self, world: World, plan: Plan, device: str, report: dict[str, Any], pool: EnginePool) -> None:
        self._world = world
        self._plan = plan
        self._place = plan.place(world.rank)
        self._device = torch.device(device)
        self._tokens = [ids.to(device) for ids in token_ids(plan, self._place.dp_rank)]
        self._report = report
        self._pool = pool

    def run(self) -> None:
        self._report |= {"probes": [], "expert_rows": []}
        expected = list(self._reference())
        candidate = self._side("candidate", self._plan.candidate)
        reference_taps = side_taps(self._plan.reference, self._plan)
        compare = Comparer(self._plan, self._world, reference_taps, candidate.taps, self._report)
        choices = [wanted.choices for _, wanted in expected] if self._plan.replays else []
        for phase, actual in self._values(candidate, choices):
            compare(phase, expected.pop(0)[1], actual)
        candidate.finish()
        if self._plan.grid is not None:
            mine = self._plan, self._world.rank, self._world.size
            self._report |= {"weight_norms": weight_norms(*mine), "lost_weights": lost_weights(*mine)}

    def _reference(self) -> Iterator[tuple[Phase, Aligned]]:
        """Every forward and the caches of the reference, complete on the rank that owns the rows."""
        side = self._plan.reference
        if self._place.tp_rank < side.tp:
            reference = self._side("reference", side)
            yield from self._values(reference)
            reference.finish()
            return
        own_groups(self._world, side, self._plan.case)  # making a group takes all ranks of the world
        for phases in (*self._phases, *self._cache_phases):
            dispatch = Dispatch(self._plan, side, self._place, phases, {})
            yield phases[self._place.dp_rank], align_alone([], {}, self._world, dispatch)

    def _values(self, side: Side, choices: Sequence[Mapping[str, Tensor]] = ()) -> Iterator[tuple[Phase, Aligned]]:
        """Every forward and the caches of a side, which may go on with another's ``choices``, one for each forward."""
        complete = align if side.plan.tp == self._place.tp else align_alone
        for number, phases in enumerate(self._phases):
            phase = phases[self._place.dp_rank]
            if choices:
                side.replay(phase, choices[number])
            pieces = side.run(phase)
            dispatch = Dispatch(self._plan, side.plan, self._place, phases, side.received)
            yield phase, complete(pieces, side.taps, self._world, dispatch)
        for phases, pieces in zip(self._cache_phases, side.caches(), strict=True):
            dispatch = Dispatch(self._plan, side.plan, self._place, phases, {})
            yield phases[self._place.dp_rank], complete(pieces, side.cache_taps, self._world, dispatch)

    @property
    def _phases(self) -> list[tuple[Phase, ...]]:
        """The forwards in order, each as all data-parallel ranks have it."""
        return list(zip(*self._plan.phases, strict=True))

    @property
    def _cache_phases(self) -> list[tuple[Phase, ...]]:
        return list(zip(*map(self._plan.cache_phases, range(self._place.dp)), strict=True))

    def _side(self, role: str, plan: SidePlan) -> Side:
        side = Side(plan, self._plan, self._world, self._tokens, self._pool)
        self._report[role] = side.log
        side.start(self._device)
        return side
