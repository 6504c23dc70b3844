"""Tensor parallelism: layers of which every rank holds a slice, and the sums that complete them.

Rank r of t holds: of a column-parallel weight the r-th of t blocks of rows (its outputs: heads or channels), of a
row-parallel weight the r-th block of columns (its inputs), of a vocabulary table the r-th block of rows.

Shapes: T rows (tokens), D hidden size, V vocabulary, v = ceil(V / t) rows of the vocabulary on one rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.layers import Linear, empty_parameter


class Communicator(Protocol):
    """What this implementation needs of its tensor-parallel group."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[m, ...] -> [size * m, ...], in rank order."""


class Sliced(nn.Module):
    """A module of whose weight every rank holds a part."""

    def slice_weight(self, full: Tensor) -> Tensor:
        """This rank's part of the stored weight."""
        raise NotImplementedError


class ColumnParallelLinear(Sliced, Linear):
    """A linear layer of which this rank computes its block of the outputs: [.., in] -> [.., out / t]."""

    def __init__(self, in_features: int, out_features: int, tp: Communicator) -> None:
        super().__init__(in_features, out_features // tp.size)
        self.tp = tp

    def slice_weight(self, full: Tensor) -> Tensor:
        """This rank's rows of the stored weight."""
        return full.chunk(self.tp.size, dim=0)[self.tp.rank]


class RowParallelLinear(Sliced, Linear):
    """A linear layer over this rank's block of the inputs: [.., in / t] -> [.., out], a partial sum.

    With ``reduce`` the partial sums of all ranks are added.
    """

    def __init__(self, in_features: int, out_features: int, tp: Communicator, *, reduce: bool) -> None:
        super().__init__(in_features // tp.size, out_features)
        self.tp = tp
        self.reduce = reduce

    def slice_weight(self, full: Tensor) -> Tensor:
        """This rank's columns of the stored weight."""
        return full.chunk(self.tp.size, dim=1)[self.tp.rank]

    def forward(self, x: Tensor) -> Tensor:
        """[.., in / t] -> [.., out]."""
        partial = super().forward(x)
        return self.tp.all_reduce(partial) if self.reduce else partial


class VocabularyTable(Sliced):
    """This rank's rows [v, D] of a table [V, D]; rows past V are zero."""

    def __init__(self, vocabulary: int, width: int, tp: Communicator) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.tp = tp
        self.rows = -(-vocabulary // tp.size)
        self.weight = empty_parameter(self.rows, width)

    def slice_weight(self, full: Tensor) -> Tensor:
        """This rank's rows of the stored table."""
        padded = F.pad(full, (0, 0, 0, self.rows * self.tp.size - self.vocabulary))
        return padded.chunk(self.tp.size, dim=0)[self.tp.rank]


class VocabularyParallelEmbedding(VocabularyTable):
    """ids [T] -> embeddings [T, D]: each rank looks up the tokens it holds, and the sum has them all."""

    def forward(self, ids_T: Tensor) -> Tensor:
        """Token ids -> their rows of the table."""
        local_T = ids_T - self.tp.rank * self.rows
        mine_T = (local_T >= 0) & (local_T < self.rows)
        found_TD = F.embedding(torch.where(mine_T, local_T, 0), self.weight)
        return self.tp.all_reduce(torch.where(mine_T[:, None], found_TD, 0))


class VocabularyParallelHead(VocabularyTable):
    """hidden [T, D] -> logits [T, V]: each rank computes the logits of its tokens, and all are gathered."""

    def forward(self, h_TD: Tensor) -> Tensor:
        """Hidden states -> logits of the whole vocabulary, without the padding rows."""
        logits_vT = F.linear(self.weight, h_TD)
        logits_VT = self.tp.all_gather(logits_vT)[: self.vocabulary]
        return logits_VT.T.contiguous()
