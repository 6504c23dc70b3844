"""Dispatch and combine: how the rows of a group's ranks reach the experts and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from optimized.communicator import Communicator

Dispatched = tuple[Tensor, Tensor, Tensor]
Combine = Callable[[Tensor], Tensor]


class All2AllManager(Protocol):
    """One backend over one group. ``owned[r]`` are the experts of which rank ``r`` of the group holds a part."""

    def __init__(self, group: Communicator, owned: Sequence[range]) -> None: ...

    def dispatch(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> tuple[Dispatched, Combine]:
        """Brings rows to experts and says how their results come back.

        Own rows [m,D], [m,K], [m,K], and the rows that every rank announced -> the rows this rank's experts must see,
        [R,D], [R,K], [R,K], and the way back: this rank's summands for them [R,D] -> the group's sums for the own
        rows [m,D].

        Raises:
            ValueError: the local rows are not the announced number.
        """


class AllGatherReduceScatter:
    """Every rank sees all rows and computes its own experts' summands; the sum goes back to the rows' owners."""

    def __init__(self, group: Communicator, owned: Sequence[range]) -> None:
        self.group = group

    def dispatch(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> tuple[Dispatched, Combine]:
        """Gathers hidden, ids and weights, in this order."""
        _check_announced(hidden, self.group, sizes)
        gather = self.group.all_gatherv
        rows = gather(hidden, sizes), gather(ids, sizes), gather(weights, sizes)
        return rows, partial(self.group.reduce_scatterv, sizes=sizes)


class Naive:
    """The same with the plainest collectives: a broadcast by each rank, and back an all-reduce of all rows."""

    def __init__(self, group: Communicator, owned: Sequence[range]) -> None:
        self.group = group

    def dispatch(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> tuple[Dispatched, Combine]:
        """Broadcasts hidden by every rank in turn, then ids, then weights."""
        _check_announced(hidden, self.group, sizes)
        rows = self._spread(hidden, sizes), self._spread(ids, sizes), self._spread(weights, sizes)
        return rows, partial(self._combine, sizes=sizes)

    def _spread(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Own rows [m, ...] -> all ranks' [R, ...]."""
        buffers = [x if rank == self.group.rank else x.new_empty(m, *x.shape[1:]) for rank, m in enumerate(sizes)]
        return torch.cat([self.group.broadcast(buffer, source) for source, buffer in enumerate(buffers)])

    def _combine(self, routed: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.split(self.group.all_reduce(routed), list(sizes))[self.group.rank]


class AllToAll:
    """A row travels only to the ranks that hold one of its chosen experts, and nowhere where it chose none (-1)."""

    def __init__(self, group: Communicator, owned: Sequence[range]) -> None:
        self.group = group
        self.owned = owned

    def dispatch(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> tuple[Dispatched, Combine]:
        """Exchanges row counts, then hidden, ids and weights of the rows that go to each rank, in row order."""
        _check_announced(hidden, self.group, sizes)
        going = [_rows_with_choice_in(experts, ids) for experts in self.owned]
        send = [rows.shape[0] for rows in going]
        one = [1] * self.group.size
        counts = torch.tensor(send, dtype=torch.int64, device=hidden.device)
        receive: list[int] = self.group.all_to_all(counts, one, one).tolist()
        order = torch.cat(going)
        out = [self.group.all_to_all(x.index_select(0, order), send, receive) for x in (hidden, ids, weights)]
        back = partial(self._combine, going=going, send=send, receive=receive, rows=hidden.shape[0])
        return (out[0], out[1], out[2]), back

    def _combine(
        self, routed: Tensor, going: Sequence[Tensor], send: Sequence[int], receive: Sequence[int], rows: int
    ) -> Tensor:
        """Adds what came back rank by rank. From one rank no row comes twice: the order is fixed on any device."""
        back = self.group.all_to_all(routed, receive, send)
        out = routed.new_zeros(rows, routed.shape[1])
        for places, summands in zip(going, torch.split(back, list(send)), strict=True):
            out.index_add_(0, places, summands)
        return out


def _rows_with_choice_in(experts: range, ids: Tensor) -> Tensor:
    """Ids [m,K] -> the rows, ascending, that chose one of the experts."""
    return ((ids >= experts.start) & (ids < experts.stop)).any(dim=1).nonzero().flatten()


def _check_announced(x: Tensor, group: Communicator, sizes: Sequence[int]) -> None:
    announced = sizes[group.rank]
    if x.shape[0] != announced:
        raise ValueError(f"rank {group.rank} announced {announced} rows and dispatches {x.shape[0]}")


ALL2ALL_MANAGERS: Mapping[str, type[All2AllManager]] = {
    "allgather_reducescatter": AllGatherReduceScatter,
    "naive": Naive,
    "all_to_all": AllToAll,
}
