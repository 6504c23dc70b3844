"""From local pieces to the rows a rank owns: replicas are checked, shards joined, partial sums summed.

One packed exchange on the tool's own group after a forward; its sums run in rank order in the pieces' own type. All but
the routed experts' rows stay within a data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from spcheck.comm.interface import World
from spcheck.plan.phases import Phase, Row
from spcheck.plan.place import Place
from spcheck.subjects.protocol import Tap
from spcheck.worker.capture import Piece
from spcheck.worker.digests import fingerprint, row_digests
from spcheck.worker.routed import Dispatch, by_token, joined, miscount

ReplicaFault = tuple[int, int, int | None]

_REPLICAS = "#replicas"
_CHOICES = "#choices"


@dataclass
class Aligned:
    """The complete values of one forward on the rank that owns them.

    ``values[probe]`` is [owned real rows, ...]; ``choices[probe]`` are the ids of all real rows of the data-parallel
    rank; ``replica_faults[probe]`` is (rank, packed row, source) of the first replica that differs from that of its
    first rank (seen only there), ``source`` another row whose value it holds, or None; ``order`` is the order in which
    probes fired here. ``miscounts[probe]`` is (rows, choices) where this rank's experts computed another number of rows
    than their choices say.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[str, Tensor] = field(default_factory=dict)
    replica_faults: dict[str, ReplicaFault] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    miscounts: dict[str, tuple[int, int]] = field(default_factory=dict)


def align(pieces: Sequence[Piece], taps: Mapping[str, Tap], world: World, dispatch: Dispatch) -> Aligned:
    """Completes what one forward of all requests left on the ranks; every rank of the world takes part.

    Several firings of a probe (request by request) are joined in order.
    """
    forward = _Forward(pieces, taps, world, dispatch)
    incoming = world.swap(forward.outgoing())
    replicas = [box[_REPLICAS] for box in incoming]
    aligned = forward.completed(incoming)
    # All ranks see the same fingerprints, so all of them know whether there is a second exchange.
    if any(not torch.equal(x, replicas[rank - rank % forward.place.tp]) for rank, x in enumerate(replicas)):
        aligned.replica_faults = forward.replica_faults()
    return aligned


class _Forward:
    """The local values of one forward on one rank, on their way to the ranks that own the rows."""

    def __init__(self, pieces: Sequence[Piece], taps: Mapping[str, Tap], world: World, dispatch: Dispatch) -> None:
        self.world = world
        self.taps = taps
        self.dispatch = dispatch
        self.place = dispatch.place
        self.phase = dispatch.phases[self.place.dp_rank]
        self.local, self.expert_ids, self.miscounts = _joined(pieces, taps, dispatch.experts(world.rank))

    def outgoing(self) -> list[dict[str, Tensor]]:
        """One box per rank of the world."""
        boxes: list[dict[str, Tensor]] = [{} for _ in range(self.world.size)]
        replicas = self._replicas()
        digest = fingerprint(replicas) if self.world.size > 1 else torch.zeros(1)
        for box in boxes:
            box[_REPLICAS] = digest
        for probe, value in self.local.items():
            tap = self.taps[probe]
            if _in_pieces(tap):
                self._post(boxes, probe, tap, value)
            elif tap.placement == "Shard(0)" and self.dispatch.replays(tap):
                for rank in self.place.peers:
                    boxes[rank][f"{probe}{_CHOICES}"] = value[: len(self._owned(self.place))].contiguous()
        return boxes

    def _post(self, boxes: list[dict[str, Tensor]], probe: str, tap: Tap, value: Tensor) -> None:
        """A piece of every row, to the rank that owns the row."""
        for rank in self.dispatch.ranks if tap.routed else self.place.peers:
            owner = Place(rank, self.place.tp, self.place.dp)
            if tap.routed:
                boxes[rank][probe] = self.dispatch.outgoing(probe, value, owner)
            else:
                mine = self._owned(owner)
                boxes[rank][probe] = value[mine.start : mine.stop].contiguous()

    def completed(self, incoming: Sequence[dict[str, Tensor]]) -> Aligned:
        """The values of the rows that this rank owns."""
        aligned = Aligned(order=list(self.local), miscounts=self.miscounts)
        for probe, value in self.local.items():
            tap = self.taps[probe]
            if tap.routed:
                parts = [incoming[rank].get(probe) for rank in self.dispatch.ranks]
                aligned.values[probe] = self.dispatch.completed(parts, self.expert_ids.get(probe)).to(value.device)
            elif _in_pieces(tap):
                present = [incoming[rank][probe] for rank in self.place.peers if probe in incoming[rank]]
                aligned.values[probe] = joined(present, tap.placement).to(value.device)
            else:
                aligned.values[probe] = value[_own_slice(tap, self.phase, self.place)]
            if self.dispatch.replays(tap):
                aligned.choices[probe] = self._choices(probe, tap, incoming)
        return aligned

    def _choices(self, probe: str, tap: Tap, incoming: Sequence[dict[str, Tensor]]) -> Tensor:
        """[all real rows, k]."""
        if tap.placement != "Shard(0)":
            return self.local[probe][: _rows(tap, self.phase)]
        return torch.cat([incoming[rank][f"{probe}{_CHOICES}"] for rank in self.place.peers])

    def replica_faults(self) -> dict[str, ReplicaFault]:
        """Which replicas differ and where, on a data-parallel rank's first rank: a fingerprint per row and probe."""
        first, peers = self.place.peers.start, self.place.peers
        digests = {probe: row_digests(x) for probe, x in self._replicas().items()}
        incoming = self.world.swap([digests if rank == first else {} for rank in range(self.world.size)])
        if self.world.rank != first:
            return {}
        found = {probe: _replica_fault([incoming[rank].get(probe) for rank in peers]) for probe in digests}
        return {probe: (first + fault[0], *fault[1:]) for probe, fault in found.items() if fault is not None}

    def _replicas(self) -> dict[str, Tensor]:
        """The real rows of what every rank must hold alike."""
        replicated = {probe: x for probe, x in self.local.items() if self.taps[probe].placement == "Replicate"}
        return {probe: x[: _rows(self.taps[probe], self.phase)].flatten(1) for probe, x in replicated.items()}

    def _owned(self, place: Place) -> range:
        return self.phase.owned(place.tp_rank, place.tp)


