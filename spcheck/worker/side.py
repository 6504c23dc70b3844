"""One subject of the pair on one rank: probed, and run phase by phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from spcheck.comm.interface import World
from spcheck.comm.recorded import CollectiveRecord, Recorded
from spcheck.families.deepseek.rows import must_fire
from spcheck.plan.dispatch import carries_ids
from spcheck.plan.phases import Phase
from spcheck.plan.place import Place
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.subjects.protocol import Tap
from spcheck.worker.built import Built, EnginePool, build, build_key, own_groups
from spcheck.worker.capture import Piece
from spcheck.worker.expert_rows import padded_choices
from spcheck.worker.script import Script

_RESIDUAL = ("input_layernorm.in", "post_attention_layernorm.in", "model.norm.in", "shared_head.norm.in")


class Side:
    """A subject in one case. ``log`` is plain data for the parent and is kept current while it runs."""

    def __init__(self, side: SidePlan, script: Script, world: World, pool: EnginePool) -> None:
        self.plan = side
        self.log: dict[str, Any] = {
            "rows": [],
            "collectives": {},
            "work": [],
            "padded": [],
            "silent": [],
            "row_bytes": {},
            "tokens": [],
        }
        self.received: dict[str, tuple[int, ...]] = {}
        """Module -> the rows that its last all-to-all of expert ids got from each rank."""
        self.sampled: list[int] = []
        """The tokens of the last forward, of every row that is sampled."""
        self._script = script
        self._world = world
        self._place: Place = script.plan.place(world.rank)
        self._pool = pool
        self._key: tuple[object, ...] = ()
        self._trace = world.trace
        self._records: list[CollectiveRecord] = []
        self._built: Built | None = None

    def start(self, device: torch.device) -> None:
        """Builds the subject, or takes a built one, and makes it forget all requests."""
        self._trace.begin(self.plan.module, "build")  # loading weights and putting hooks on is part of it
        self._key = build_key(self.plan, self._plan, self._world.rank, device)
        groups = own_groups(self._world, self.plan, self._plan.case)
        self._built = self._pool.take(self._key)
        if self._built is None:
            recorded = {n: Recorded(g, self._records, self._module, self._trace) for n, g in groups.items()}
            self._built = build(self.plan, self._plan, self._world.rank, device, recorded)
        else:
            self._built.join(groups, self._records, self._module, self._trace)
        self._begin(self._built)
        self._trace.begin("", "comparison")

    def _begin(self, built: Built) -> None:
        case, dp_rank = self._plan.case, self._place.dp_rank
        built.capture.start(self._trace)
        built.padding.start(case.padding_content, case.seed)
        if built.snapper:
            built.snapper.start()
        self.log |= {"scheme": built.engine.scheme, "parameters": built.parameters, "loading": built.loading.log}
        built.engine.start(self._plan.lengths(dp_rank), self._plan.adapters(dp_rank))

    @property
    def taps(self) -> Mapping[str, Tap]:
        """The subject's probes."""
        return self._ready.taps

    @property
    def _plan(self) -> Plan:
        """As far as it is known: it grows while the reference runs."""
        return self._script.plan

    def replay(self, phase: Phase, chosen: Mapping[str, Tensor]) -> None:
        """Lets the next forward go on with these choices of all real rows."""
        replay = self._ready.replay
        replay.expect({probe: self._firings(phase, tap) for probe, tap in replay.probes.items()}, chosen)

    def _firings(self, phase: Phase, tap: Tap) -> list[slice]:
        """Of all rows, samples or requests those of each firing."""
        counts = {"row": phase.counts, "sample": phase.samples}.get(tap.unit, [1] * len(phase.counts))
        if not self._ready.packed:
            ends = list(accumulate(counts))
            return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        mine = self._owned(phase)
        return [slice(mine.start, mine.stop) if tap.placement == "Shard(0)" else slice(0, sum(counts))]

    def run(self, phase: Phase) -> list[Piece]:
        """One forward of all requests: what the probes held on this rank."""
        self._trace.begin(self.plan.module, self._plan.forward_name(phase.kind, phase.call))
        self._ready.capture.watch(None if phase.probed else self._always_watched)
        self._ready.padding.expect(phase.real, phase.padded)
        if self._ready.snapper and self._ready.packed:
            self._ready.snapper.expect(self._real_rows(phase))
        everyone = list(phase.requests)
        try:
            for requests in [everyone] if self._ready.packed else [[r] for r in everyone]:
                self._forward(phase, requests)
        finally:
            pieces = self._ready.capture.drain()
            self._note(phase, pieces)
        self._trace.begin("", "comparison")
        return pieces

    def caches(self) -> list[list[Piece]]:
        """All caches, by the plan's cache phases: the rows of one are the positions it holds, request by request."""
        self._trace.begin(self.plan.module, "caches")
        self.log["cached"] = {}
        phases = self._plan.cache_phases(self._place.dp_rank)
        pieces: list[list[Piece]] = [[] for _ in phases]
        caches = self._ready.engine.state()
        self._trace.begin("", "comparison")
        # A collective behind the last forward belongs to none; it shows as surplus of the last one.
        last = next(reversed(self.log["collectives"]))
        self.log["collectives"][last] += [_plain(record) for record in self._records]
        requests = range(len(self._plan.prompts(self._place.dp_rank)))
        for name, state in caches.items():
            held = [state[r] for r in requests if r in state]
            strangers = sorted(set(state) - set(requests))  # a finding: nobody asked for them
            self.log["cached"][name] = [len(state.get(r, ())) for r in (*requests, *strangers)]
            phase = self._plan.cache_phase(name, self._place.dp_rank)
            if held and phase.real and phase in phases:
                pieces[phases.index(phase)].append(Piece(name, torch.cat(held)))
        return pieces

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
        if built.loading.look_again():
            self.log["loading"] = built.loading.log
            return  # no other case is to run on what this one left
        self._pool.give_back(self._key, built)

    def _unrounded(self, silent: list[str]) -> list[str]:
        """Snaps that had to fire and did not."""
        return [name for name in silent if must_fire(name, self._plan, self.plan, self._place.dp_rank)]

    @property
    def _ready(self) -> Built:
        assert self._built is not None, "a side is run after it is started"
        return self._built

    def _module(self) -> str:
        """The innermost probed module that runs; a subject may also call collectives while it is built."""
        return self._built.capture.module if self._built else ""

    def _real_rows(self, phase: Phase) -> dict[int, int]:
        """Of so many rows so many are real. Where a shard looks like a batch, the more: padding more is no harm."""
        real = {phase.padded: phase.real}
        if self.plan.sharded:
            rows = phase.shard_rows(self.plan.tp)
            real[rows] = max(len(self._owned(phase)), real.get(rows, 0))
        return real

    def _owned(self, phase: Phase) -> range:
        return phase.owned(self._place.tp_rank, self.plan.tp)

    def _forward(self, phase: Phase, requests: Sequence[int]) -> None:
        if phase.kind == "target":
            self._ready.engine.step(self._script.chunks(phase, self._place.dp_rank, requests))
        else:
            self._ready.engine.draft(requests, phase.draft)

    @property
    def _always_watched(self) -> set[str]:
        """What is copied in a forward that is not compared: choices to be replayed, streams that the guard bounds."""
        choices = self._ready.replay.probes if self._plan.replays_choices else ()
        streams = [probe for probe in self.taps if probe.endswith(_RESIDUAL)] if self._bounds_streams else ()
        return {*choices, *streams}

    def _note(self, phase: Phase, pieces: Sequence[Piece]) -> None:
        self.sampled = [
            int(t) for p in pieces if self.taps[p.probe].kind == "token" for t in p.value.flatten().tolist()
        ]
        if phase.probed:
            self._note_rows(phase, pieces)
            self._note_padding(phase, pieces)
        for piece in pieces:
            self._see_residual(phase, piece)
        self.log["collectives"][f"{phase.kind} {phase.call}"] = [_plain(record) for record in self._records]
        ids = [r for r in self._records if carries_ids(r.kind, r.dtype, len(r.shape))]
        self.received = {record.module: record.receive for record in ids}
        self._records.clear()

    def _note_rows(self, phase: Phase, pieces: Sequence[Piece]) -> None:
        rows: dict[str, list[int]] = {}
        steers: dict[str, list[int]] = {}
        for piece in pieces:
            tap = self.taps[piece.probe]
            if tap.kind == "work":
                self.log["work"].append([piece.probe, phase.call, [int(n) for n in piece.value.tolist()]])
            elif tap.compared and not tap.routed:
                rows.setdefault(piece.probe, []).append(piece.value.shape[0])
            if tap.kind == "value":
                size = math.prod(piece.value.shape[1:]) * piece.value.element_size()
                sizes = self.log["row_bytes"].setdefault(piece.probe, [])
                sizes += [size] if size not in sizes else []
            elif tap.steers and self._script.generates:
                steers.setdefault(piece.probe, []).extend(int(n) for n in piece.value.flatten().tolist())
        self.log["rows"] += [[probe, phase.call, counts] for probe, counts in rows.items()]
        self.log["tokens"] += [[probe, phase.call, tokens] for probe, tokens in steers.items()]

    def _note_padding(self, phase: Phase, pieces: Sequence[Piece]) -> None:
        """Of padded rows that are routed: where their own gates send them."""
        if self.plan.plain or self._plan.case.skip_padding:
            return
        for entry in padded_choices(self._plan, self.taps, pieces, lambda tap: self._real(phase, tap)):
            self.log["padded"].append({"call": phase.call, **entry})

    def _real(self, phase: Phase, tap: Tap) -> int:
        """Of the local rows of a tap those that are tokens; they stand before all others."""
        return len(self._owned(phase)) if tap.placement == "Shard(0)" else phase.real

    @property
    def _bounds_streams(self) -> bool:
        """The guard bounds the reference's residual streams as well, which pass no snap."""
        return self._ready.snapper is not None and self.plan.is_reference

    def _see_residual(self, phase: Phase, piece: Piece) -> None:
        snapper = self._ready.snapper
        if snapper and self._bounds_streams and piece.probe.endswith(_RESIDUAL):
            snapper.see_largest(piece.probe, piece.value[: self._real(phase, self.taps[piece.probe])])


def _plain(record: CollectiveRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in CollectiveRecord.__slots__}
