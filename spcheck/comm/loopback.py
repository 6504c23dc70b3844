"""Ranks as threads of one process: fast, exact (sums are taken in rank order), and strict about mismatches."""

import contextvars
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Generic, TypeVar

import torch
from torch import Tensor

from spcheck.comm import arguments
from spcheck.comm.baton import Baton, Call
from spcheck.comm.errors import CollectiveArgumentError, RankOutcome, WorldFailed
from spcheck.comm.interface import World
from spcheck.comm.trace import Trace

T = TypeVar("T")
_Work = Callable[[list[Tensor]], Sequence[Tensor]]


def run_loopback(size: int, main: Callable[[World], T], traces: Sequence[Trace] | None = None) -> list[T]:
    """Run `main(world)` as each of `size` ranks and return what they return, in rank order.

    `traces`, one per rank, are for a caller that wants to know what the ranks did last. Grad mode is per thread, so
    `main` sets it itself; context variables are inherited from the caller, to a copy.
    Raises WorldFailed, its cause the exception of the rank that failed first, after all threads have ended.
    """
    return _Run(size, main, traces or [Trace() for _ in range(size)]).results()


class _Run(Generic[T]):
    """The threads of one world, and how each of them ended."""

    def __init__(self, size: int, main: Callable[[World], T], traces: Sequence[Trace]) -> None:
        self._main = main
        self._traces = traces
        self._baton = Baton(size)
        self._size = size
        self._returned: dict[int, T] = {}
        self._outcomes = [RankOutcome(rank, "never started") for rank in range(size)]
        self._failed: list[int] = []  # in the order in time

    def results(self) -> list[T]:
        threads_before = torch.get_num_threads()  # a rank's setting leaks into MKL's, which is per process
        try:
            self._run_threads()
        finally:
            torch.set_num_threads(threads_before)
        if self._failed:
            primary = self._outcomes[self._failed[0]]
            raise WorldFailed(tuple(self._outcomes), primary) from primary.exception
        return [self._returned[rank] for rank in range(self._size)]

    def _run_threads(self) -> None:
        threads = [
            Thread(target=contextvars.copy_context().run, args=(self._thread, rank), name=f"rank {rank}", daemon=True)
            for rank in range(self._size)
        ]
        started = 0
        try:
            for thread in threads:
                thread.start()
                started += 1
            self._baton.start(started)
            _join(threads)
        except BaseException:  # an interrupt, or no room for more threads: the ranks must not outlive the call
            self._baton.stop("the run was interrupted")
            if started < self._size:
                self._baton.start(started)
            _join(threads[:started])
            raise

    def _thread(self, rank: int) -> None:
        error: BaseException | None = None
        if self._baton.await_turn(rank):
            torch.set_num_threads(1)
            try:
                world = LoopbackWorld(rank, self._size, self._baton, self._traces[rank])
                self._returned[rank] = self._main(world)
                self._outcomes[rank] = RankOutcome(rank, "returned")
            except BaseException as raised:  # whatever it is, the baton must go on
                error = raised
                self._failed.append(rank)
                self._outcomes[rank] = self._outcome(rank, raised)
        self._baton.end(rank, error)

    def _outcome(self, rank: int, raised: BaseException) -> RankOutcome:
        waited_for = self._baton.stopped_in.get(rank, "")
        state = "stopped" if waited_for and len(self._failed) > 1 else "raised"
        return RankOutcome(rank, state, raised, "".join(traceback.format_exception(raised)), waited_for)


def _join(threads: Sequence[Thread]) -> None:
    for thread in threads:
        thread.join()


