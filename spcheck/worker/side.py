"""One subject of the pair on one rank: probed, and run phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spcheck.comm.interface import World
from spcheck.comm.recorded import CollectiveRecord, Recorded
from spcheck.phases import Phase
from spcheck.plan import Plan
from spcheck.subject import Chunk, Tap
from spcheck.worker.built import GROUPS, Built, EnginePool, build, build_key
from spcheck.worker.capture import Piece

_RESIDUAL = ("layernorm.in", "norm.in")


class Side:
    """A subject in one case. ``log`` is plain data for the parent and is kept current while it runs."""

    def __init__(
        self,
        subject: str,
        plan: Plan,
        scheme: str,
        world: World,
        ranks: int,
        tokens: list[Tensor],
        pool: EnginePool,
    ) -> None:
        """``ranks`` of the world run it; ``tokens[i]`` are the new ids of request ``i``, on the subject's device."""
        self.subject = subject
        self.log: dict[str, Any] = {"rows": [], "collectives": {}, "work": [], "silent": []}
        self._plan = plan
        self._scheme = scheme
        self._world = world
        self._ranks = ranks
        self._tokens = tokens
        self._pool = pool
        self._key = build_key(subject, scheme, plan, world.rank, ranks, tokens[0].device)
        self._trace = world.trace
        self._records: list[CollectiveRecord] = []
        self._built: Built | None = None

    def start(self) -> None:
        """Builds the subject, or takes a built one, and makes it forget all requests."""
        self._trace.begin(self.subject, "build")  # loading weights and putting hooks on is part of it
        self._built = self._pool.take(self._key)
        if self._built is None:
            self._built = build(self.subject, self._plan, self._scheme, self._tokens[0].device, self._groups())
        else:
            self._built.join(self._world, self._ranks, self._records, self._module)
        self._built.capture.start(self._trace)
        if self._built.snapper:
            self._built.snapper.start()
        self.log["scheme"] = self._built.engine.scheme
        case = self._plan.case
        self._built.engine.start([n + max(case.mtp_steps - 1, 0) for n in case.requests])
        self._trace.begin("", "comparison")

    @property
    def taps(self) -> Mapping[str, Tap]:
        """The subject's probes."""
        return self._ready.taps

    def replay(self, phase: Phase, chosen: Mapping[str, Tensor]) -> None:
        """Lets the next forward go on with these choices of all real rows."""
        self._ready.replay.expect(phase, self._world.rank, self._ranks, chosen)

    def run(self, phase: Phase) -> list[Piece]:
        """One forward of all requests: what the probes held on this rank."""
        self._trace.begin(self.subject, f"{phase.kind} step {phase.call}")
        case = self._plan.case
        self._ready.padding.expect(phase.real, phase.padded, case.padding_content, case.seed)
        if self._ready.snapper and self._ready.packed:
            mine = len(phase.owned(self._world.rank, self._ranks))
            self._ready.snapper.expect({phase.padded: phase.real, phase.shard_rows(self._ranks): mine})
        everyone = list(range(len(phase.counts)))
        try:
            for requests in [everyone] if self._ready.packed else [[r] for r in everyone]:
                self._forward(phase, requests)
        finally:
            pieces = self._ready.capture.drain()
            self._note(phase, pieces)
        self._trace.begin("", "comparison")
        return pieces

    def caches(self) -> dict[Phase, list[Piece]]:
        """All caches: the rows of a cache are the positions it holds, request by request."""
        self._trace.begin(self.subject, "caches")
        self.log["cached"] = {}
        by_phase: dict[Phase, list[Piece]] = {}
        caches = self._ready.engine.state()
        self._trace.begin("", "comparison")
        # A collective behind the last forward belongs to none; it shows as surplus of the last one.
        last = next(reversed(self.log["collectives"]))
        self.log["collectives"][last] += [_plain(record) for record in self._records]
        for name, state in caches.items():
            held = [state[r] for r in range(len(self._tokens)) if r in state]
            self.log["cached"][name] = [len(rows) for rows in held]
            phase = self._plan.cache_phase(name)
            if held and phase.real:
                by_phase.setdefault(phase, []).append(Piece(name, torch.cat(held)))
        return by_phase

    @property
    def cache_taps(self) -> Mapping[str, Tap]:
        """Every cache is held by every rank."""
        return {name: Tap(name, "out", 0, "Replicate", "value") for name in self.log.get("cached", ())}

    def finish(self) -> None:
        """Says what never fired and what the guard needs, and leaves the engine to the next case."""
        built = self._ready
        self.log["silent"] = sorted(set(built.taps) - built.capture.fired)
        if built.snapper:
            self.log |= {"off_grid": built.snapper.off_grid, "norms": built.snapper.plain_norms()}
            self.log["not_rounded"] = self._unrounded(built.snapper.silent())
        self._pool.give_back(self._key, built)

    def _unrounded(self, silent: list[str]) -> list[str]:
        """Snaps that had to fire and did not; those of an MTP layer fire only in its draft steps."""
        ran = {self._plan.mtp_layer(step) for step in range(self._plan.case.mtp_steps)}
        idle = [f"model.layers.{i}." for i in self._plan.config.mtp_layers if i not in ran]
        return [name for name in silent if not name.startswith(tuple(idle))]

    def _groups(self) -> dict[str, Recorded]:
        groups: dict[str, Recorded] = {}
        for name in GROUPS:
            inner = self._world.group(name, range(self._ranks))
            assert inner is not None, "only a rank of the group builds the subject"
            groups[name] = Recorded(inner, self._records, self._module, self._trace)
        return groups

    @property
    def _ready(self) -> Built:
        assert self._built is not None, "a side is run after it is started"
        return self._built

    def _module(self) -> str:
        """The innermost probed module that runs; a subject may also call collectives while it is built."""
        return self._built.capture.module if self._built else ""

    def _forward(self, phase: Phase, requests: Sequence[int]) -> None:
        if phase.kind == "target":
            chunks: list[Chunk] = [(r, phase.starts[r], self._tokens[r]) for r in requests]
            self._ready.engine.step(chunks)
        else:
            self._ready.engine.draft(requests, phase.call)

    def _note(self, phase: Phase, pieces: Sequence[Piece]) -> None:
        rows: dict[str, list[int]] = {}
        snapper = self._ready.snapper
        for piece in pieces:
            tap = self.taps[piece.probe]
            if tap.kind == "work":
                self.log["work"].append([piece.probe, phase.call, [int(n) for n in piece.value.tolist()]])
            elif tap.compared and not tap.routed:
                rows.setdefault(piece.probe, []).append(piece.value.shape[0])
            if snapper and not self._ready.packed and piece.probe.endswith(_RESIDUAL):
                snapper.see_largest(piece.probe, piece.value)
        self.log["rows"] += [[probe, phase.call, counts] for probe, counts in rows.items()]
        self.log["collectives"][f"{phase.kind} {phase.call}"] = [_plain(record) for record in self._records]
        self._records.clear()


def _plain(record: CollectiveRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in CollectiveRecord.__slots__}
