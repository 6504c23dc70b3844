"""Plain layers that every rank has whole: linear, norms, the activation.

Shapes are written ``[.., D]``; weights are ``[out, in]``. Parameters are created without storage and are given
their values, and with them their type, by ``reference.load``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """``x`` in the type of statistics, rotary tables, router, index scores and softmax: float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter that has a shape but no values yet."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ, to which an adapter may add (:mod:`reference.lora`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.adapters: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        y = F.linear(x, self.weight)
        return y if self.adapters is None else self.adapters(x, y)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) * w, over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = empty_parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        full = wide(x)
        mean_square = full.square().mean(dim=-1, keepdim=True)
        return (full / torch.sqrt(mean_square + self.epsilon) * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(biased variance + ε) * w + b, over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = empty_parameter(width)
        self.bias = empty_parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        centred = wide(x) - wide(x).mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return (centred / torch.sqrt(variance + self.epsilon) * self.weight + self.bias).to(x.dtype)


class SiluAndMultiply(nn.Module):
    """silu(gate) * up, silu(z) = z sigmoid(z)."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Both [.., F] -> [.., F]."""
        return F.silu(gate) * up


class GreedySampler(nn.Module):
    """The token of the largest logit of each row; the lowest token id wins a tie."""

    def forward(self, logits_RV: Tensor) -> Tensor:
        """[R, V] -> [R]."""
        return logits_RV.sort(dim=-1, descending=True, stable=True).indices[:, 0]


class RejectionSampler(nn.Module):
    """Greedy verification: a draft is accepted if it and all drafts before it are what the target samples there."""

    def forward(self, drafted_K: Tensor, sampled_R: Tensor) -> Tensor:
        """K drafts and the R = K + 1 tokens sampled before each and behind the last -> how many are accepted [1]."""
        right_K = drafted_K == sampled_R[:-1]
        return right_K.long().cumprod(dim=0).sum(dim=0, keepdim=True)
