"""What the model asks of a process group. The caller hands these in; the model never reaches for a global group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """One rank's end of a group. Every call returns a new tensor; dim 0 is the row axis."""

    @property
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, any shape."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[m, ...] -> [size*m, ...] in rank order."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size*m, ...] -> this rank's block [m, ...] of the sum."""

    def all_gatherv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sizes[rank], ...] -> [sum(sizes), ...] in rank order."""

    def reduce_scatterv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sum(sizes), ...] -> this rank's block [sizes[rank], ...] of the sum."""

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """[sum(send), ...], rows for each rank in turn -> [sum(receive), ...], rows from each rank in turn."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """A copy of rank ``source``'s tensor; the others give one of the same shape, its values unread."""


@dataclass(frozen=True)
class Block:
    """Which of ``size`` equal blocks of a weight a rank holds; ``Block()`` is the whole."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Communicator) -> Block:
        """The rank's own block in a group."""
        return cls(group.rank, group.size)

    def span(self, length: int, what: str) -> slice:
        """The block's part of an axis.

        Raises:
            ValueError: the axis cannot be cut in equal blocks.
        """
        if length % self.size:
            raise ValueError(f"{what} {length} cannot be divided over {self.size} ranks")
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)
