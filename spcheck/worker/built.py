"""A subject built on a rank, with its hooks on; kept from case to case where the next one needs the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from spcheck.comm.interface import World
from spcheck.comm.recorded import CollectiveRecord, Recorded
from spcheck.plan import Plan
from spcheck.subject import Engine, Tap, load_subject, taps_of
from spcheck.worker.capture import Capture, PaddingWriter
from spcheck.worker.replay import Replay
from spcheck.worker.snap import Snapper
from spcheck.worker.weights import open_weights

GROUPS = ("tp", "ep")


@dataclass
class Built:
    """An engine and everything that hangs on it. ``groups`` are the communicators it was handed."""

    engine: Engine
    packed: bool
    taps: Mapping[str, Tap]
    groups: dict[str, Recorded]
    capture: Capture
    padding: PaddingWriter
    snapper: Snapper | None
    replay: Replay

    def join(self, world: World, ranks: int, records: list[CollectiveRecord], module: Callable[[], str]) -> None:
        """Connects the engine to the first ``ranks`` of a new world; what it calls is appended to ``records``."""
        for name, group in self.groups.items():
            inner = world.group(name, range(ranks))
            assert inner is not None, "only a rank of the group has this engine"
            group.join(inner, records, module, world.trace)


class EnginePool:
    """Engines by what they were built from. Not shared between threads that run at the same time.

    ``limit`` is the number of engines kept over the end of a case: none, unless the caller has several cases.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._engines: dict[tuple[object, ...], Built] = {}

    def take(self, key: tuple[object, ...]) -> Built | None:
        """An engine that nobody uses, or None. A case that fails never gives it back."""
        return self._engines.pop(key, None)

    def give_back(self, key: tuple[object, ...], built: Built) -> None:
        """Keeps an engine after a case; the one that has waited longest goes when there are too many."""
        self._engines[key] = built
        while len(self._engines) > self._limit:
            del self._engines[next(iter(self._engines))]


def build_key(subject: str, scheme: str, plan: Plan, rank: int, ranks: int, device: torch.device) -> tuple[object, ...]:
    """Everything that a built engine depends on."""
    case = plan.case
    return (
        *(subject, scheme, rank, ranks, device, plan.dtype, plan.grid),
        *(plan.folder, plan.config, case.seed, case.aux_layers, case.pad_to, case.skip_padding),
    )


def build(
    subject_name: str,
    plan: Plan,
    scheme: str,
    device: torch.device,
    groups: dict[str, Recorded],
) -> Built:
    """Builds a subject and puts the hooks on, in this order: what captures sees a value before it is replaced."""
    subject = load_subject(subject_name)
    case = plan.case
    taps = taps_of(subject, plan.config, scheme=scheme, aux_layers=case.aux_layers)
    root = subject.build(
        plan.config,
        open_weights(plan),
        groups,
        dtype=getattr(torch, plan.dtype),
        device=device,
        scheme=scheme,
        aux_layers=case.aux_layers,
        pad_to=case.pad_to,
        skip_padding=case.skip_padding,
    )
    packed = subject.BATCHING == "packed"
    return Built(
        engine=cast(Engine, root),
        packed=packed,
        taps=taps,
        groups=groups,
        capture=Capture(root, taps),
        padding=PaddingWriter(root, list(subject.padding_inputs(plan.config))),
        # Norms are taken where there are real rows only.
        snapper=Snapper(root, plan.config, plan.grid, watch=not packed) if plan.grid else None,
        replay=Replay(root, taps),
    )
