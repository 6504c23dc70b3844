"""The tensors that every forward reads its inputs from, and to how many rows it is padded: a captured graph's needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class InputBuffers:
    """What the forward to come reads, at the same place in memory step after step.

    Token ids, positions, padding mask, and the hidden states that an MTP layer takes [rows, hidden_size]. A forward
    reads the first n rows. Only rows that are tokens are written: padding keeps what an earlier forward left.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.ids = torch.zeros(0, dtype=torch.int64, device=device)
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)
        self.is_padding = torch.zeros(0, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(0, hidden_size, dtype=dtype, device=device)

    def clear(self) -> None:
        """Forgets what earlier steps left, at the same place in memory."""
        for held in self._all():
            held.zero_()

    def place(self, positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens [r], r <= n -> views [n] of positions and mask, True from row r on."""
        self._reserve(n)
        real = positions.shape[0]
        self.positions[:real] = positions
        self.is_padding[:real] = False
        self.is_padding[real:n] = True
        return self.positions[:n], self.is_padding[:n]

    def place_ids(self, ids: Tensor, n: int) -> Tensor:
        """Ids of the tokens [r], r <= n -> view [n]."""
        self._reserve(n)
        self.ids[: ids.shape[0]] = ids
        return self.ids[:n]

    def place_hidden(self, hidden: Tensor, n: int) -> Tensor:
        """Hidden states of the tokens [r, D], r <= n -> view [n, D]."""
        self._reserve(n)
        self.hidden[: hidden.shape[0]] = hidden
        return self.hidden[:n]

    def _all(self) -> tuple[Tensor, ...]:
        return self.ids, self.positions, self.is_padding, self.hidden

    def _reserve(self, n: int) -> None:
        more = n - self.ids.shape[0]
        if more > 0:
            self.ids, self.positions, self.is_padding, self.hidden = (
                torch.cat([held, held.new_zeros(more, *held.shape[1:])]) for held in self._all()
            )


@dataclass(frozen=True)
class GraphPadding:
    """What sets the rows of a forward: one number for target steps and what has their rows, or sizes for every forward.

    Raises:
        ValueError: both are given.
    """

    pad_to: int | None = None
    graph_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pad_to is not None and self.graph_sizes:
            raise ValueError("a batch is padded to pad_to or to one of graph_sizes, not both")

    def of_target(self, rows: int) -> int | None:
        """The rows of the graph that runs a target step; None where none does, since there are more than it holds."""
        return self.of_draft(rows) if self.pad_to is None or rows > self.pad_to else self.pad_to

    def of_draft(self, rows: int) -> int | None:
        """The same for draft steps behind the first, which has rows of the target step."""
        return min((size for size in self.graph_sizes if size >= rows), default=None)