class LoopbackWorld:
    """One rank's view of a world of threads; see World."""

    def __init__(self, rank: int, size: int, baton: Baton, trace: Trace) -> None:
        self.rank = rank
        self.size = size
        self.trace = trace
        self._baton = baton
        self._ranks = tuple(range(size))

    def group(self, name: str, ranks: Sequence[int]) -> "LoopbackCommunicator | None":
        """The communicator of `ranks`; here ranks outside the group need not call."""
        arguments.check_group(name, ranks, self.size)
        return LoopbackCommunicator(name, self.rank, tuple(ranks), self._baton) if self.rank in ranks else None

    def swap(self, outgoing: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Hand `outgoing[r]` to rank r, by reference."""
        if len(outgoing) != self.size:
            raise CollectiveArgumentError(f"swap: {len(outgoing)} messages for {self.size} ranks")
        with self.trace.waiting("exchange of values"):
            return self._baton.meet(self.rank, Call("swap", "spcheck", self._ranks, outgoing), _transposed)

    def barrier(self) -> None:
        """Wait for all ranks of the world."""
        with self.trace.waiting("barrier of the world"):
            self._baton.meet(self.rank, Call("barrier", "spcheck", self._ranks), _nothing)


class LoopbackCommunicator:
    """One rank of a group of threads; see Communicator."""

    def __init__(self, group: str, world_rank: int, ranks: tuple[int, ...], baton: Baton) -> None:
        self.rank = ranks.index(world_rank)
        self.size = len(ranks)
        self.group = group
        self._world_rank = world_rank
        self._ranks = ranks
        self._baton = baton

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in rank order."""
        return self._meet("all_reduce", x, tuple(x.shape), _reduced)

    def all_gather(self, x: Tensor) -> Tensor:
        """Blocks of equal rows, in rank order."""
        arguments.rows("all_gather", x)
        return self._meet("all_gather", x, tuple(x.shape), _gathered)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Own block of the sum in rank order."""
        sizes = arguments.even_sizes("reduce_scatter", x, self.size)
        return self._meet("reduce_scatter", x, tuple(x.shape), partial(_scattered, sizes=sizes))

    def all_gatherv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Blocks of `sizes` rows, in rank order."""
        arguments.check_sizes("all_gatherv", sizes, self.size)
        arguments.check_rows("all_gatherv", x, sizes[self.rank])
        return self._meet("all_gatherv", x, tuple(x.shape[1:]), _gathered, sizes=sizes)

    def reduce_scatterv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Own block of `sizes[rank]` rows of the sum in rank order."""
        arguments.check_sizes("reduce_scatterv", sizes, self.size)
        arguments.check_rows("reduce_scatterv", x, sum(sizes))
        work = partial(_scattered, sizes=list(sizes))
        return self._meet("reduce_scatterv", x, tuple(x.shape), work, sizes=sizes)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows to and from each rank."""
        arguments.check_sizes("all_to_all", send, self.size)
        arguments.check_sizes("all_to_all", receive, self.size)
        arguments.check_all_to_all(x, send, receive, self.rank)
        call = self._call("all_to_all", x, tuple(x.shape[1:]))
        call.argument = torch.split(x.detach(), list(send))
        call.pairs = (tuple(send), tuple(receive))
        return self._baton.meet(self._world_rank, call, _exchanged)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """A copy of rank `source`'s tensor."""
        arguments.check_source(source, self.size)
        return self._meet("broadcast", x, tuple(x.shape), partial(_spread, source=source), source=source)

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self._baton.meet(self._world_rank, Call("barrier", self.group, self._ranks), _nothing)

    def _call(self, kind: str, x: Tensor, agree: tuple[int, ...]) -> Call:
        x = x.detach()
        return Call(kind, self.group, self._ranks, argument=x, shown=x, agree=(x.dtype, agree))

    def _meet(self, kind: str, x: Tensor, agree: tuple[int, ...], work: _Work, **option: Sequence[int] | int) -> Tensor:
        call = self._call(kind, x, agree)
        call.options = tuple(
            (name, value if isinstance(value, int) else tuple(value)) for name, value in option.items()
        )
        return self._baton.meet(self._world_rank, call, work)


# What the last rank to arrive works out for all: the arguments in rank order to the results in rank order. No result
# shares memory with an argument or another result.


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _sum(xs: list[Tensor]) -> Tensor:
    total = _copy(xs[0])
    for x in xs[1:]:
        total += x
    return total


def _for_each(x: Tensor, size: int) -> list[Tensor]:
    return [x, *(x.clone() for _ in range(size - 1))]


def _reduced(xs: list[Tensor]) -> list[Tensor]:
    return _for_each(_sum(xs), len(xs))


def _gathered(xs: list[Tensor]) -> list[Tensor]:
    return _for_each(torch.cat(xs), len(xs))


def _scattered(xs: list[Tensor], sizes: list[int]) -> list[Tensor]:
    return [block.clone() for block in torch.split(_sum(xs), sizes)]


def _exchanged(pieces: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(blocks) for blocks in zip(*pieces, strict=True)]


def _spread(xs: list[Tensor], source: int) -> list[Tensor]:
    return _for_each(_copy(xs[source]), len(xs))


def _transposed(outgoing: list[list[dict[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
    return [list(received) for received in zip(*outgoing, strict=True)]


def _nothing(waiting: list[None]) -> list[None]:
    return waiting
