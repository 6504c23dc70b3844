"""The gated MLP: dense layers and the shared expert."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from optimized.communicator import Block, Communicator
from optimized.linear import Linear
from optimized.loader import Loader


class SiluAndMul(nn.Module):
    """Gate and up side by side [rows, 2F] -> silu(gate) * up [rows, F]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[rows, 2F] -> [rows, F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class MLP(nn.Module):
    """x [rows, D] -> [rows, D].

    Tensor-parallel, F/tp channels and a partial output; or, where the rows are a shard (``is_sequence_parallel``),
    whole on every rank: ranks then hold different tokens, and summands of different tokens cannot be added.
    """

    def __init__(self, loader: Loader, tp: Communicator, *, is_sequence_parallel: bool) -> None:
        super().__init__()
        block = Block() if is_sequence_parallel else Block.of(tp)
        self.gate_up_proj = Linear(loader.fused(["gate_proj.weight", "up_proj.weight"], block))
        self.act_fn = SiluAndMul()
        self.down_proj = Linear(loader.columns("down_proj.weight", block))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, D] -> [rows, D], a summand or complete."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out
