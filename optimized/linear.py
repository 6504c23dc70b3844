"""Matrices. A parallel layer is a plain one built from the rank's block: which block is decided where it is built."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized.communicator import Block, Communicator
from optimized.loader import Loader


class Linear(nn.Module):
    """x [..., in] -> x W^T [..., out]; nothing is summed over ranks here."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight)


class VocabParallelEmbedding(nn.Module):
    """Token ids [n] -> rows [n, D] of a table whose rows are divided over the ranks; complete on every rank."""

    def __init__(self, loader: Loader, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(loader.vocabulary("weight", Block.of(tp)), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[n] -> [n, D]."""
        rows = self.weight.shape[0]
        local = ids - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(found.masked_fill(elsewhere[:, None], 0))


class ParallelLMHead(nn.Module):
    """Hidden [n, D] -> logits [n, V]: each rank has the rows of its part of the vocabulary, padding is cut off."""

    def __init__(self, loader: Loader, vocab_size: int, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(loader.vocabulary("weight", Block.of(tp)), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V]."""
        by_token = torch.mm(self.weight, hidden.t())  # vocabulary first: the gather then needs no reordering
        return self.tp.all_gather(by_token)[: self.vocab_size].t()


class GreedySampler(nn.Module):
    """Logits [requests, V] -> token ids [requests]; the lowest id wins a tie."""

    def forward(self, logits: Tensor) -> Tensor:
        """[requests, V] -> [requests]."""
        return logits.argmax(dim=-1)
