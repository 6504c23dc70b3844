"""The parameters of a built engine, held against the checkpoint on the rank that holds them.

Every parameter is compared when the engine is built. Its checksum is taken then and again at the end of a run, so that
one that a run writes into is found too. Only plain data leaves the rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reference.checkpoint import TensorReader
from spcheck.contracts.holdings import holdings
from spcheck.contracts.pieces import Holding, Piece
from spcheck.phases import module_of
from spcheck.plan import Plan
from spcheck.schemes import SidePlan
from spcheck.worker.expected import Expected, differing, region, same
from spcheck.worker.lookalike import Lookalikes

TURNS = 16
"""Behind each further case of an engine one of so many shares of its parameters is looked at, in turn."""

Fault = dict[str, Any]


class Slot(NamedTuple):
    """Where a parameter or buffer is kept: attribute ``attribute`` of ``module``."""

    module: nn.Module
    attribute: str

    @property
    def value(self) -> Tensor | None:
        """What is there now; None where nothing is, or nothing that has values."""
        value = getattr(self.module, self.attribute, None)
        return value if isinstance(value, Tensor) and not value.is_meta else None


class Loading:
    """What one engine holds; ``log`` is plain data for the parent, current after the build and after each run.

    Of ``log``, ``checked`` counts the parameters of the table, ``faults`` are in its order, ``unknown`` are parameters
    with storage of their own that it does not have, and ``replicas`` are checksums of what other ranks hold too.
    """

    def __init__(self, root: nn.Module, plan: Plan, side: SidePlan, rank: int, reader: TensorReader) -> None:
        self._table = {holding.name: holding for holding in holdings(plan, side, rank)}
        self._expected = Expected(plan, reader)
        self._lookalikes = Lookalikes(plan, side, rank, self._expected)
        parameters, buffers = _slots(root)
        self._slots = {**{name: slot for name, slot in buffers.items() if name in self._table}, **parameters}
        self._marks = {name: checksum(slot.value) for name, slot in self._slots.items()}
        self._runs = 0
        self.log: dict[str, Any] = {
            "checked": len(self._table),
            "faults": list(self._faults(self._table)),
            "unknown": self._unknown(),
            "replicas": self._replicas(),
        }

    def look_again(self) -> bool:
        """Behind a run: whether a parameter changed; it is a fault then. All are looked at once, later a share."""
        names = list(self._slots)
        if self._runs:
            names = names[self._runs % TURNS :: TURNS]
        self._runs += 1
        changed = [name for name in names if checksum(self._slots[name].value) != self._marks[name]]
        if changed:
            before = {fault["parameter"] for fault in self.log["faults"]}
            wrong = {f["parameter"]: f for f in self._faults(n for n in changed if n in self._table)}
            later = [{**wrong.get(n, {"parameter": n, "what": "changed"}), "later": True} for n in changed]
            self.log = {**self.log, "faults": self.log["faults"] + [f for f in later if f["parameter"] not in before]}
        return bool(changed)

    def _faults(self, names: Iterable[str]) -> Iterator[Fault]:
        """Of the first wrong values it is also told what they are instead."""
        hinted = False
        for name in names:
            fault, piece = self._fault(self._table[name])
            if piece is not None and not hinted:
                fault["hint"] = self._hint(name, piece)
                hinted = True
            if fault:
                yield {"parameter": name, **fault}

    def _fault(self, holding: Holding) -> tuple[Fault, Piece | None]:
        """What is wrong with a parameter, nothing where it is right, and its first wrong piece."""
        slot = self._slots.get(holding.name)
        found = None if slot is None else slot.value
        if found is None:
            return {"what": "missing"}, None
        if tuple(found.shape) != holding.shape:
            return {"what": "shape", "got": list(found.shape), "wanted": list(holding.shape)}, None
        dtype = self._expected.dtype(holding)
        if found.dtype != dtype:
            return {"what": "type", "got": _type_name(found.dtype), "wanted": _type_name(dtype)}, None
        return self._wrong_values(holding, found)

    def _wrong_values(self, holding: Holding, found: Tensor) -> tuple[Fault, Piece | None]:
        fault: Fault = {}
        first, count = None, 0
        for piece in holding.pieces:
            have = region(found, piece)
            wanted = self._expected.piece(piece, found.dtype).to(found.device)
            if same(have, wanted):
                continue
            places = differing(have, wanted).nonzero()
            count += places.shape[0]
            if first is None:
                first, inner = piece, tuple(places[0].tolist())
                index = [start + i for (start, _), i in zip(piece.target, inner, strict=True)]
                fault = {"what": "values", "index": index, "of": piece.tensor}
                fault |= {"got": float(have[inner]), "wanted": float(wanted[inner])}
        if first is not None:
            fault |= {"count": count, "elements": found.numel()}
        return fault, first

    def _hint(self, name: str, piece: Piece) -> str:
        found = self._slots[name].value
        assert found is not None, "it was compared"
        return self._lookalikes.hint(self._table[name], piece, region(found, piece))

    def _unknown(self) -> list[str]:
        """Parameters that the table does not have; one that shares its storage with one of the table is checked."""
        values = {name: slot.value for name, slot in self._slots.items()}
        known = {_storage(x) for name, x in values.items() if name in self._table and x is not None}
        return [n for n, x in values.items() if n not in self._table and (x is None or _storage(x) not in known)]

    def _replicas(self) -> dict[str, dict[str, int]]:
        """By the ranks that divide them, by module: one checksum for its parameters."""
        marks: dict[str, dict[str, int]] = {"": {}, "tp": {}}
        for name, holding in self._table.items():
            if holding.divided in marks:
                module, of_kind = module_of(name), marks[holding.divided]
                of_kind[module] = zlib.crc32(str(self._marks.get(name)).encode(), of_kind.get(module, 0))
        return marks


def checksum(x: Tensor | None) -> int | None:
    """Of a tensor's shape, type and bits; another value anywhere changes it. None of None."""
    if x is None:
        return None
    kind = zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode())
    return zlib.crc32(x.detach().reshape(-1).view(torch.uint8).numpy(force=True).data, kind)


def _slots(root: nn.Module) -> tuple[dict[str, Slot], dict[str, Slot]]:
    """Parameters and buffers by name, those too that several modules share."""
    parameters, buffers = {}, {}
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            parameters[prefix + name] = Slot(module, name)
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            buffers[prefix + name] = Slot(module, name)
    return parameters, buffers


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
