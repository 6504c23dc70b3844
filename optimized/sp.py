"""The sequence-parallel primitives. Token rows are dim 0; shard ``r`` is rows ``[r*m, (r+1)*m)``, ``m = ceil(n/tp)``.

No primitive looks at a row count to find out whether its argument is a shard: with one row, full and shard look
alike. The caller's own structure says which it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.communicator import Communicator


class SequenceParallel:
    """The four primitives over one tensor-parallel group."""

    def __init__(self, group: Communicator) -> None:
        self.group = group

    def shard_rows(self, n: int) -> int:
        """m, the rows of each shard of ``n`` rows."""
        return -(-n // self.group.size)

    def sp_shard(self, x: Tensor) -> Tensor:
        """Full [n, ...] -> shard [m, ...]; zero rows fill up the end. Never a view of ``x``."""
        m = self.shard_rows(x.shape[0])
        own = x[self.group.rank * m : (self.group.rank + 1) * m]
        if own.shape[0] == m:
            return own.clone()
        return _with_zero_rows(own, m)

    def sp_all_gather(self, x: Tensor) -> Tensor:
        """Shard [m, ...] -> [tp*m, ...]. The caller trims to its n rows."""
        return self.group.all_gather(x)

    def sp_reduce_scatter(self, x: Tensor) -> Tensor:
        """Partial [n, D] -> shard [m, D] of the sum."""
        rows = self.shard_rows(x.shape[0]) * self.group.size
        return self.group.reduce_scatter(x if rows == x.shape[0] else _with_zero_rows(x, rows))

    def sp_padding_mask(self, mask: Tensor | None, x: Tensor) -> Tensor:
        """[n] bool, True on graph padding (None: nowhere) -> [m] bool, True on rows that SP adds as well.

        Raises:
            ValueError: the mask is not one flag per row of the full ``x`` [n, ...].
        """
        n = x.shape[0]
        if mask is None:
            mask = x.new_zeros(n, dtype=torch.bool)
        if mask.shape != (n,):
            raise ValueError(f"the padding mask has shape {tuple(mask.shape)} for {n} rows")
        return ~self.sp_shard(~mask)


def _with_zero_rows(x: Tensor, rows: int) -> Tensor:
    """[n, ...] -> new [rows, ...], zero from row n on."""
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
