"""RMSNorm alone, with the residual, and with the all-reduce that a tensor-parallel block leaves open."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from optimized.communicator import Communicator


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of norm statistics, router, index scores and softmax: never below float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Norm(nn.Module):
    """x [..., D] -> x / sqrt(mean(x^2) + eps) * weight, as a ratio of lengths: hypot(|x|, sqrt(D eps)) / sqrt(D)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        kind = statistics_dtype(weight.dtype)
        self.floor = torch.full((), math.sqrt(weight.shape[0] * eps), dtype=kind, device=weight.device)

    def normalise(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in the type of ``x``."""
        wide = x.to(self.floor.dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        root = torch.hypot(length, self.floor) / math.sqrt(x.shape[-1])
        return (wide / root * self.weight).to(x.dtype)


class RMSNorm(Norm):
    """The norm alone."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.normalise(x)


class ResidualRMSNorm(Norm):
    """(x, residual) -> (norm(x + residual), x + residual), on whatever rows it gets; no residual counts as zero."""

    def stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[rows, D] twice -> the residual stream [rows, D] that is normed."""
        return x if residual is None else x + residual

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """[rows, D] twice -> [rows, D] twice."""
        total = self.stream(x, residual)
        return self.normalise(total), total


class FusedAllReduceRMSNorm(ResidualRMSNorm):
    """:func:`fused_allreduce_rms_norm` as a module; without a residual (a model's entry) ``x`` is complete already."""

    def __init__(self, weight: Tensor, eps: float, tp: Communicator) -> None:
        super().__init__(weight, eps)
        self.tp = tp

    def stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Partial [n, D] and residual [n, D] -> the residual stream [n, D], for one all-reduce."""
        return x if residual is None else self.tp.all_reduce(x) + residual

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Partial [n, D] and residual [n, D] -> (normed, residual') [n, D]."""
        if residual is None:
            return self.normalise(x), x
        return fused_allreduce_rms_norm(x, residual, self, self.tp)


def fused_allreduce_rms_norm(partial: Tensor, residual: Tensor, norm: Norm, tp: Communicator) -> tuple[Tensor, Tensor]:
    """Sums the partial over the ranks, adds the residual, norms: -> (normed, residual'), all [n, D]."""
    total = tp.all_reduce(partial) + residual
    return norm.normalise(total), total
