"""The pair on one rank: reference first, then the candidate, measured phase by phase on the rank that owns the rows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.checkpoint import CheckpointError
from spcheck.comm.interface import World
from spcheck.errors import SpcheckError
from spcheck.phases import Phase
from spcheck.plan import Plan
from spcheck.subject import load_subject, taps_of
from spcheck.worker.align import Aligned, align, align_alone
from spcheck.worker.built import GROUPS, EnginePool
from spcheck.worker.capture import TapError
from spcheck.worker.compare import Comparer
from spcheck.worker.side import Side
from spcheck.worker.weights import lost_weights, weight_norms

REFERENCE = "reference.subject"
CANDIDATE = "optimized.subject"


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


def token_ids(plan: Plan) -> list[Tensor]:
    """The new tokens of each request; a longer request with the same seed starts with the same tokens.

    One in four is the first or last of a rank's part of the vocabulary, where an index is most easily off by one.
    """
    vocab, tp = plan.config.vocab_size, plan.case.tp
    part = -(-vocab // tp)
    edges = sorted({min(token, vocab - 1) for rank in range(tp) for token in (rank * part, (rank + 1) * part - 1)})
    return [
        _tokens(np.random.default_rng([plan.case.seed, i]), n, vocab, edges) for i, n in enumerate(plan.case.requests)
    ]


def _tokens(random: np.random.Generator, count: int, vocab: int, edges: list[int]) -> Tensor:
    drawn = [(random.integers(0, vocab), random.random() < 0.25, random.choice(edges)) for _ in range(count)]
    return torch.tensor([int(edge if at_edge else token) for token, at_edge, edge in drawn])


class _Pair:
    """One run on one rank."""

    def __init__(self, world: World, plan: Plan, device: str, report: dict[str, Any], pool: EnginePool) -> None:
        self._world = world
        self._plan = plan
        self._tokens = [ids.to(device) for ids in token_ids(plan)]
        self._report = report
        self._pool = pool

    def run(self) -> None:
        self._report |= {"probes": [], "expert_rows": []}
        expected = dict(self._reference())
        candidate = self._side("candidate", CANDIDATE, self._plan.scheme, self._world.size)
        reference_taps = taps_of(
            load_subject(REFERENCE), self._plan.config, scheme="reference", aux_layers=self._plan.case.aux_layers
        )
        compare = Comparer(self._plan, self._world, reference_taps, candidate.taps, self._report)
        for phase in self._plan.phases:
            wanted = expected.pop(phase)
            if self._plan.replays:
                candidate.replay(phase, wanted.choices)
            compare(
                phase,
                wanted,
                align(candidate.run(phase), candidate.taps, phase, self._world, self._plan.config.n_routed_experts),
            )
        caches = candidate.caches()
        for phase in [*expected, *(p for p in caches if p not in expected)]:
            seen = align(caches.get(phase, []), candidate.cache_taps, phase, self._world)
            compare(phase, expected.get(phase, Aligned()), seen)
        candidate.finish()
        if self._plan.grid is not None:
            mine = self._plan, self._world.rank, self._world.size
            self._report |= {"weight_norms": weight_norms(*mine), "lost_weights": lost_weights(*mine)}

    def _reference(self) -> Iterator[tuple[Phase, Aligned]]:
        """Every forward and the caches of the reference, complete on the rank that owns the rows."""
        alone = self._plan.reference_world < self._world.size
        complete = align_alone if alone else align
        if alone and self._world.rank > 0:
            for name in GROUPS:  # making a group takes all ranks of the world
                self._world.group(name, range(1))
            for phase in (*self._plan.phases, *self._plan.cache_phases):
                yield phase, align_alone([], {}, phase, self._world)
            return
        side = self._side("reference", REFERENCE, "reference", self._plan.reference_world)
        for phase in self._plan.phases:
            yield phase, complete(side.run(phase), side.taps, phase, self._world, self._plan.config.n_routed_experts)
        caches = side.caches()
        for phase in self._plan.cache_phases if alone else caches:
            yield phase, complete(caches.get(phase, []), side.cache_taps, phase, self._world)
        side.finish()

    def _side(self, role: str, subject: str, scheme: str, ranks: int) -> Side:
        side = Side(subject, self._plan, scheme, self._world, ranks, self._tokens, self._pool)
        self._report[role] = side.log
        side.start()
        return side
