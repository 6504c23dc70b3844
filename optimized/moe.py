"""The mixture of experts: router, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optimized.all2all import ALL2ALL_MANAGERS
from optimized.experts import DispatchedExperts, FusedExperts
from optimized.forward_context import get_forward_context
from optimized.loader import Loader
from optimized.mlp import MLP
from optimized.router import Gate
from optimized.setup import Setup


class MoE(nn.Module):
    """x [rows, D] -> [rows, D].

    On full rows, a summand: local experts plus the rank's channels of the shared expert, to be reduced once. On a
    shard (``already_sequence_parallel``), complete: rows are dispatched to their experts, the shared expert is whole.
    """

    def __init__(self, setup: Setup, loader: Loader, *, already_sequence_parallel: bool) -> None:
        super().__init__()
        config = setup.config
        self.skip_padding = setup.skip_padding
        self.gate = Gate(config, loader.at("gate"))
        self.experts = _experts(setup, loader.at("experts"), dispatched=already_sequence_parallel)
        shared = loader.at("shared_experts")
        self.shared_experts = MLP(shared, setup.tp, is_sequence_parallel=already_sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, D] -> [rows, D]."""
        ids, weights = self.gate(x)
        routed: Tensor = self.experts(x, self._without_padding(ids), weights)
        out: Tensor = routed + self.shared_experts(x)
        return out

    def _without_padding(self, ids: Tensor) -> Tensor:
        """Expert -1 for every choice of a row that is no token."""
        mask = get_forward_context().is_padding
        if not self.skip_padding or mask is None:
            return ids
        return torch.where(mask.unsqueeze(1), -1, ids)


def _experts(setup: Setup, loader: Loader, *, dispatched: bool) -> FusedExperts:
    count = setup.config.n_routed_experts
    if not dispatched:
        return FusedExperts(loader, count, setup.ep)
    manager = ALL2ALL_MANAGERS[setup.parallel.all2all_backend](setup.ep)
    return DispatchedExperts(loader, count, setup.ep, manager, setup.tp.size)
