"""Fingerprints of values that every rank must hold alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

_SMALL = 2**13  # elements
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(replicas: Mapping[str, Tensor]) -> Tensor:
    """One number for all replicas of a forward: another value anywhere changes it.

    Of large ones the sums of bits over rows and over columns, which take no longer than reading; their checksum keeps
    the order of both.
    """
    checksum = 0
    for x in replicas.values():
        bits = x.contiguous().view(_INTEGERS[x.element_size()])
        if bits.numel() > _SMALL:
            bits = _mixed(bits)
        for part in (bits,) if bits.numel() <= _SMALL else (bits.sum(dim=1), bits.sum(dim=0)):
            checksum = zlib.crc32(part.numpy(force=True).data, checksum)
    return torch.tensor([checksum, len(replicas)])


def row_digests(x: Tensor) -> Tensor:
    """[rows] int64 fingerprints of [rows, ...]: equal rows (bitwise, but for -0 and +0) have equal ones.

    An idle data-parallel rank has no rows, and then no fingerprints.
    """
    flat = x.flatten(1)  # a reshape to -1 columns is ambiguous without rows
    if flat.is_floating_point():
        flat = (flat + 0.0).contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return (_mixed(flat) * _odd_numbers(flat.shape[1]).to(flat.device)).sum(dim=1)


def row_sketches(x: Tensor) -> Tensor:
    """[rows, 3] float64 of [rows, width]: the norm of each row and two random sums with signs.

    Rows that are close have close ones, whatever type they are of; the sums are linear. What is not finite counts as 0.
    """
    flat = x.flatten(1).double().nan_to_num(0.0, 0.0, 0.0)
    signs = (_odd_numbers(2 * flat.shape[1]).view(-1, 2) > 0).to(flat) * 2 - 1
    return torch.cat([flat.norm(dim=1, keepdim=True), flat @ signs], dim=1)


def _mixed(bits: Tensor) -> Tensor:
    """Integers as int64 with their high bits folded into the low ones: in a sum two flipped signs would cancel."""
    wide = bits.long()
    return wide ^ (wide >> 31)


@lru_cache(maxsize=512)
def _odd_numbers(count: int) -> Tensor:
    """Random ones, the same on every rank."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1
