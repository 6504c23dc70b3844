"""The mixture of experts: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimized.all2all import ALL2ALL_MANAGERS
from optimized.communicator import Block
from optimized.experts import DispatchedExperts, FusedExperts
from optimized.forward_context import get_forward_context
from optimized.loader import Loader
from optimized.mlp import MLP
from optimized.router import Gate
from optimized.setup import Setup


class MoE(nn.Module):
    """x [rows, D] -> [rows, D].

    On full rows, a summand: local experts plus the rank's channels of the shared expert, to be reduced once; with data
    parallelism the rows are dispatched between the DP ranks. On a shard (``already_sequence_parallel``), complete: rows
    are dispatched to their experts on all ranks, the shared expert is whole.
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


@dataclass(frozen=True)
class ExpertPlacement:
    """Which part of the routed experts each rank of the world holds.

    With expert parallelism a contiguous block of whole experts, else a block of the channels of every expert.
    """

    experts: int
    ranks: int
    expert_parallel: bool

    def experts_of(self, rank: int) -> range:
        """The experts of which a rank of the world holds a part; raises ValueError where they cannot be divided."""
        block = Block(rank, self.ranks) if self.expert_parallel else Block()
        own = block.span(self.experts, "n_routed_experts")
        return range(own.start, own.stop)

    def channels_of(self, rank: int) -> Block:
        """The channels of each of these."""
        return Block() if self.expert_parallel else Block(rank, self.ranks)


def _experts(setup: Setup, loader: Loader, *, dispatched: bool) -> FusedExperts:
    """Rows go from shard to shard in the whole world, full rows between DP ranks, and nowhere without either."""
    parallel, world = setup.parallel, setup.ep
    placement = ExpertPlacement(setup.config.n_routed_experts, world.size, parallel.enable_expert_parallel)
    own = placement.experts_of(world.rank), placement.channels_of(world.rank)
    group = world if dispatched else setup.dp
    if group is None:
        return FusedExperts(loader, *own)
    members = range(world.size) if dispatched else range(setup.tp.rank, world.size, setup.tp.size)
    manager = ALL2ALL_MANAGERS[parallel.all2all_backend](group, [placement.experts_of(rank) for rank in members])
    return DispatchedExperts(loader, *own, group, manager, sp_size=setup.tp.size if dispatched else 1)
