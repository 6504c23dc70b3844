"""Ranks as processes over torch.distributed: gloo on the CPU, nccl on one GPU per rank, by the same code."""

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from spcheck.comm import arguments
from spcheck.comm.errors import CollectiveArgumentError, CollectiveFailed, CollectiveMismatch
from spcheck.comm.interface import ON_CPU
from spcheck.comm.trace import Trace

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# torch 2.13 warns about the older names, torch 2.11 has no others.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def open_world(
    backend: str, rank: int, size: int, store: Path | None, timeout_s: float, trace: Trace | None = None
) -> "ProcessWorld":
    """Join the world of `size` processes that meet in `store`, a folder or a file; returns once all of them have.

    The store is private to one world: a store of an earlier one would be taken for this one's. None joins the world
    that torchrun describes in the environment instead, on whatever network it set up; a store means one machine, and
    gloo then stays on its loopback interface. With nccl the caller has set the CUDA device. One world per process at a
    time. Raises CollectiveFailed when the others do not come within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    trace = trace or Trace()
    meeting = None
    if store is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        place = store / "rendezvous" if store.is_dir() else store
        meeting = dist.FileStore(str(place), size)  # type: ignore[attr-defined]
    try:
        with trace.waiting("joining the world"):
            dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=timeout)
            return ProcessWorld(backend, timeout, trace)
    except RuntimeError as error:
        raise CollectiveFailed(f"rank {rank} of {size} found no {backend} world: {error}") from error


class ProcessWorld:
    """One process's view of its world; see World."""

    def __init__(self, backend: str, timeout: timedelta, trace: Trace) -> None:
        self.trace = trace
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._backend = backend
        self._timeout = timeout
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessCommunicator | None] = {}
        # The tool's messages are bytes in host memory: gloo carries them, whatever the subject's backend is.
        self._tool: Any = dist.new_group(timeout=timeout, backend="gloo")

    def group(self, name: str, ranks: Sequence[int]) -> "ProcessCommunicator | None":
        """The communicator of `ranks`, made once per name and ranks: every rank of the world takes part in that.

        Raises CollectiveMismatch if the ranks of the world ask for different groups.
        """
        arguments.check_group(name, ranks, self.size)
        key = (name, tuple(ranks))
        if key not in self._groups:
            with self.trace.waiting(f"making group {name}"):
                self._check_agreed(key)
                backend = "gloo" if name.endswith(ON_CPU) else self._backend
                made: Any = _do(f"making group {name!r}", dist.new_group, key[1], self._timeout, backend)
            inside = self.rank in ranks
            self._groups[key] = ProcessCommunicator(name, key[1], self.rank, made) if inside else None
        return self._groups[key]

    def swap(self, outgoing: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """One buffer of bytes per destination; this rank's message to itself is handed over as it is."""
        if len(outgoing) != self.size:
            raise CollectiveArgumentError(f"swap: {len(outgoing)} messages for {self.size} ranks")
        if self.size == 1:
            return outgoing
        packed = [b"" if rank == self.rank else _pack(message) for rank, message in enumerate(outgoing)]
        with self.trace.waiting("exchange of values"):
            received = self._swap_bytes(packed)
        return [outgoing[rank] if rank == self.rank else _unpack(data) for rank, data in enumerate(received)]

    def barrier(self) -> None:
        """Wait for all ranks of the world."""
        with self.trace.waiting("barrier of the world"):
            _do("barrier of the world", dist.barrier, self._tool)

    def close(self) -> None:
        """Leave the world; its communicators are of no use afterwards."""
        self._groups.clear()
        dist.destroy_process_group()

    def _check_agreed(self, key: tuple[str, tuple[int, ...]]) -> None:
        asked: list[Any] = [None] * self.size
        _do("agreeing on a group", dist.all_gather_object, asked, key, self._tool)
        for rank, other in enumerate(asked):
            if other != key:
                mine = f"rank {self.rank} makes group {key[0]!r} {list(key[1])}"
                raise CollectiveMismatch(f"{mine}, but rank {rank} makes {other[0]!r} {list(other[1])}")

    def _swap_bytes(self, messages: list[bytes]) -> list[bytes]:
        lengths = [len(message) for message in messages]
        theirs = torch.empty(self.size, dtype=torch.int64)
        _do("swap", dist.all_to_all_single, theirs, torch.tensor(lengths), None, None, self._tool)
        coming = [int(length) for length in theirs.tolist()]
        data = torch.empty(sum(coming), dtype=torch.uint8)
        joined = bytearray().join(messages)
        mine = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        _do("swap", dist.all_to_all_single, data, mine, coming, lengths, self._tool)
        return [part.numpy().tobytes() for part in torch.split(data, coming)]


class ProcessCommunicator:
    """One process of a group; see Communicator.

    What only moves rows moves their bytes, so that every dtype can be moved; gloo and nccl each lack some.
    """

    def __init__(self, group: str, ranks: tuple[int, ...], world_rank: int, process_group: dist.ProcessGroup) -> None:
        self.rank = ranks.index(world_rank)
        self.size = len(ranks)
        self.group = group
        self._ranks = ranks
        self._process_group = process_group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum, in the backend's own order."""
        result = _copy(x)
        if result.numel():
            self._do("all_reduce", dist.all_reduce, result)
        return result

    def all_gather(self, x: Tensor) -> Tensor:
        """Blocks of equal rows, in rank order."""
        result = x.new_empty((self.size * arguments.rows("all_gather", x), *x.shape[1:]))
        if result.numel():
            self._do("all_gather", _all_gather, _as_bytes(result), _as_bytes(x.detach().contiguous()))
        return result

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Own block of the sum."""
        block = arguments.even_sizes("reduce_scatter", x, self.size)[self.rank]
        result = x.new_empty((block, *x.shape[1:]))
        if result.numel():
            # Some backends use the input as scratch space, and contiguous() alone may hand them the caller's own.
            self._do("reduce_scatter", _reduce_scatter, result, _copy(x))
        return result

    def all_gatherv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Blocks of `sizes` rows, in rank order; padded to the largest on the way, gloo knows equal blocks only."""
        arguments.check_sizes("all_gatherv", sizes, self.size)
        arguments.check_rows("all_gatherv", x, sizes[self.rank])
        gathered = self.all_gather(_padded(x.detach(), max(sizes)))
        blocks = torch.split(gathered, max(sizes)) if max(sizes) else (gathered,) * self.size
        return torch.cat([block[:count] for block, count in zip(blocks, sizes, strict=True)])

    def reduce_scatterv(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Own block of `sizes[rank]` rows of the sum; each block is padded to the largest on the way."""
        arguments.check_sizes("reduce_scatterv", sizes, self.size)
        arguments.check_rows("reduce_scatterv", x, sum(sizes))
        blocks = torch.split(x.detach(), list(sizes))
        own = self.reduce_scatter(torch.cat([_padded(block, max(sizes)) for block in blocks]))
        return own[: sizes[self.rank]].clone()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows to and from each rank."""
        arguments.check_sizes("all_to_all", send, self.size)
        arguments.check_sizes("all_to_all", receive, self.size)
        arguments.check_all_to_all(x, send, receive, self.rank)
        result = x.new_empty((sum(receive), *x.shape[1:]))
        row = x.element_size() * x.shape[1:].numel()
        splits = [count * row for count in receive], [count * row for count in send]
        mine = _as_bytes(x.detach().contiguous())
        self._do("all_to_all", dist.all_to_all_single, _as_bytes(result), mine, *splits)
        return result

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """A copy of rank `source`'s tensor."""
        arguments.check_source(source, self.size)
        result = _copy(x)
        if result.numel():
            self._do("broadcast", dist.broadcast, _as_bytes(result), self._ranks[source])
        return result

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        on_gpu = dist.get_backend(self._process_group) == "nccl"
        self._do("barrier", dist.barrier, device_ids=[torch.cuda.current_device()] if on_gpu else None)

    def _do(self, kind: str, call: Callable[..., Any], *args: object, **options: object) -> None:
        where = f"{kind} in group {self.group!r} {list(self._ranks)}"
        _do(where, call, *args, group=self._process_group, **options)


def _do(what: str, call: Callable[..., Any], *args: object, **options: object) -> object:
    try:
        return call(*args, **options)
    except RuntimeError as error:
        raise CollectiveFailed(f"{what}: {error}") from error


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def _pack(message: dict[str, Tensor]) -> bytes:
    # safetensors refuses tensors that share storage, and writes whole storages of those that are parts of one.
    return save({name: _copy(x).cpu() for name, x in message.items()}) if message else b""


def _unpack(data: bytes) -> dict[str, Tensor]:
    return load(data) if data else {}
