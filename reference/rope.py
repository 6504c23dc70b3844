"""Rotary position embedding: frequencies with YaRN, and the two layouts of a rotation.

Angles are radians: position p turns pair j by p * f[j]. dr = ``qk_rope_head_dim``, half of it pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from reference.config import ModelConfig, YarnConfig
from reference.layers import wide


def frequencies(config: ModelConfig) -> list[float]:
    """f[j] for j = 0 .. dr/2 - 1, the same for attention and indexer."""
    dr = config.qk_rope_head_dim
    base = [config.rope_theta ** (-2 * j / dr) for j in range(dr // 2)]
    if config.yarn is None:
        return base
    ramp = _yarn_ramp(config.yarn, config.rope_theta, dr)
    return [f * (1 - r) + f / config.yarn.factor * r for f, r in zip(base, ramp, strict=True)]


def _yarn_ramp(yarn: YarnConfig, theta: float, dr: int) -> list[float]:
    """How much of each pair's frequency is stretched: 0 for fast pairs, 1 for slow ones."""

    def pair_that_turns(times: float) -> float:
        return dr * math.log(yarn.original_max_position_embeddings / (2 * math.pi * times)) / (2 * math.log(theta))

    lo = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    hi: float = min(math.ceil(pair_that_turns(yarn.beta_slow)), dr - 1)
    if lo == hi:
        hi += 0.001
    return [min(max((j - lo) / (hi - lo), 0.0), 1.0) for j in range(dr // 2)]


def magnitude(yarn: YarnConfig, mscale: float) -> float:
    """m(a) = 0.1 a ln(s) + 1 for the stretch factor s, and 1 without a stretch."""
    return 0.1 * mscale * math.log(yarn.factor) + 1 if yarn.factor > 1 else 1.0


def table_scale(config: ModelConfig) -> float:
    """What cos and sin are multiplied by."""
    if config.yarn is None:
        return 1.0
    return magnitude(config.yarn, config.yarn.mscale) / magnitude(config.yarn, config.yarn.mscale_all_dim)


def attention_scale(config: ModelConfig) -> float:
    """σ = (dn + dr)^(-1/2) m(mscale_all_dim)²."""
    sigma = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return sigma if config.yarn is None else sigma * magnitude(config.yarn, config.yarn.mscale_all_dim) ** 2


class Rotary(nn.Module):
    """Rotates the first dr components of x [T, .., width] by the positions [T]; the others stay as they are.

    Interleaved: pairs (x[2j], x[2j+1]), written back where they were. Otherwise half-split: pairs (x[j], x[j+dr/2]).
    Attention rotates interleaved, the indexer half-split.
    """

    def __init__(self, config: ModelConfig, *, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.frequencies = frequencies(config)
        self.scale = table_scale(config)

    def forward(self, x: Tensor, positions_T: Tensor) -> Tensor:
        """x [T, .., width] -> the same, rotated."""
        dr = 2 * len(self.frequencies)
        cos, sin = self._table(positions_T, wide(x))
        turned, rest = wide(x[..., :dr]), x[..., dr:]
        axis, grid = (-1, (dr // 2, 2)) if self.interleaved else (-2, (2, dr // 2))
        a, b = turned.reshape(*x.shape[:-1], *grid).unbind(axis)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=axis).flatten(-2)
        return torch.cat((rotated.to(x.dtype), rest), dim=-1)

    def _table(self, positions_T: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1 .., dr/2], in the type of x and broadcast over the dimensions between."""
        f = torch.tensor(self.frequencies, dtype=x.dtype, device=x.device)
        angles = positions_T.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * f
        return angles.cos() * self.scale, angles.sin() * self.scale
