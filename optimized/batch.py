"""Where the rows of a packed forward come from and which cache slots they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.buffers import InputBuffers


@dataclass(frozen=True)
class Span:
    """One request's part of a forward: ``rows`` of the batch are positions ``start``, start+1, ...; keys 0 .. end-1."""

    request: int
    rows: slice
    start: int
    base: int  # the request's first slot

    @property
    def end(self) -> int:
        """Positions the request has after this forward; the number of its keys."""
        return self.start + len(range(self.rows.start, self.rows.stop))


@dataclass(frozen=True)
class AttentionMetadata:
    """What attention must know of the batch. The first ``num_actual_tokens`` rows are tokens, the rest padding.

    ``visible`` [n, T] says which key positions of its own request a row may see; T is the longest request's keys.
    """

    spans: tuple[Span, ...]
    num_actual_tokens: int
    slot_mapping: Tensor  # [num_actual_tokens]: where a row's key goes
    base: Tensor  # [num_actual_tokens]: slot of position 0 of the row's request
    visible: Tensor  # [n, T] bool

    @cached_property
    def causal_choice(self) -> Tensor:
        """[n, T]: every visible key position, -1 elsewhere: the choice of a model without an indexer."""
        positions = torch.arange(self.visible.shape[1], device=self.visible.device)
        return torch.where(self.visible, positions, -1)


@dataclass(frozen=True)
class AdapterRows:
    """The LoRA adapter of each row: ``ids`` [n], -1 for none, padding included."""

    ids: Tensor

    @cached_property
    def groups(self) -> list[tuple[int, Tensor]]:
        """(adapter, its rows [k]), of the adapters that have rows."""
        return [(i, (self.ids == i).nonzero().squeeze(1)) for i in sorted({*self.ids.tolist()} - {-1})]


@dataclass(frozen=True)
class Batch:
    """One forward's rows: the requests one after the other, then graph padding.

    ``positions`` and ``is_padding`` are views of buffers that the next forward writes.
    """

    positions: Tensor  # [n], whatever an earlier forward left on padding
    is_padding: Tensor  # [n] bool
    last_rows: Tensor  # [requests]
    attention: AttentionMetadata
    adapter_rows: AdapterRows | None  # None: no row has an adapter

    @property
    def num_tokens(self) -> int:
        """n, graph padding included."""
        return self.positions.shape[0]

    def pad(self, x: Tensor) -> Tensor:
        """[num_actual_tokens, D] -> [n, D] with zeros on padding."""
        return F.pad(x, (0, 0, 0, self.num_tokens - x.shape[0]))


class SlotTable:
    """The slots of all requests: request ``i`` owns ``lengths[i]`` of them, in a row.

    ``adapters[i]`` is its LoRA adapter, -1 for none; a request that is not named has none.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, adapters: Sequence[int] = ()) -> None:
        self.lengths = list(lengths)
        self.adapters = dict(enumerate(adapters))
        self.bases = [0, *accumulate(lengths)]
        self.device = device

    @property
    def total(self) -> int:
        """Number of slots."""
        return self.bases[-1]

    def empty(self) -> Tensor:
        """[slots] bool, all False: which slots hold a key."""
        return torch.zeros(self.total, dtype=torch.bool, device=self.device)

    def request_slots(self, request: int) -> slice:
        """The slots of one request."""
        return slice(self.bases[request], self.bases[request + 1])

    def batch(self, spans: Sequence[tuple[int, int, int]], held: Tensor, n: int, buffers: InputBuffers) -> Batch:
        """The forward of (request, start position, rows) triples in ``n`` rows, whose inputs stand in ``buffers``.

        Marks in ``held`` [slots] what it will write.

        Raises:
            ValueError: a request outgrows its slots.
        """
        placed = self._place(spans)
        positions = self._ints([p for s in placed for p in range(s.start, s.end)])
        base = self._ints([s.base for s in placed for _ in range(s.start, s.end)])
        slots = base + positions
        held[slots] = True
        visible = self._visible(placed, positions, base, held)
        padded = F.pad(visible, (0, 0, 0, n - positions.shape[0]))
        metadata = AttentionMetadata(placed, positions.shape[0], slots, base, padded)
        adapters = [self.adapters.get(s.request, -1) for s in placed for _ in range(s.start, s.end)]
        last_rows = self._ints([s.rows.stop - 1 for s in placed])
        rows = (
            AdapterRows(self._ints(adapters + [-1] * (n - len(adapters)))) if max(adapters, default=-1) >= 0 else None
        )
        return Batch(*buffers.place(positions, n), last_rows, metadata, rows)

    def _place(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Span, ...]:
        bounds = pairwise([0, *accumulate(count for _, _, count in spans)])
        placed = tuple(
            Span(request, slice(first, stop), start, self.bases[request])
            for (request, start, _), (first, stop) in zip(spans, bounds, strict=True)
        )
        for span in placed:
            if span.end > self.lengths[span.request]:
                raise ValueError(
                    f"request {span.request} needs {span.end} positions and has {self.lengths[span.request]}"
                )
        return placed

    def _visible(self, placed: tuple[Span, ...], positions: Tensor, base: Tensor, held: Tensor) -> Tensor:
        """[num_actual_tokens, T]."""
        keys = torch.arange(max((s.end for s in placed), default=0), device=self.device)
        # A draft layer that ran only in some steps has holes among its keys.
        slots = (base[:, None] + keys).clamp_(max=max(self.total - 1, 0))
        return (keys <= positions[:, None]) & held[slots]

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
