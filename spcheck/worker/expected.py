"""What a piece of a parameter must be, read from the checkpoint in the parameter's type."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.checkpoint import TensorReader
from spcheck.contracts.holdings import repeated_tensors
from spcheck.contracts.pieces import ZEROS, Holding, Piece
from spcheck.plan import Plan
from spcheck.worker.weights import read_block


class Expected:
    """Reads pieces. A tensor that the checkpoint leaves out is read from the one that it repeats."""

    def __init__(self, plan: Plan, reader: TensorReader) -> None:
        self._reader = reader
        self._names = frozenset(reader.names())
        self._repeated = repeated_tensors(plan.config)
        self._plain: torch.dtype = getattr(torch, plan.dtype)
        self._wide: torch.dtype = getattr(torch, plan.wide_dtype)

    def dtype(self, holding: Holding) -> torch.dtype:
        """The type that a parameter must have."""
        return self._wide if holding.wide else self._plain

    def piece(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """A piece in the shape that it has in the parameter, on the CPU.

        Raises:
            reference.checkpoint.CheckpointError: the checkpoint does not hold the tensor.
        """
        if piece.tensor == ZEROS:
            return torch.zeros(piece.shape, dtype=dtype)
        name = piece.tensor
        if name not in self._names:
            name = self._repeated.get(name, name)
        block = read_block(self._reader, name, piece.source)
        if piece.transposed:
            block = block.mT
        return block.to(dtype).reshape(piece.shape)


def region(parameter: Tensor, piece: Piece) -> Tensor:
    """The part of a parameter that a piece fills, as a view."""
    return parameter[tuple(slice(start, stop) for start, stop in piece.target)]


def differing(found: Tensor, wanted: Tensor) -> Tensor:
    """Where two tensors of one shape differ, as booleans; two that are not numbers are alike."""
    return (found != wanted) & ~(found.isnan() & wanted.isnan())


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether they differ nowhere."""
    return torch.equal(found, wanted) or not bool(differing(found, wanted).any())
