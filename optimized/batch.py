"""Where the rows of a packed forward come from and which cache slots they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.buffers import InputBuffers


class Chunk(NamedTuple):
    """New tokens of one request, and what is known of them beside their ids.

    ``drafts``: the last so many ids were drafted, and the step verifies them; None: nothing is to be verified.
    ``following``: the token behind the chunk where it is known; None: what the model samples there.
    """

    request: int
    start: int  # position of the first
    ids: Tensor  # [n] int64
    drafts: int | None = None
    following: int | None = None

    @property
    def num_drafts(self) -> int:
        """How many of the ids were drafted."""
        return self.drafts or 0

    def checked(self) -> Chunk:
        """The chunk itself; raises ValueError where no row stands before its drafts."""
        rows = self.ids.shape[0]
        if not 0 <= self.num_drafts < rows:
            raise ValueError(f"request {self.request} has {rows} new rows, of which {self.num_drafts} cannot be drafts")
        return self


@dataclass(frozen=True)
class NewRows:
    """``count`` rows of one request in a forward, at positions from ``start`` on; the last ``sampled`` are sampled."""

    request: int
    start: int
    count: int
    sampled: int = 1


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

    @property
    def max_seq_len(self) -> int:
        """T: no row has more keys. A number on the host."""
        return self.visible.shape[1]

    @cached_property
    def causal_choice(self) -> Tensor:
        """[n, T]: every visible key position, -1 elsewhere: what is chosen where nothing is left out."""
        positions = torch.arange(self.max_seq_len, device=self.visible.device)
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
    logits_indices: Tensor  # [S]: the rows that are sampled, request by request; of most requests the last one
    attention: AttentionMetadata
    adapter_rows: AdapterRows | None  # None: no row has an adapter

    @property
    def num_tokens(self) -> int:
        """n, graph padding included."""
        return self.positions.shape[0]


class SlotTable:
    """The slots of all requests: request ``i`` owns ``lengths[i]`` of them, in a row.

    ``adapters[i]`` is its LoRA adapter, -1 for none; a request that is not named has none. ``held`` [1 + MTP layers,
    slots] says which slots hold a key: the target's layers are written together, every MTP layer only by the draft
    steps it runs.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, adapters: Sequence[int] = (), *, mtp_layers: int = 1
    ) -> None:
        self.lengths = list(lengths)
        self.adapters = dict(enumerate(adapters))
        self.bases = [0, *accumulate(lengths)]
        self.held = torch.zeros(1 + mtp_layers, self.total, dtype=torch.bool, device=device)
        self.device = device

    @property
    def total(self) -> int:
        """Number of slots."""
        return self.bases[-1]

    def forget(self, request: int, start: int) -> None:
        """No layer holds a key of the request at positions >= ``start``: rejected drafts, and what drafting wrote."""
        self.held[:, self.bases[request] + start : self.bases[request + 1]] = False

    def request_slots(self, request: int) -> slice:
        """The slots of one request."""
        return slice(self.bases[request], self.bases[request + 1])

    def batch(self, rows: Sequence[NewRows], held: Tensor, n: int, buffers: InputBuffers) -> Batch:
        """The forward of these rows and padding, ``n`` in all, whose inputs stand in ``buffers``.

        Marks in ``held`` [slots] what it will write.

        Raises:
            ValueError: a request outgrows its slots.
        """
        placed = self._place(rows)
        positions = self._ints([p for s in placed for p in range(s.start, s.end)])
        base = self._ints([s.base for s in placed for _ in range(s.start, s.end)])
        slots = base + positions
        held[slots] = True
        visible = self._visible(placed, positions, base, held)
        padded = F.pad(visible, (0, 0, 0, n - positions.shape[0]))
        metadata = AttentionMetadata(placed, positions.shape[0], slots, base, padded)
        ends = [(span.rows.stop, new.sampled) for span, new in zip(placed, rows, strict=True)]
        logits_indices = self._ints([row for end, sampled in ends for row in range(end - sampled, end)])
        return Batch(*buffers.place(positions, n), logits_indices, metadata, self._adapter_rows(placed, n))

    def _adapter_rows(self, placed: tuple[Span, ...], n: int) -> AdapterRows | None:
        adapters = [self.adapters.get(s.request, -1) for s in placed for _ in range(s.start, s.end)]
        if max(adapters, default=-1) < 0:
            return None
        return AdapterRows(self._ints(adapters + [-1] * (n - len(adapters))))

    def _place(self, rows: Sequence[NewRows]) -> tuple[Span, ...]:
        bounds = pairwise([0, *accumulate(new.count for new in rows)])
        placed = tuple(
            Span(new.request, slice(first, stop), new.start, self.bases[new.request])
            for new, (first, stop) in zip(rows, bounds, strict=True)
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
