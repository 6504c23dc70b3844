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
    """(hidden [R,D], ids [R,K], weights [R,K]) -> the local experts' summand of the routed output [R,D].

    A rank holds a contiguous block of E/ep experts, stacked: ``w13`` [E_local, 2Fe, D] (gate rows, then up rows),
    ``w2`` [E_local, D, Fe]. Id -1 is no expert.
    """

    def __init__(self, loader: Loader, count: int, ep: Communicator) -> None:
        super().__init__()
        own = Block.of(ep).span(count, "n_routed_experts")
        self.permute = Permute(range(own.start, own.stop))
        gate_up = self._stack(loader, "gate", "up")
        self.w13 = nn.Parameter(gate_up.view(len(self.permute.experts), -1, gate_up.shape[-1]), requires_grad=False)
        self.w2 = nn.Parameter(self._stack(loader, "down"), requires_grad=False)
        self.act_fn = SiluAndMul()

    def _stack(self, loader: Loader, *names: str) -> Tensor:
        return loader.stacked([f"{e}.{name}_proj.weight" for e in self.permute.experts for name in names])

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """-> partial [R,D]."""
        return self.local(hidden, ids, weights)

    def local(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """-> partial [R,D]."""
        pairs, counts = self.permute(ids)
        sizes = counts.tolist()
        pairs = pairs[: sum(sizes)]
        rows = hidden.index_select(0, pairs.div(ids.shape[1], rounding_mode="floor"))
        inner = self.act_fn(_grouped_mm(rows, self.w13, sizes))
        out = _grouped_mm(inner, self.w2, sizes) * weights.flatten().index_select(0, pairs).unsqueeze(-1)
        # Every pair has its own place: deterministic on any device, and a NaN stays in its row.
        by_choice = out.new_zeros(ids.numel(), out.shape[1]).index_copy_(0, pairs, out)
        return by_choice.view(*ids.shape, -1).sum(dim=1).to(hidden.dtype)


class DispatchedExperts(FusedExperts):
    """The same on a shard: (hidden [m,D], ids [m,K], weights [m,K]) -> the complete routed output [m,D]."""

    def __init__(self, loader: Loader, count: int, ep: Communicator, manager: All2AllManager, tp_size: int) -> None:
        super().__init__(loader, count, ep)
        self.manager = manager
        self.tp_size, self.ep_size = tp_size, ep.size

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """-> [m,D], summed over all experts."""
        sizes = self._announced_sizes(hidden.shape[0])
        routed = self.local(*self.manager.dispatch(hidden, ids, weights, sizes))
        return self.manager.combine(routed, sizes)

    def _announced_sizes(self, rows: int) -> list[int]:
        """Rows of every rank; without a forward context there is one DP rank, whose shards have equal rows."""
        metadata = get_forward_context().dp_metadata
        return [rows] * self.ep_size if metadata is None else metadata.sp_local_sizes(self.tp_size)


def _grouped_mm(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """[P, in] sorted by expert, [E, out, in] -> [P, out]."""
    parts = zip(torch.split(rows, sizes), weights.mT.unbind(), sizes, strict=True)
    products = [torch.mm(x, weight) for x, weight, size in parts if size]
    return torch.cat(products) if products else rows.new_empty(0, weights.shape[1])
