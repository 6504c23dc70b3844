"""Weights from a checkpoint reader into the working type, cut to the rank's block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optimized.communicator import Block

if TYPE_CHECKING:
    from reference.checkpoint import TensorReader


class Loader:
    """Reads below one prefix. Every tensor it gives is a new one: a slice would keep the whole table in memory."""

    def __init__(self, reader: TensorReader, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self.reader, self.dtype, self.device, self.prefix = reader, dtype, device, prefix
        self._names = frozenset(reader.names()) if not prefix else frozenset()

    def at(self, name: str) -> Loader:
        """The loader of a sub-module."""
        below = Loader(self.reader, self.dtype, self.device, f"{self.prefix}{name}.")
        below._names = self._names
        return below

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self.prefix + name in self._names

    def full(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, in the working type unless another is given."""
        stored = self.reader.tensor(self.prefix + name)
        return stored.to(self.device, dtype or self.dtype, copy=True).contiguous()

    def rows(self, name: str, block: Block) -> Tensor:
        """The block of dim 0."""
        stored = self.reader.tensor(self.prefix + name)
        return self._own(stored[block.span(stored.shape[0], self.prefix + name)])

    def columns(self, name: str, block: Block) -> Tensor:
        """The block of dim 1."""
        stored = self.reader.tensor(self.prefix + name)
        return self._own(stored[:, block.span(stored.shape[1], self.prefix + name)])

    def fused(self, names: Sequence[str], block: Block) -> Tensor:
        """The blocks of dim 0 of several matrices, one below the other."""
        stored = {name: self.reader.tensor(self.prefix + name) for name in names}
        return self._own(torch.cat([x[block.span(x.shape[0], self.prefix + name)] for name, x in stored.items()]))

    def stacked(self, names: Sequence[str], block: Block, dim: int) -> Tensor:
        """[len(names), ...]: the blocks of dim ``dim`` of tensors of one shape, in this order."""
        stored = {name: self.reader.tensor(self.prefix + name) for name in names}
        parts = [x.movedim(dim, 0)[block.span(x.shape[dim], self.prefix + name)] for name, x in stored.items()]
        return self._own(torch.stack(parts).movedim(1, dim + 1))

    def vocabulary(self, name: str, block: Block) -> Tensor:
        """The block of rows of [V, D] after padding V with zero rows to a multiple of the ranks."""
        stored = self.reader.tensor(self.prefix + name)
        rows = -(-stored.shape[0] // block.size)
        own = stored[block.rank * rows : (block.rank + 1) * rows]
        out = torch.zeros(rows, stored.shape[1], dtype=self.dtype, device=self.device)
        out[: own.shape[0]] = own
        return out

    def _own(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype, copy=True).contiguous()
