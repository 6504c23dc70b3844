"""The two protocols: a communicator, which a subject sees, and a world, which only the tool sees."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spcheck.comm.trace import Trace

ON_CPU = "_cpu"
"""How the names of groups end that carry CPU tensors, whatever the backend of the others."""


class Communicator(Protocol):
    """One group of ranks.

    `rank` and `size` count within the group and `group` is its name ("tp", "ep", ...). Rows are dimension 0. All
    ranks of the group call the same methods in the same order. Every call returns a new contiguous tensor, which
    shares memory with nothing, and leaves its argument as it was; gradients do not flow through. An argument that
    cannot be right on its own raises CollectiveArgumentError; ranks that disagree, or a lost rank, raise another
    CommunicatorError.
    """

    rank: int
    size: int
    group: str

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks: any shape, the same on all ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`[m, ...]`, the same on all ranks, to `[size*m, ...]` in rank order."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`[size*m, ...]`, the same on all ranks, to this rank's block `[m, ...]` of the sum."""
        ...

    def all_gatherv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """`[sizes[rank], ...]` to `[sum(sizes), ...]` in rank order; all ranks pass the same `sizes`."""
        ...

    def reduce_scatterv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """`[sum(sizes), ...]`, the same on all ranks, to this rank's block `[sizes[rank], ...]` of the sum."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """`[sum(send), ...]` to `[sum(receive), ...]`.

        The first `send[0]` rows go to rank 0, the next `send[1]` to rank 1, and so on; the result holds `receive[0]`
        rows from rank 0, then `receive[1]` from rank 1. `send[j]` on rank i must be `receive[i]` on rank j.
        """
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """A copy of rank `source`'s tensor; the others pass one of the same shape and dtype, its values unread."""
        ...

    def barrier(self) -> None:
        """Return once all ranks of the group are here."""
        ...


class World(Protocol):
    """All ranks of a run, as one of them sees it. ``trace`` outlives the rank: what it does last is written there."""

    rank: int
    size: int
    trace: Trace

    def group(self, name: str, ranks: Sequence[int]) -> Communicator | None:
        """Make (or find again) the communicator of the world's `ranks`, ascending; None for a rank outside it.

        Every rank of the world calls this, with the same arguments and in the same order: torch.distributed cannot
        make a group otherwise. Raises CollectiveArgumentError for ranks that do not ascend or lie outside the world.
        """
        ...

    def swap(self, outgoing: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The tool's own exchange: `outgoing[r]` goes to rank r, the result holds what each rank sent to this one.

        Never recorded, and on a group of its own. Threads and a rank's message to itself hand over references, so
        the receiver must not write to what it gets; messages between processes arrive as copies on the CPU.
        """
        ...

    def barrier(self) -> None:
        """Return once all ranks of the world are here."""
        ...
