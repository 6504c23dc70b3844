"""Whether rotary values are turned as at another position, or in other pairs of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference.config import ModelConfig
from spcheck.plan.phases import Row

_ANGLE = 10  # times ``close``: by how many radians the same angle may differ


def turned(probe: str, e: Tensor, a: Tensor, at: Sequence[Row], config: ModelConfig, close: float) -> list[Any] | None:
    """``["by", d]``: every row as d positions further; ``["at"]``: as at others; ``["pairs"]``: in other pairs.

    Of rotary outputs [rows, heads * width], in whose heads the first ``qk_rope_head_dim`` channels are turned: in
    neighbouring pairs in attention, channel i with i + half of them in the indexer. The first pair is turned by one
    radian a position. None where the rows are not the same ones turned otherwise. ``close``: the share by which equal
    values may differ.
    """
    indexer = ".indexer." in probe
    width = config.index_head_dim if indexer else config.qk_rope_head_dim
    if not probe.endswith(("q_rope.out", "k_rope.out")) or not width or e.shape[1] % width:
        return None
    if not bool((e.isfinite() & a.isfinite()).all()):
        return None
    expected, actual = (x.view(len(x), -1, width) for x in (e, a))
    size = config.qk_rope_head_dim
    if not _same(expected[..., size:], actual[..., size:], close):
        return None
    wanted, got = (_pairs(x[..., :size], halves=indexer) for x in (expected, actual))
    if not _same(wanted.abs(), got.abs(), close):
        lengths = _same(expected[..., :size].norm(dim=-1), actual[..., :size].norm(dim=-1), close)
        return ["pairs"] if lengths else None
    angles = [_angle(w[:, 0], g[:, 0]) for w, g in zip(wanted, got, strict=True)]
    positions = [position for _, position in at]
    offsets = [_offset(x, p, config, close) for x, p in zip(angles, positions, strict=True)]
    if offsets[0] is None or len(set(offsets)) > 1:
        return ["at"]
    return ["by", offsets[0]] if offsets[0] else None  # the pair that turns fastest is right: no other position


def _pairs(x: Tensor, *, halves: bool) -> Tensor:
    """[rows, heads, n] real -> [rows, heads, n / 2] complex."""
    if halves:
        first, second = x.chunk(2, dim=-1)
        return torch.complex(first.contiguous(), second.contiguous())
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())


def _same(x: Tensor, y: Tensor, close: float) -> bool:
    return x.numel() == 0 or float((x - y).abs().amax()) <= close * float(x.abs().amax())


def _angle(wanted: Tensor, got: Tensor) -> float:
    """By how many radians the pair [heads] that turns fastest is turned further: in the head where it is longest."""
    largest = int(wanted.abs().argmax())
    return float((got[largest] * wanted[largest].conj()).angle())


def _offset(angle: float, position: int, config: ModelConfig, close: float) -> int | None:
    """Positions that the angle stands for, the nearest that fit."""
    places = range(-position, config.max_position_embeddings - position)
    fitting = (d for d in sorted(places, key=abs) if abs(math.remainder(angle - d, math.tau)) < _ANGLE * close)
    return next(fitting, None)
