"""A subject built on a rank, with its hooks on; kept from case to case where the next one needs the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from spcheck.case import Case, Resolved, engine_values, handed_values
from spcheck.comm.interface import Communicator, World
from spcheck.comm.recorded import CollectiveRecord, Recorded
from spcheck.comm.trace import Trace
from spcheck.plan.phases import module_of
from spcheck.plan.place import groups_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.subjects.protocol import Engine, Tap, load_subject, taps_of
from spcheck.subjects.setup import Setup
from spcheck.worker.capture import Capture, PaddingWriter
from spcheck.worker.loading import Loading
from spcheck.worker.replay import Replay
from spcheck.worker.snap import Snapper
from spcheck.worker.weights import open_weights


@dataclass
class Built:
    """An engine and everything that hangs on it. ``groups`` are the communicators it was handed.

    ``parameters`` are the bytes that each of its modules holds (:func:`spcheck.plan.phases.module_of`), ``loading``
    how its parameters compare with the checkpoint.
    """

    engine: Engine
    parameters: dict[str, int]
    loading: Loading
    packed: bool
    taps: Mapping[str, Tap]
    groups: dict[str, Recorded]
    capture: Capture
    padding: PaddingWriter
    snapper: Snapper | None
    replay: Replay

    def join(
        self,
        groups: Mapping[str, Communicator],
        records: list[CollectiveRecord],
        module: Callable[[], str],
        trace: Trace,
    ) -> None:
        """Connects the engine to the groups of a new world; what it calls is appended to ``records``."""
        for name, group in self.groups.items():
            group.join(groups[name], records, module, trace)


def own_groups(world: World, side: SidePlan, case: Case) -> dict[str, Communicator]:
    """The groups that this rank is in; making one takes all ranks of the world, members or not."""
    groups = groups_of(case.tp, case.dp, side.tp, plain=side.plain)
    made = [(name, world.group(name, ranks)) for name, ranks in groups]
    return {name: group for name, group in made if group is not None}


class EnginePool:
    """Engines by what they were built from. Not shared between threads that run at the same time.

    ``limit`` is the number of engines kept over the end of a case: none, unless the caller has several cases.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._engines: dict[tuple[object, ...], Built] = {}

    def keep(self, limit: int) -> None:
        """Changes how many engines are kept."""
        self._limit = limit

    def take(self, key: tuple[object, ...]) -> Built | None:
        """An engine that nobody uses, or None. A case that fails never gives it back."""
        return self._engines.pop(key, None)

    def give_back(self, key: tuple[object, ...], built: Built) -> None:
        """Keeps an engine after a case; the one that has waited longest goes when there are too many."""
        self._engines[key] = built
        while len(self._engines) > self._limit:
            del self._engines[next(iter(self._engines))]


def build_key(side: SidePlan, plan: Plan, rank: int, device: torch.device) -> tuple[object, ...]:
    """Everything that a built engine depends on.

    That is every setting of the case, unless its declaration names what it comes to or says why it does not count.
    """
    return (rank, device, *_resolved(side, plan).values(), *engine_values(plan.case))


def _resolved(side: SidePlan, plan: Plan) -> dict[Resolved, Hashable]:
    """What the plan makes of settings that an engine depends on."""
    return {
        "data parallel size": plan.case.dp,
        "model": (plan.folder, plan.config),
        "arithmetic": (plan.dtype, plan.grid),
        "side": side,
    }


def build(side: SidePlan, plan: Plan, rank: int, device: torch.device, groups: dict[str, Recorded]) -> Built:
    """Builds a subject on a rank of the world, and compares its parameters with the checkpoint.

    The hooks are put on in this order: what captures sees a value before it is replaced.
    """
    subject = load_subject(side.module)
    taps = side_taps(side, plan)
    root = build_bare(side, plan, device, groups)
    capture = Capture(root, taps)
    return Built(
        engine=cast(Engine, root),
        parameters=_parameter_bytes(root),
        loading=Loading(root, plan, side, rank, open_weights(plan)),
        packed=subject.BATCHING == "packed",
        taps=taps,
        groups=groups,
        capture=capture,
        padding=PaddingWriter(root, list(subject.padding_inputs(plan.config))),
        # The guard bounds the reference's values.
        snapper=Snapper(root, plan.config, plan.grid, watch=side.is_reference) if plan.grid else None,
        replay=Replay(root, taps, capture.goes_on_with),
    )


def build_bare(side: SidePlan, plan: Plan, device: torch.device, groups: Mapping[str, Communicator]) -> nn.Module:
    """The subject as a case asks for it, without any hook; ``groups`` are those that :func:`own_groups` names."""
    return load_subject(side.module).build(setup_of(side, plan, device, groups))


def setup_of(side: SidePlan, plan: Plan, device: torch.device, groups: Mapping[str, Communicator]) -> Setup:
    """What a side's subject is told."""
    return Setup(
        config=plan.config,
        weights=open_weights(plan),
        groups=groups,
        dtype=getattr(torch, plan.dtype),
        device=device,
        scheme=side.asked,
        **handed_values(plan.case),
    )


def _parameter_bytes(root: nn.Module) -> dict[str, int]:
    """Bytes by module, of whole storages: a slice keeps all of what it is cut from.

    What lies in one storage under two names counts for the first.
    """
    named = [(name, x.untyped_storage()) for name, x in reversed(list(root.named_parameters()))]
    places = {storage.data_ptr(): (module_of(name), storage.nbytes()) for name, storage in named}
    held: Counter[str] = Counter()
    for module, size in places.values():
        held[module] += size
    return dict(held)


def side_taps(side: SidePlan, plan: Plan) -> dict[str, Tap]:
    """Where the probes of a side stand."""
    case = plan.case
    return taps_of(
        load_subject(side.module),
        plan.config,
        scheme=side.scheme,
        aux_layers=case.aux_layers,
        expert_parallel=case.expert_parallel,
    )
