"""Rotary positions as multiplication of complex numbers; the table grows with the longest request."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from optimized.norms import statistics_dtype
from reference.config import ModelConfig, YarnConfig


class RotaryTable:
    """``cis[p, j] = exp(i p f[j])`` for all positions reserved so far, [positions, dr/2] complex."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        kind = statistics_dtype(dtype)
        self.frequencies = torch.tensor(frequencies(config), dtype=kind, device=device)
        self.magnitude = _magnitude(config.yarn)
        self.cis = torch.polar(self.frequencies.new_zeros(0, 0), self.frequencies.new_zeros(0, 0))

    def reserve(self, positions: int) -> None:
        """Makes positions 0 .. positions-1 available."""
        if positions <= self.cis.shape[0]:
            return
        angles = torch.arange(positions, device=self.frequencies.device)[:, None] * self.frequencies
        self.cis = torch.polar(torch.full_like(angles, self.magnitude), angles)


def frequencies(config: ModelConfig) -> list[float]:
    """f[j], j < dr/2, in radians per position; YaRN divides the slow ones by its factor."""
    width = config.qk_rope_head_dim
    base = [config.rope_theta ** (-2 * j / width) for j in range(width // 2)]
    if config.yarn is None:
        return base
    low, high = _yarn_bounds(config.yarn, width, config.rope_theta)
    ramp = [min(max((j - low) / (high - low), 0.0), 1.0) for j in range(width // 2)]
    return [f * (1 - r) + f / config.yarn.factor * r for f, r in zip(base, ramp, strict=True)]


def attention_scale(config: ModelConfig) -> float:
    """The factor on attention logits; YaRN raises it by the square of its mscale."""
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return scale if config.yarn is None else scale * _mscale(config.yarn, config.yarn.mscale_all_dim) ** 2


def _yarn_bounds(yarn: YarnConfig, width: int, theta: float) -> tuple[float, float]:
    """Between which j the frequencies go over from unchanged to divided."""

    def turns(count: float) -> float:
        return width * math.log(yarn.original_max_position_embeddings / (2 * math.pi * count)) / (2 * math.log(theta))

    low = max(math.floor(turns(yarn.beta_fast)), 0)
    high = min(math.ceil(turns(yarn.beta_slow)), width - 1)
    return low, high + 0.001 if low == high else high


def _mscale(yarn: YarnConfig, amount: float) -> float:
    return 1.0 if yarn.factor <= 1 else 0.1 * amount * math.log(yarn.factor) + 1.0


def _magnitude(yarn: YarnConfig | None) -> float:
    return 1.0 if yarn is None else _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)


class _Rotary(nn.Module):
    """What both layouts share: the turns of the rows' positions, shaped for x."""

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.table = table

    def turns(self, x: Tensor, positions: Tensor) -> Tensor:
        """cis [n, dr/2], or [n, 1, dr/2] for an x with heads."""
        cis = self.table.cis.index_select(0, positions)
        return cis if x.dim() == 2 else cis.unsqueeze(1)


class InterleavedRotary(_Rotary):
    """Pairs (x[2j], x[2j+1]); the whole last axis [.., dr] is rotated and stays interleaved."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[n, (heads,) dr] and [n] -> rotated, same shape."""
        wide = x.to(self.table.frequencies.dtype)
        pairs = torch.complex(wide[..., ::2], wide[..., 1::2]) * self.turns(x, positions)
        return torch.view_as_real(pairs).flatten(-2).to(x.dtype)


class HalfSplitRotary(_Rotary):
    """Pairs (x[j], x[j + dr/2]) of the first dr components of [.., di]; the rest passes."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[n, (heads,) di] and [n] -> first dr components rotated, same shape."""
        half = self.table.frequencies.shape[0]
        wide = x.to(self.table.frequencies.dtype)
        pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * self.turns(x, positions)
        first, second = torch.view_as_real(pairs).to(x.dtype).unbind(-1)
        return torch.cat([first, second, x[..., 2 * half :]], dim=-1)
