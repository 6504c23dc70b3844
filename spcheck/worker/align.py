"""From local pieces to the rows a rank owns: replicas are checked, shards joined, partial sums summed.

One packed exchange on the tool's own group after a forward; its sums run in rank order in the pieces' own type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from spcheck.comm.interface import World
from spcheck.phases import Phase
from spcheck.subject import Tap
from spcheck.worker.capture import Piece
from spcheck.worker.digests import fingerprint, row_digests

_REPLICAS = "#replicas"


@dataclass
class Aligned:
    """The complete values of one forward on the rank that owns them.

    ``values[probe]`` is [owned real rows, ...]; ``choices[probe]`` are the ids of all real rows, of replicated choices;
    ``replica_faults[probe]`` is (rank, packed row) of the first replica that differs from rank 0's (seen on rank 0
    only); ``order`` is the order in which probes fired here.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[str, Tensor] = field(default_factory=dict)
    replica_faults: dict[str, tuple[int, int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


def align(pieces: Sequence[Piece], taps: Mapping[str, Tap], phase: Phase, world: World, experts: int = 0) -> Aligned:
    """Completes what one forward of all requests left on the ranks; every rank of the world takes part.

    Several firings of a probe (request by request) are joined in order. Rank r computes the r-th block of ``experts``.
    """
    block = experts // world.size
    local = _joined(pieces, taps, range(world.rank * block, (world.rank + 1) * block))
    outgoing: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
    replicas = _replicas(local, taps, phase)
    digest = fingerprint(replicas) if world.size > 1 else torch.zeros(1)
    for box in outgoing:
        box[_REPLICAS] = digest
    for probe, value in local.items():
        if not taps[probe].per_request and taps[probe].placement in ("Shard(1)", "Partial"):
            _post(outgoing, probe, value, phase)
    incoming = world.swap(outgoing)
    aligned = Aligned(order=list(local))
    if not _all_same([box[_REPLICAS] for box in incoming]):
        aligned.replica_faults = _replica_faults(local, taps, phase, world)
    for probe, value in local.items():
        tap = taps[probe]
        if not tap.per_request and tap.placement in ("Shard(1)", "Partial"):
            parts = [box.get(probe) for box in incoming]
            aligned.values[probe] = _completed(parts, tap.placement).to(value.device)
        else:
            aligned.values[probe] = value[_own_slice(tap, phase, world.rank, world.size)]
        if tap.placement == "Replicate" and tap.kind in ("set", "token"):
            aligned.choices[probe] = value[: _rows(tap, phase)]
    return aligned


def align_alone(
    pieces: Sequence[Piece], taps: Mapping[str, Tap], phase: Phase, world: World, experts: int = 0
) -> Aligned:
    """The same where rank 0 alone ran the forward, as a world of one rank: it hands the rows to their owners."""
    local = _joined(pieces, taps, range(experts))
    outgoing: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
    for probe, value in local.items():
        for rank, box in enumerate(outgoing):
            box[probe] = value[_own_rows(taps[probe], phase, rank, world.size)].contiguous()
            if taps[probe].kind in ("set", "token"):
                box[_choice_key(probe)] = value
    received = world.swap(outgoing)[0]
    values = {probe: x for probe, x in received.items() if "#" not in probe}
    choices = {probe: received[_choice_key(probe)] for probe in values if _choice_key(probe) in received}
    return Aligned(values=values, choices=choices, order=list(local) or list(values))


def owned_rows(per_request: bool, phase: Phase, rank: int, tp: int) -> list[tuple[int, int]]:
    """(request, position) of each row that :func:`align` gives this rank for a probe."""
    if per_request:
        return [phase.last_row(r) for r in range(len(phase.counts))] if rank == 0 else []
    return [phase.row(i) for i in phase.owned(rank, tp)]


def _joined(pieces: Sequence[Piece], taps: Mapping[str, Tap], experts: range) -> dict[str, Tensor]:
    """Probe -> all its rows, in the order of the first firings. ``experts`` are those whose rows this rank computes."""
    firings: dict[str, list[Tensor]] = {}
    latest: dict[str, Tensor] = {}
    for probe, group in groupby(pieces, key=lambda piece: piece.probe):
        values = [piece.value for piece in group]
        latest[probe] = values[-1]
        tap = taps[probe]
        if tap.routed:
            ids = latest.get(probe.replace(".act_fn.out", ".order"), latest.get(tap.ids or ""))
            values = [_by_token(torch.cat(values), ids, experts if tap.placement == "Partial" else None)]
        if tap.compared:
            firings.setdefault(probe, []).extend(values)
    return {probe: _cat(values, taps[probe]) for probe, values in firings.items()}


def _by_token(rows: Tensor, ids: Tensor | None, experts: range | None) -> Tensor:
    """Rows [pairs, F] sorted by expert and token row -> [tokens, F, k], zero where another rank computes the pair.

    ``ids`` [tokens, k] are the experts; not a number where the rows are not as many as the ids say.
    """
    if ids is None:
        return rows.new_full((1, rows.shape[1], 1), math.nan)
    flat = ids.flatten()
    mine = flat >= 0 if experts is None else (flat >= experts.start) & (flat < experts.stop)
    places = mine.nonzero().flatten()
    places = places[flat[places].argsort(stable=True)]
    out = rows.new_zeros(flat.shape[0], rows.shape[1])
    if len(places) == len(rows):
        out[places] = rows
    else:
        out.fill_(math.nan)
    return out.view(*ids.shape, -1).transpose(1, 2)


def _cat(values: list[Tensor], tap: Tap) -> Tensor:
    """Rows below each other, [rows, width]; one value per key stays [rows, heads, keys]."""
    values = [v.unsqueeze(1) if v.ndim == 1 else v if tap.per_key or tap.routed else v.flatten(1) for v in values]
    if len(values) == 1:
        return values[0]
    if tap.per_key or tap.kind in ("scores", "logits", "set"):
        width = max(v.shape[-1] for v in values)
        values = [F.pad(v, (0, width - v.shape[-1]), value=tap.fill) for v in values]
    return torch.cat(values)


def _post(outgoing: list[dict[str, Tensor]], probe: str, value: Tensor, phase: Phase) -> None:
    """A piece of every row, to the rank that owns the row."""
    for rank, box in enumerate(outgoing):
        mine = phase.owned(rank, len(outgoing))
        box[probe] = value[mine.start : mine.stop].contiguous()


def _rows(tap: Tap, phase: Phase) -> int:
    return len(phase.counts) if tap.per_request else phase.real


def _own_slice(tap: Tap, phase: Phase, rank: int, tp: int) -> slice:
    if tap.placement == "Shard(0)" and not tap.per_request:
        return slice(0, len(phase.owned(rank, tp)))
    return _own_rows(tap, phase, rank, tp)


def _own_rows(tap: Tap, phase: Phase, rank: int, tp: int) -> slice:
    """The rows of a rank among all rows."""
    if tap.per_request:
        return slice(0, len(phase.counts) if rank == 0 else 0)
    mine = phase.owned(rank, tp)
    return slice(mine.start, mine.stop)


def _completed(parts: list[Tensor | None], placement: str) -> Tensor:
    present = [part for part in parts if part is not None]
    # A subject whose ranks disagree on the rows broke the token-count contract, and that is reported as such.
    rows = min(len(part) for part in present)
    present = [part[:rows] for part in present]
    if placement == "Shard(1)":
        return torch.cat(present, dim=1)
    total = present[0]
    for part in present[1:]:
        total = total + part
    return total


def _replicas(local: Mapping[str, Tensor], taps: Mapping[str, Tap], phase: Phase) -> dict[str, Tensor]:
    """The real rows of what every rank must hold alike."""
    return {p: x[: _rows(taps[p], phase)].flatten(1) for p, x in local.items() if taps[p].placement == "Replicate"}


def _all_same(fingerprints: list[Tensor]) -> bool:
    return all(torch.equal(x, fingerprints[0]) for x in fingerprints[1:])


def _replica_faults(
    local: Mapping[str, Tensor], taps: Mapping[str, Tap], phase: Phase, world: World
) -> dict[str, tuple[int, int]]:
    """Which replicas differ and where, on rank 0: a second exchange, of a fingerprint per row and probe.

    Every rank takes part, since all of them have seen the same fingerprints.
    """
    digests = {probe: row_digests(x) for probe, x in _replicas(local, taps, phase).items()}
    incoming = world.swap([digests if rank == 0 else {} for rank in range(world.size)])
    found = {probe: _replica_fault([box.get(probe) for box in incoming]) for probe in digests}
    return {probe: fault for probe, fault in found.items() if fault is not None} if world.rank == 0 else {}


def _replica_fault(digests: list[Tensor | None]) -> tuple[int, int] | None:
    base = digests[0]
    if base is None:
        return None
    for rank, other in enumerate(digests[1:], start=1):
        if other is None or other.shape != base.shape:
            return rank, 0
        differs = (other != base).nonzero()
        if len(differs):
            return rank, int(differs[0])
    return None


def _choice_key(probe: str) -> str:
    return f"{probe}#choices"
