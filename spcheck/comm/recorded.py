"""A communicator that writes down what is asked of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from spcheck.comm.interface import Communicator
from spcheck.comm.trace import Trace

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One call of a communicator's method, as one rank made it.

    `order` counts this rank's calls in all groups that share the log; `kind` is the method's name. `shape`, `dtype`
    (without "torch.") and `bytes` are the argument's: `()`, "" and 0 for a barrier. `module` is the innermost probed
    module at the time, empty outside all of them. `sizes` are the row counts by rank of a call that has them, of an
    all_to_all those it sends, of a broadcast its source; `receive` those that an all_to_all receives.
    """

    order: int
    kind: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    module: str
    sizes: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


class Recorded:
    """`communicator`, with every call written to `log` and `trace` before it is made, so that a hung one is in both."""

    def __init__(
        self,
        communicator: Communicator,
        log: list[CollectiveRecord],
        module: Callable[[], str],
        trace: Trace | None = None,
    ) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.group = communicator.group
        self._communicator = communicator
        self._log = log
        self._module = module
        self._trace = trace or Trace()

    def join(
        self, communicator: Communicator, log: list[CollectiveRecord], module: Callable[[], str], trace: Trace
    ) -> None:
        """Goes on with the same group of another world, and with its log and trace."""
        self._communicator = communicator
        self._log = log
        self._module = module
        self._trace = trace

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator."""
        self._record("all_reduce", x)
        return self._left(self._communicator.all_reduce(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """See Communicator."""
        self._record("all_gather", x)
        return self._left(self._communicator.all_gather(x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See Communicator."""
        self._record("reduce_scatter", x)
        return self._left(self._communicator.reduce_scatter(x))

    def all_gatherv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See Communicator."""
        self._record("all_gatherv", x, sizes)
        return self._left(self._communicator.all_gatherv(x, sizes))

    def reduce_scatterv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See Communicator."""
        self._record("reduce_scatterv", x, sizes)
        return self._left(self._communicator.reduce_scatterv(x, sizes))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Communicator."""
        self._record("all_to_all", x, send, receive)
        return self._left(self._communicator.all_to_all(x, send, receive))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See Communicator."""
        self._record("broadcast", x, (source,))
        return self._left(self._communicator.broadcast(x, source))

    def barrier(self) -> None:
        """See Communicator."""
        self._append("barrier", (), "", 0)
        self._communicator.barrier()
        self._trace.leave()

    def _record(self, kind: str, x: Tensor, sizes: Sequence[int] = (), receive: Sequence[int] = ()) -> None:
        dtype = str(x.dtype).removeprefix("torch.")
        self._append(kind, tuple(x.shape), dtype, x.numel() * x.element_size(), tuple(sizes), tuple(receive))

    def _append(
        self,
        kind: str,
        shape: tuple[int, ...],
        dtype: str,
        size: int,
        sizes: tuple[int, ...] = (),
        receive: tuple[int, ...] = (),
    ) -> None:
        module, order = self._module(), len(self._log)
        self._log.append(CollectiveRecord(order, kind, self.group, shape, dtype, size, module, sizes, receive))
        self._trace.enter(kind, self.group, shape, dtype, module)

    def _left(self, result: R) -> R:
        self._trace.leave()
        return result