def align_alone(pieces: Sequence[Piece], taps: Mapping[str, Tap], world: World, dispatch: Dispatch) -> Aligned:
    """The same where the first rank alone ran a data-parallel rank's forward: it hands the rows to their owners."""
    place, phase = dispatch.place, dispatch.phases[dispatch.place.dp_rank]
    local, *_ = _joined(pieces, taps, None)
    outgoing: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
    for probe, value in local.items():
        for rank in place.peers:
            rows = _own_rows(taps[probe], phase, Place(rank, place.tp, place.dp))
            outgoing[rank][probe] = value[rows].contiguous()
            if dispatch.replays(taps[probe]):
                outgoing[rank][f"{probe}{_CHOICES}"] = value
    received = world.swap(outgoing)[place.peers.start]
    values = {probe: x for probe, x in received.items() if "#" not in probe}
    choices = {probe: received[f"{probe}{_CHOICES}"] for probe in values if f"{probe}{_CHOICES}" in received}
    return Aligned(values=values, choices=choices, order=list(local) or list(values))


def owned_rows(unit: str, phase: Phase, place: Place) -> list[Row]:
    """(request, position) of each entry that :func:`align` gives this rank for a probe."""
    if unit != "row":
        return phase.units(unit) if place.tp_rank == 0 else []
    return [phase.row(i) for i in phase.owned(place.tp_rank, place.tp)]


def _in_pieces(tap: Tap) -> bool:
    """Whether ranks hold parts of a row, to be joined by the one that owns it."""
    return tap.per_row and tap.placement in ("Shard(1)", "Partial")


def _joined(
    pieces: Sequence[Piece], taps: Mapping[str, Tap], experts: range | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Probe -> all its rows, in the order of the first firings; of routed probes the ids that went to the experts.

    And of these the rows and choices that are not as many.

    ``experts`` are those whose rows this rank computes, None for channels of all of them.
    """
    firings: dict[str, list[Tensor]] = {}
    latest: dict[str, Tensor] = {}
    expert_ids: dict[str, Tensor] = {}
    miscounts: dict[str, tuple[int, int]] = {}
    for probe, group in groupby(pieces, key=lambda piece: piece.probe):
        values = [piece.value for piece in group]
        latest[probe] = values[-1]
        tap = taps[probe]
        if tap.routed:
            experts_of = probe.removesuffix(".act_fn.out")
            ids = latest.get(f"{experts_of}.order", latest.get(tap.ids or ""))
            rows = torch.cat(values)
            if (counts := miscount(rows, ids, experts)) is not None:
                miscounts[probe] = counts
            values = [by_token(rows, ids, experts)]
            if f"{experts_of}.ids" in latest:
                expert_ids[probe] = latest[f"{experts_of}.ids"]
        if tap.compared:
            firings.setdefault(probe, []).extend(values)
    return {probe: _cat(values, taps[probe]) for probe, values in firings.items()}, expert_ids, miscounts


def _cat(values: list[Tensor], tap: Tap) -> Tensor:
    """Rows below each other, [rows, width]; one value per key stays [rows, heads, keys]."""
    values = [v.unsqueeze(1) if v.ndim == 1 else v if tap.per_key or tap.routed else v.flatten(1) for v in values]
    if len(values) == 1:
        return values[0]
    if tap.per_key or tap.kind in ("scores", "logits", "set"):
        width = max(v.shape[-1] for v in values)
        values = [F.pad(v, (0, width - v.shape[-1]), value=tap.fill) for v in values]
    return torch.cat(values)


def _rows(tap: Tap, phase: Phase) -> int:
    return len(phase.units(tap.unit))


def _own_slice(tap: Tap, phase: Phase, place: Place) -> slice:
    if tap.placement == "Shard(0)" and tap.per_row:
        return slice(0, len(phase.owned(place.tp_rank, place.tp)))
    return _own_rows(tap, phase, place)


def _own_rows(tap: Tap, phase: Phase, place: Place) -> slice:
    """The rows of a rank among all rows."""
    if not tap.per_row:
        return slice(0, _rows(tap, phase) if place.tp_rank == 0 else 0)
    mine = phase.owned(place.tp_rank, place.tp)
    return slice(mine.start, mine.stop)


def _replica_fault(digests: list[Tensor | None]) -> ReplicaFault | None:
    base = digests[0]
    if base is None:
        return None
    for rank, other in enumerate(digests[1:], start=1):
        if other is None or other.shape != base.shape:
            return rank, 0, None
        differs = (other != base).nonzero()
        if len(differs):
            row = int(differs[0])
            return rank, row, _row_that_is(other[row], row, other, base)
    return None


def _row_that_is(digest: Tensor, row: int, *replicas: Tensor) -> int | None:
    """Another row with this digest, None where there is none."""
    for digests in replicas:
        alike = (digests == digest).nonzero().flatten().tolist()
        if others := [other for other in alike if other != row]:
            return int(others[0])
    return None
