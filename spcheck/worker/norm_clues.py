"""Whether the output of a norm differs as it would with another eps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.config import ModelConfig

_INDEX_KEY = ".indexer.k_rope.out"
_NORMS = ("layernorm.out", "norm.out")
_FIT = 1e-3
_FEW = 3


def other_eps(probe: str, gap: Tensor, others: Mapping[str, Tensor], config: ModelConfig) -> bool | None:
    """True where ``gap`` [rows, width], actual minus expected, is what another eps makes of the norm's input.

    Each row of the normalised input, times a weight, is then too much by a share that goes with one over the row's
    variance. Of the index key, which is turned behind its norm, the channels that are not turned tell.
    """
    found = _normed(probe, others, config)
    if found is None or gap.shape[0] < _FEW:
        return None
    normed, variance, first = found
    gap = gap[:, first:]
    if gap.shape != normed.shape or not bool(gap.any(dim=1).all()):
        return None
    largest = int(gap.abs().amax(dim=1).argmax())
    weighted = normed * (gap[largest] / normed[largest])
    shares = (gap * weighted).sum(dim=1) / weighted.square().sum(dim=1)
    rest = (gap - shares.unsqueeze(1) * weighted).norm(dim=1)
    by_variance = shares * variance
    even = float((by_variance - by_variance.mean()).abs().amax()) <= 0.05 * float(by_variance.mean().abs())
    varied = float(variance.max()) > 1.1 * float(variance.min())
    return True if varied and even and bool((rest <= _FIT * gap.norm(dim=1)).all()) else None


def _normed(probe: str, others: Mapping[str, Tensor], config: ModelConfig) -> tuple[Tensor, Tensor, int] | None:
    """The input [rows, width] over its deviation, its variance [rows], and the probe's first channel to look at."""
    if probe.endswith(_INDEX_KEY):
        x = others.get(probe.removesuffix("k_rope.out") + "k_norm.in")
        first = config.qk_rope_head_dim
    else:
        x = others.get(probe.removesuffix(".out") + ".in") if probe.endswith(_NORMS) else None
        first = 0
    if x is None:
        return None
    x = x.double()
    if first:
        x = x - x.mean(dim=1, keepdim=True)
    variance = x.square().mean(dim=1)
    normed = x[:, first:] / variance.clamp(min=torch.finfo(x.dtype).tiny).sqrt().unsqueeze(1)
    return normed, variance, first
