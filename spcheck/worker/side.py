"""One subject of the pair on one rank: built, probed, and run phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from reference.checkpoint import TensorReader
from spcheck.comm.interface import Communicator, World
from spcheck.comm.recorded import CollectiveRecord, Recorded
from spcheck.phases import Phase
from spcheck.plan import Plan
from spcheck.subject import Chunk, Engine, Tap, load_subject
from spcheck.worker.align import Aligned, align
from spcheck.worker.capture import Capture, PaddingWriter, Piece


class _CacheTaps(dict[str, Tap]):
    """Every cache is held by every rank."""

    def __missing__(self, name: str) -> Tap:
        return name, "out", 0, "Replicate", "value"


_CACHE_TAPS = _CacheTaps()


class Side:
    """A built subject with hooks on. ``log`` is plain data for the parent and is kept current while it runs."""

    def __init__(
        self, name: str, plan: Plan, scheme: str, weights: TensorReader, world: World, tokens: list[Tensor]
    ) -> None:
        """``tokens[i]`` are the new token ids of request ``i``, on the device the subject runs on."""
        self.name = name
        self._trace = world.trace
        self._trace.begin(name, "build")
        self.log: dict[str, Any] = {"rows": [], "collectives": {}, "work": [], "silent": []}
        self._plan = plan
        self._world = world
        self._tokens = tokens
        self._records: list[CollectiveRecord] = []
        self._capture: Capture | None = None
        subject = load_subject(name)
        case = plan.case
        self._packed = subject.BATCHING == "packed"
        self.taps: Mapping[str, Tap] = subject.taps(plan.config, scheme=scheme, aux_layers=case.aux_layers)
        root = subject.build(
            plan.config,
            weights,
            self._groups(),
            dtype=getattr(torch, case.numerics),
            device=tokens[0].device,
            scheme=scheme,
            aux_layers=case.aux_layers,
            pad_to=case.pad_to,
            skip_padding=case.skip_padding,
        )
        self._start(root, list(subject.padding_inputs(plan.config)))

    def _start(self, root: nn.Module, padding_inputs: list[tuple[str, str, int]]) -> None:
        case = self._plan.case
        self._engine = cast(Engine, root)
        self._capture = Capture(root, self.taps, self._trace)
        self._padding = PaddingWriter(root, padding_inputs, case.padding_content, case.seed)
        self.log["scheme"] = self._engine.scheme
        self._engine.start([n + max(case.mtp_steps - 1, 0) for n in case.requests])

    def run(self, phase: Phase) -> Aligned:
        """One forward of all requests, then the exchange that completes its values."""
        self._trace.begin(self.name, f"{phase.kind} step {phase.call}")
        self._padding.expect(phase.real, phase.padded)
        everyone = list(range(len(phase.counts)))
        try:
            for requests in [everyone] if self._packed else [[r] for r in everyone]:
                self._forward(phase, requests)
        finally:
            pieces = self._hooks.drain()
            self._note(phase, pieces)
        return align(pieces, self.taps, phase, self._world)

    def caches(self) -> list[tuple[Phase, Aligned]]:
        """All caches, completed like the values of a forward: the rows of a cache are the positions it holds."""
        self._trace.begin(self.name, "caches")
        self.log["cached"] = {}
        by_phase: dict[Phase, list[Piece]] = {}
        caches = self._engine.state()
        # A collective behind the last forward belongs to none; it shows as surplus of the last one.
        last = next(reversed(self.log["collectives"]))
        self.log["collectives"][last] += [_plain(record) for record in self._records]
        for name, state in caches.items():
            held = [state[r] for r in range(len(self._tokens)) if r in state]
            self.log["cached"][name] = [len(rows) for rows in held]
            phase = self._plan.cache_phase(name)
            if held and phase.real:
                by_phase.setdefault(phase, []).append(Piece(name, torch.cat(held)))
        return [(phase, align(pieces, _CACHE_TAPS, phase, self._world)) for phase, pieces in by_phase.items()]

    def silent(self) -> list[str]:
        """Declared probes that never fired."""
        return sorted(set(self.taps) - self._hooks.fired)

    def _groups(self) -> dict[str, Communicator]:
        ranks = list(range(self._world.size))
        groups: dict[str, Communicator] = {}
        for name in ("tp", "ep"):
            inner = self._world.group(name, ranks)
            assert inner is not None, "at dp = 1 every rank is in both groups"
            groups[name] = Recorded(inner, self._records, self._module, self._trace)
        return groups

    @property
    def _hooks(self) -> Capture:
        assert self._capture is not None, "a side is run after it is built"
        return self._capture

    def _module(self) -> str:
        """The innermost probed module that runs; a subject may also call collectives while it is built."""
        return self._capture.module if self._capture else ""

    def _forward(self, phase: Phase, requests: Sequence[int]) -> None:
        if phase.kind == "target":
            chunks: list[Chunk] = [(r, phase.starts[r], self._tokens[r]) for r in requests]
            self._engine.step(chunks)
        else:
            self._engine.draft(requests, phase.call)

    def _note(self, phase: Phase, pieces: Sequence[Piece]) -> None:
        rows: dict[str, list[int]] = {}
        for piece in pieces:
            if self.taps[piece.probe][4] == "work":
                self.log["work"].append([piece.probe, phase.call, [int(n) for n in piece.value.tolist()]])
            else:
                rows.setdefault(piece.probe, []).append(piece.value.shape[0])
        self.log["rows"] += [[probe, phase.call, counts] for probe, counts in rows.items()]
        self.log["collectives"][f"{phase.kind} {phase.call}"] = [_plain(record) for record in self._records]
        self._records.clear()


def _plain(record: CollectiveRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in CollectiveRecord.__slots__}
