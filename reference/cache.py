"""What one layer keeps of one request: a row per position, for the queries of later tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerCache:
    """Named tables [S, width] over the positions 0 .. S-1 of one request, of which some may hold no row.

    ``tables`` is read by others; ``begin`` and ``write`` fill it.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Tensor] = {}
        self._held_S = torch.zeros(0, dtype=torch.bool)
        self._start = 0

    def forget(self, position: int) -> None:
        """Drops what stands at ``position`` and behind: drafts that were rejected, or rows that are written again."""
        self._held_S = self._held_S[:position]
        self.tables = {name: table[:position] for name, table in self.tables.items()}

    def begin(self, positions_T: Tensor) -> Tensor:
        """Announces rows at consecutive positions; which of the positions up to the last one hold a row: [S] bool.

        What stood at these positions or behind is forgotten.
        """
        self._start = int(positions_T[0])
        self.forget(self._start)
        new_T = torch.ones_like(positions_T, dtype=torch.bool)
        self._held_S = torch.cat((_lengthened(self._held_S.to(new_T.device), self._start), new_T))
        return self._held_S

    def write(self, name: str, rows: Tensor) -> Tensor:
        """Puts ``rows`` [T, width] at the announced positions; the whole table [S, width]."""
        table = _lengthened(self.tables.get(name, rows[:0]), self._start)
        self.tables[name] = torch.cat((table, rows))
        return self.tables[name]

    def held(self) -> dict[str, Tensor]:
        """The rows of the positions that hold one, in their order: name -> [positions held, width]; {} for none."""
        return {name: table[self._held_S] for name, table in self.tables.items()} if self._held_S.any() else {}


def _lengthened(table: Tensor, length: int) -> Tensor:
    """Zeros stand behind the rows up to ``length``, if there are fewer.

    There are fewer where the layer never saw a position: of several MTP layers each runs in some draft steps only.
    """
    missing = length - table.shape[0]
    return F.pad(table, (0, 0) * (table.ndim - 1) + (0, missing))
