"""Routed experts of one rank, as grouped products over rows sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optimized.all2all import All2AllManager
from optimized.communicator import Block, Communicator
from optimized.forward_context import get_forward_context
from optimized.loader import Loader
from optimized.mlp import SiluAndMul


class Permute(nn.Module):
    """Global expert ids [R, K] -> (flat (row, choice) pairs of local experts, sorted by expert; rows per expert)."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[R, K] -> pairs [P], counts [E_local]."""
        local = ids.flatten() - self.experts.start
        count = len(self.experts)
        local = local.masked_fill((local < 0) | (local >= count), count)
        counts = torch.bincount(local, minlength=count + 1)[:count]
        return local.argsort(stable=True), counts


class FusedExperts(nn.Module):
    """(hidden [R,D], ids [R,K], weights [R,K]) -> the rank's summand of the routed output [R,D].

    A rank holds a contiguous block of experts whole (expert parallelism) or some channels of every expert, stacked:
    ``w13`` [E_local, 2F_local, D] (gate rows, then up rows), ``w2`` [E_local, D, F_local]. Id -1 is no expert.
    """

    def __init__(self, loader: Loader, experts: range, channels: Block) -> None:
        super().__init__()
        self.permute = Permute(experts)
        gate_up = loader.stacked(_names(experts, "gate", "up"), channels, dim=0)
        self.w13 = nn.Parameter(gate_up.view(len(experts), -1, gate_up.shape[-1]), requires_grad=False)
        self.w2 = nn.Parameter(loader.stacked(_names(experts, "down"), channels, dim=1), requires_grad=False)
        self.act_fn = SiluAndMul()

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """-> partial [R,D]."""
        pairs, counts = self.permute(ids)
        sizes = counts.tolist()
        pairs = pairs[: sum(sizes)]
        rows = hidden.index_select(0, pairs.div(ids.shape[1], rounding_mode="floor"))
        inner = self.act_fn(_grouped_mm(rows, self.w13, sizes))
        out = _grouped_mm(inner, self.w2, sizes) * weights.flatten().index_select(0, pairs).unsqueeze(-1)
        # Every pair has its own place: deterministic on any device, and a NaN stays in its row.
        by_choice = out.new_zeros(ids.numel(), out.shape[1]).index_copy_(0, pairs, out)
        return by_choice.view(*ids.shape, out.shape[1]).sum(dim=1).to(hidden.dtype)


class DispatchedExperts(FusedExperts):
    """The same for rows that other ranks of a group hold as well as the own ones; ``manager`` dispatches in the group.

    (hidden [m,D], ids [m,K], weights [m,K]) -> [m,D], summed over the group: complete where it is the whole world.
    ``sp_size`` is tp where the rows are shards, else 1.
    """

    def __init__(
        self,
        loader: Loader,
        experts: range,
        channels: Block,
        group: Communicator,
        manager: All2AllManager,
        *,
        sp_size: int,
    ) -> None:
        super().__init__(loader, experts, channels)
        self.group, self.manager = group, manager
        self.sp_size = sp_size

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """-> [m,D]."""
        sizes = self._announced_sizes(hidden)
        rows, combine = self.manager.dispatch(hidden, ids, weights, sizes)
        return combine(super().forward(*rows))

    def _announced_sizes(self, hidden: Tensor) -> list[int]:
        """Rows of every rank of the group. Without metadata shards of one DP rank are equal; DP ranks must ask."""
        metadata, rows = get_forward_context().dp_metadata, hidden.shape[0]
        if metadata is not None:
            return metadata.sp_local_sizes(self.sp_size)
        if self.group.size == self.sp_size:
            return [rows] * self.group.size
        own = torch.tensor([rows], dtype=torch.int64, device=hidden.device)
        sizes: list[int] = self.group.all_gather(own).tolist()
        return sizes


def _names(experts: range, *projections: str) -> list[str]:
    return [f"{expert}.{name}_proj.weight" for expert in experts for name in projections]


def _grouped_mm(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """[P, in] sorted by expert, [E, out, in] -> [P, out]."""
    parts = zip(torch.split(rows, sizes), weights.mT.unbind(), sizes, strict=True)
    products = [torch.mm(x, weight) for x, weight, size in parts if size]
    return torch.cat(products) if products else rows.new_empty(0, weights.shape[1])
