"""What only MTP layers have: the two input norms in one pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from optimized.norms import RMSNorm


class FusedEhNorm(nn.Module):
    """(embedding [n,D], hidden [n,D]) -> enorm(embedding), hnorm(hidden), both [n,D] and made in one pass."""

    def __init__(self, enorm: RMSNorm, hnorm: RMSNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([enorm.weight, hnorm.weight]), requires_grad=False)
        self.floor = enorm.floor

    def forward(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n,D] twice -> [n,D] twice."""
        both = torch.stack([embedding, hidden], dim=1).to(self.floor.dtype)
        root = torch.hypot(torch.linalg.vector_norm(both, dim=-1, keepdim=True), self.floor)
        normed = (both * (math.sqrt(hidden.shape[-1]) / root) * self.weight).to(hidden.dtype)
        return normed[:, 0], normed[:, 1]
