"""Whether rotary values are turned as at another position, or in other pairs of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference.config import ModelConfig
from spcheck.phases import Row

_CLOSE = 1e-9
_ANGLE = 1e-6


def turned(probe: str, e: Tensor, a: Tensor, at: Sequence[Row], config: ModelConfig) -> list[Any] | None:
    """``["by", d]``: every row as d positions further; ``["at"]``: as at others; ``["pairs"]``: in other pairs.

    Of rotary outputs [rows, heads * width], in whose heads the first ``qk_rope_head_dim`` channels are turned: in
    neighbouring pairs in attention, channel i with i + half of them in the indexer. The first pair is turned by one
    radian a position. None where the rows are not the same ones turned otherwise.
    """
    indexer = ".indexer." in probe
    width = config.index_head_dim if indexer else config.qk_rope_head_dim
    if not probe.endswith(("q_rope.out", "k_rope.out")) or not width or e.shape[1] % width:
        return None
    if not bool((e.isfinite() & a.isfinite()).all()):
        return None
    expected, actual = (x.view(len(x), -1, width) for x in (e, a))
    size = config.qk_rope_head_dim
    if not _same(expected[..., size:], actual[..., size:]):
        return None
    wanted, got = (_pairs(x[..., :size], halves=indexer) for x in (expected, actual))
    if not _same(wanted.abs(), got.abs()):
        lengths = _same(expected[..., :size].norm(dim=-1), actual[..., :size].norm(dim=-1))
        return ["pairs"] if lengths else None
    offsets = [_offset(w[:, 0], g[:, 0], position, config) for w, g, (_, position) in zip(wanted, got, at, strict=True)]
    return ["by", offsets[0]] if offsets[0] is not None and len(set(offsets)) == 1 else ["at"]


def _pairs(x: Tensor, *, halves: bool) -> Tensor:
    """[rows, heads, n] real -> [rows, heads, n / 2] complex."""
    if halves:
        first, second = x.chunk(2, dim=-1)
        return torch.complex(first.contiguous(), second.contiguous())
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())


def _same(x: Tensor, y: Tensor) -> bool:
    return x.numel() == 0 or float((x - y).abs().amax()) <= _CLOSE * float(x.abs().amax())


def _offset(wanted: Tensor, got: Tensor, position: int, config: ModelConfig) -> int | None:
    """Positions between the two, by the pairs [heads] that turn fastest; the nearest one that fits."""
    largest = int(wanted.abs().argmax())
    angle = float((got[largest] * wanted[largest].conj()).angle())
    places = range(-position, config.max_position_embeddings - position)
    return next((d for d in sorted(places, key=abs) if abs(math.remainder(angle - d, math.tau)) < _ANGLE), None)
