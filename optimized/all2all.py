"""Dispatch and combine: how the rows of all shards reach the experts and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from optimized.communicator import Communicator

Dispatched = tuple[Tensor, Tensor, Tensor]


class All2AllManager(Protocol):
    """One backend over the expert-parallel group. ``sizes`` are the rows every rank announced."""

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor, sizes: Sequence[int]) -> Dispatched:
        """Own rows [m,D], [m,K], [m,K] -> the rows this rank's experts must see, [R,D], [R,K], [R,K]."""

    def combine(self, routed: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's summands for the dispatched rows [R,D] -> own rows, complete [m,D]."""


class AllGatherReduceScatter:
    """Every rank sees all rows and computes its own experts' summands; the sum goes back to the rows' owners."""

    def __init__(self, ep: Communicator) -> None:
        self.ep = ep

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor, sizes: Sequence[int]) -> Dispatched:
        """Gathers hidden, ids and weights, in this order.

        Raises:
            ValueError: the local rows are not the announced number.
        """
        announced = sizes[self.ep.rank]
        if hidden.shape[0] != announced:
            raise ValueError(f"EP rank {self.ep.rank} announced {announced} rows and dispatches {hidden.shape[0]}")
        gather = self.ep.all_gatherv
        return gather(hidden, sizes), gather(ids, sizes), gather(weights, sizes)

    def combine(self, routed: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sums over the ranks and keeps the own rows."""
        return self.ep.reduce_scatterv(routed, sizes)


ALL2ALL_MANAGERS: Mapping[str, Callable[[Communicator], All2AllManager]] = {
    "allgather_reducescatter": AllGatherReduceScatter,
}
