"""What the pieces of parameters must be, read from the checkpoint in the parameters' type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from reference.checkpoint import TensorReader
from spcheck.families.deepseek.holdings import repeated_tensors
from spcheck.families.deepseek.pieces import ZEROS, Holding, Piece
from spcheck.plan.plan import Plan
from spcheck.worker.weights import Snapped


class Expected:
    """Reads pieces. A tensor that the checkpoint leaves out is read from the one that it repeats."""

    def __init__(self, plan: Plan, reader: TensorReader) -> None:
        self._rounds = reader.rounded if isinstance(reader, Snapped) else None
        self._reader = reader.stored if isinstance(reader, Snapped) else reader
        self._names = frozenset(reader.names())
        self._repeated = repeated_tensors(plan.config)
        self._plain: torch.dtype = getattr(torch, plan.dtype)
        self._wide: torch.dtype = getattr(torch, plan.wide_dtype)
        self._last: tuple[str, Tensor] = ("", torch.empty(0))  # pieces of one tensor often follow each other

    def dtype(self, holding: Holding) -> torch.dtype:
        """The type that a parameter must have."""
        return self._wide if holding.wide else self._plain

    def piece(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """A piece in the shape that it has in the parameter, on the CPU.

        Raises:
            reference.checkpoint.CheckpointError: the checkpoint does not hold the tensor.
        """
        return self._rounded(self._read(piece)).to(dtype).reshape(piece.shape)

    def forget(self) -> None:
        """Lets go of the tensor that was read last."""
        self._last = ("", torch.empty(0))

    def row(self, pieces: Iterable[Piece], dtype: torch.dtype) -> Tensor:
        """Several pieces, flat and one behind the other; faster than one by one."""
        blocks = [self._read(piece).reshape(-1) for piece in pieces]
        return self._rounded(blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(dtype)

    def _read(self, piece: Piece) -> Tensor:
        """As it is stored: what is rounded to a grid is rounded together, and only as far as it is compared."""
        if piece.tensor == ZEROS:
            return torch.zeros(piece.shape, dtype=torch.bfloat16)
        name = piece.tensor
        if name not in self._names:
            name = self._repeated.get(name, name)
        if name != self._last[0]:
            self._last = name, self._reader.tensor(name)
        block = self._last[1][tuple(slice(start, stop) for start, stop in piece.source)]
        return block.mT if piece.transposed else block

    def _rounded(self, stored: Tensor) -> Tensor:
        return stored if self._rounds is None else self._rounds(stored)


def region(parameter: Tensor, piece: Piece) -> Tensor:
    """The part of a parameter that a piece fills, as a view."""
    if piece.shape == parameter.shape:
        return parameter
    return parameter[tuple(slice(start, stop) for start, stop in piece.target)]


def row_of(regions: Sequence[Tensor]) -> Tensor:
    """Parts of parameters, flat and one behind the other."""
    return regions[0].reshape(-1) if len(regions) == 1 else torch.cat([x.reshape(-1) for x in regions])


def differing(found: Tensor, wanted: Tensor) -> Tensor:
    """Where two tensors of one shape differ, as booleans; two that are not numbers are alike."""
    return (found != wanted) & ~(found.isnan() & wanted.isnan())


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether they differ nowhere."""
    return torch.equal(found, wanted) or not bool(differing(found, wanted).any())
