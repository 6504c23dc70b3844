"""Ranks as threads that run one at a time, and meet.

A rank's thread runs only while it holds the baton, so all state here is touched by one thread at a time and needs no
lock. A rank gives the baton away when it has to wait in a collective, and when it ends. The rank that comes last to a
collective works it out for all of them and keeps the baton.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from torch import Tensor

from spcheck.comm.errors import CollectiveMismatch, CommunicatorError, Deadlock, RankLost

A = TypeVar("A")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Call:
    """One rank's arrival at a collective.

    `agree` and `options` must be equal on all ranks, `pairs` is `(send, receive)` row counts by rank of the group, or
    None. `argument` is what the collective works on, `shown` the tensor that messages describe, `ranks` the group's
    ranks in the world.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    argument: Any = None
    shown: Tensor | None = None
    agree: tuple[object, ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    pairs: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def same_group(self, other: "Call") -> bool:
        """Whether both wait in the same group."""
        return self.group == other.group and self.ranks == other.ranks

    def fits(self, other: "Call", mine: int, its: int) -> bool:
        """Whether the calls of world ranks `mine` and `its` are the same collective of the same group."""
        if not self.same_group(other) or self.kind != other.kind:
            return False
        if self.agree != other.agree or self.options != other.options:
            return False
        if self.pairs is None or other.pairs is None:
            return True
        here, there = self.ranks.index(mine), self.ranks.index(its)
        return self.pairs[0][there] == other.pairs[1][here] and self.pairs[1][there] == other.pairs[0][here]

    def __str__(self) -> str:
        x = self.shown
        shown = [] if x is None else [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"]
        pairs = zip(("send", "receive"), self.pairs or (), strict=False)
        options = [f"{name}={list(v) if isinstance(v, tuple) else v}" for name, v in (*self.options, *pairs)]
        return f"{self.kind}({', '.join(shown + options)}) in group {self.group!r} {list(self.ranks)}"


class Baton:
    """Who runs, who waits for what, and why it all stopped, if it did."""

    def __init__(self, size: int) -> None:
        self._locks = [Lock() for _ in range(size)]
        self._ready: deque[int] = deque()
        self._waiting: dict[int, Call] = {}
        self._results: dict[int, Any] = {}
        self._ended: dict[int, str] = {}
        self._failure: tuple[type[CommunicatorError], str] | None = None
        self.stopped_in: dict[int, str] = {}
        for lock in self._locks:
            lock.acquire()

    def start(self, ranks: int) -> None:
        """Let the first of the `ranks` that have a thread run; called once, by whoever started the threads."""
        self._ready = deque(range(ranks))
        self._locks[self._ready.popleft()].release()

    def await_turn(self, rank: int) -> bool:
        """Wait to run for the first time; False if the world has failed before."""
        self._locks[rank].acquire()
        return self._failure is None

    def stop(self, reason: str) -> None:
        """Let every rank fail at its next collective; safe from a thread that does not hold the baton."""
        self._failure = self._failure or (RankLost, reason)

    def meet(self, rank: int, call: Call, work: Callable[[list[A]], Sequence[R]]) -> R:
        """Wait for the other ranks of the call's group; this rank's entry of `work(all arguments in group order)`.

        Raises CollectiveMismatch, RankLost or Deadlock, in every rank that is concerned.
        """
        self._refuse(rank, call)
        peers = [peer for peer in call.ranks if peer != rank]
        if not all(peer in self._waiting and call.same_group(self._waiting[peer]) for peer in peers):
            self._wait(rank, call)
            awaited: R = self._results.pop(rank)
            return awaited
        results = work([call.argument if peer == rank else self._waiting[peer].argument for peer in call.ranks])
        self._results.update(zip(call.ranks, results, strict=True))
        for peer in peers:
            del self._waiting[peer]
        self._ready.extend(peers)
        mine: R = self._results.pop(rank)
        return mine

    def end(self, rank: int, error: BaseException | None) -> None:
        """Take a rank out that has returned or raised, and let the next one run."""
        self._ended[rank] = "returned from its main" if error is None else f"raised {type(error).__name__}: {error}"
        concerned = [call for call in self._waiting.values() if rank in call.ranks]
        if error is not None or concerned:
            self._fail(RankLost, f"rank {rank} {self._ended[rank]}")
        if not self._ready and self._waiting:
            self._fail(Deadlock, self._deadlock())
        if self._ready:
            self._locks[self._ready.popleft()].release()

    def _refuse(self, rank: int, call: Call) -> None:
        self._raise_failure(rank, call)
        for peer in call.ranks:
            if peer in self._ended:
                self._fail(RankLost, f"rank {peer} {self._ended[peer]}")
            # A peer that waits elsewhere may still come, unless it waits there for this very rank.
            other = self._waiting.get(peer)
            if other is not None and rank in other.ranks and not call.fits(other, rank, peer):
                self._fail(CollectiveMismatch, f"rank {peer} waits for {other}, but rank {rank} calls {call}")
        self._raise_failure(rank, call)

    def _wait(self, rank: int, call: Call) -> None:
        self._waiting[rank] = call
        if not self._ready:
            self._fail(Deadlock, self._deadlock())
        following = self._ready.popleft()
        if following != rank:
            self._locks[following].release()
            self._locks[rank].acquire()
        self._raise_failure(rank, call)

    def _deadlock(self) -> str:
        waits = "; ".join(f"rank {rank} waits for {call}" for rank, call in sorted(self._waiting.items()))
        return f"no rank can go on: {waits}"

    def _fail(self, kind: type[CommunicatorError], reason: str) -> None:
        """Remember the first failure and wake every waiting rank, for each to raise it."""
        self._failure = self._failure or (kind, reason)
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def _raise_failure(self, rank: int, call: Call) -> None:
        if self._failure is None:
            return
        kind, reason = self._failure
        self.stopped_in.setdefault(rank, str(call))
        raise kind(f"{reason}; rank {rank} waited for {call}" if kind is RankLost else reason)
