"""The parameters of a built engine, held against the checkpoint on the rank that holds them.

Every parameter is compared when the engine is built. Its checksum is taken then and again at the end of a run, so that
one that a run writes into is found too. Only plain data leaves the rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from reference.checkpoint import TensorReader
from spcheck.families.deepseek.holdings import holdings
from spcheck.families.deepseek.pieces import Holding, Piece
from spcheck.plan.phases import module_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.worker.expected import Expected, differing, region, row_of, same
from spcheck.worker.lookalike import Lookalikes
from spcheck.worker.slots import slots

TURNS = 16
"""Behind each further case of an engine one of so many shares of its parameters is looked at, in turn."""

_TOGETHER = 2**16  # elements of pieces that are compared in one go; with more, reading costs more than calling

Fault = dict[str, Any]
Entry = tuple[Holding, Piece]


class Loading:
    """What one engine holds; ``log`` is plain data for the parent, current after the build and after each run.

    Of ``log``, ``checked`` counts the parameters of the table, ``faults`` are in its order, ``unknown`` are parameters
    with storage of their own that it does not have, and ``replicas`` are checksums of what other ranks hold too.
    """

    def __init__(self, root: nn.Module, plan: Plan, side: SidePlan, rank: int, reader: TensorReader) -> None:
        self._table = {holding.name: holding for holding in holdings(plan, side, rank)}
        self._expected = Expected(plan, reader)
        self._lookalikes = Lookalikes(plan, side, rank, self._expected)
        self._slots = slots(root, self._table)
        self._marks = {name: slot.mark() for name, slot in self._slots.items()}
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
        changed = [name for name in names if self._slots[name].mark() != self._marks[name]]
        if changed:
            before = {fault["parameter"] for fault in self.log["faults"]}
            wrong = {f["parameter"]: f for f in self._faults(n for n in changed if n in self._table)}
            later = [{**wrong.get(n, {"parameter": n, "what": "changed"}), "later": True} for n in changed]
            self.log = {**self.log, "faults": self.log["faults"] + [f for f in later if f["parameter"] not in before]}
        return bool(changed)

    def _faults(self, names: Iterable[str]) -> Iterator[Fault]:
        """In the order of ``names``. Of the first wrong values it is also told what they are instead."""
        hinted = False
        for name in self._suspects([self._table[name] for name in names]):
            fault, piece = self._fault(self._table[name])
            if piece is not None and not hinted:
                fault["hint"] = self._hint(name, piece)
                hinted = True
            if fault:
                yield {"parameter": name, **fault}

    def _suspects(self, asked: Sequence[Holding]) -> list[str]:
        """Parameters that are not whole, or are compared together with one that is wrong."""
        suspects = {holding.name for holding in asked if self._misfit(holding)}
        entries = [(h, p) for h in asked if h.name not in suspects for p in h.pieces]
        for batch in _batches(entries):
            if not self._is_right(batch):
                suspects |= {holding.name for holding, _ in batch}
        self._expected.forget()
        return [holding.name for holding in asked if holding.name in suspects]

    def _is_right(self, batch: Sequence[Entry]) -> bool:
        found = row_of([region(self._value(holding), piece) for holding, piece in batch])
        wanted = self._expected.row((piece for _, piece in batch), found.dtype)
        return same(found, wanted.to(found.device))

    def _value(self, holding: Holding) -> Tensor:
        value = self._slots[holding.name].value
        assert value is not None, "one that is missing is not compared"
        return value

    def _misfit(self, holding: Holding) -> Fault:
        """What is wrong with a parameter apart from its values; nothing where it fits."""
        slot = self._slots.get(holding.name)
        found = None if slot is None else slot.value
        if found is None:
            return {"what": "missing"}
        if found.shape != holding.shape:
            return {"what": "shape", "got": list(found.shape), "wanted": list(holding.shape)}
        dtype = self._expected.dtype(holding)
        if found.dtype != dtype:
            return {"what": "type", "got": _type_name(found.dtype), "wanted": _type_name(dtype)}
        return {}

    def _fault(self, holding: Holding) -> tuple[Fault, Piece | None]:
        """What is wrong with a parameter, nothing where it is right, and its first wrong piece."""
        misfit = self._misfit(holding)
        return (misfit, None) if misfit else self._wrong_values(holding, self._value(holding))

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
        holding = self._table[name]
        return self._lookalikes.hint(holding, piece, region(self._value(holding), piece))

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


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Pieces of parameters of one type, in order, as many together as are small."""
    for _, alike in groupby(entries, key=lambda entry: entry[0].wide):
        batch: list[Entry] = []
        size = 0
        for entry in alike:
            count = math.prod(entry[1].shape)
            if batch and size + count > _TOGETHER:
                yield batch
                batch, size = [], 0
            batch.append(entry)
            size += count
        yield batch


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
