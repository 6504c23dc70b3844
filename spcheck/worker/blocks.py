"""The one pass over two values: max|a - e| and max|e| of every row, at little more than the cost of reading.

Values are walked in blocks of rows that stay in a core's cache; small ones take the path of the fewest calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_SMALL = 2**14  # elements up to which calls cost more than work, and torch.equal is nearly free
_BLOCK = {"cpu": 2**19, "cuda": 2**26}  # bytes: two blocks and a scratch fit an L2 cache; a GPU wants long kernels
_WORKING = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float32}
# The bits of floats without a sign sort like the floats, NaN last, and an integer maximum takes half the time.
# Not so for 64 bits.
_BITS = {torch.float32: torch.int32, torch.float64: torch.float64}


def row_maxima(expected: Tensor, actual: Tensor, *, every_scale: bool) -> tuple[Floats, Floats] | None:
    """max|a - e| and max|e| of every row of [rows, width] twice, of one type; None where all is equal.

    Without ``every_scale`` the latter may be 0 for rows that are equal. A NaN has an infinite gap, equal infinities
    none; the scale is that of the finite elements.
    """
    size = expected.numel()
    if size == 0 or (size <= _SMALL and torch.equal(expected, actual)):
        return None
    gap, scale = _maxima(expected, actual, every_scale=every_scale)
    if not np.isfinite(gap.sum() + scale.sum()):
        gap, scale = _careful(expected, actual, gap, scale)
    return (gap, scale) if gap.any() else None


def _maxima(expected: Tensor, actual: Tensor, *, every_scale: bool) -> tuple[Floats, Floats]:
    """max|a - e| and max|e| of every row; without ``every_scale`` the latter is left at 0 in a block of equal rows."""
    working = _WORKING.get(expected.dtype, torch.float64)
    if expected.is_cpu and expected.numel() <= _SMALL:
        return _small_maxima(workable(expected, working), workable(actual, working))
    rows, width = expected.shape
    step = _rows_of_a_block(expected, working.itemsize)
    scratch = torch.empty(step, width, dtype=working, device=expected.device)
    gap, scale = torch.zeros(2, rows, dtype=_BITS[working], device=expected.device)
    for here in (slice(at, at + step) for at in range(0, rows, step)):
        e, a = expected[here], actual[here]
        equal = _seen_equal(e, a)
        e, a, x = workable(e, working), workable(a, working), scratch[: len(e)]
        if not equal:
            _largest(torch.sub(a, e, out=x).abs_(), out=gap[here])
            equal = int(gap[here].count_nonzero()) == 0
        if every_scale or not equal:
            _largest(torch.abs(e.to(working), out=x), out=scale[here])
    maxima = (x.view(working).numpy(force=True).astype(np.float64) for x in (gap, scale))
    return next(maxima), next(maxima)


def _small_maxima(e: Tensor, a: Tensor) -> tuple[Floats, Floats]:
    """The same where calls cost more than elements: numpy's are the shorter ones."""
    wanted, got = e.numpy(), a.numpy()
    gap, scale = np.abs(got - wanted).max(axis=1), np.abs(wanted).max(axis=1)
    return gap.astype(np.float64), scale.astype(np.float64)


def _rows_of_a_block(x: Tensor, itemsize: int) -> int:
    block = _BLOCK.get(x.device.type, _BLOCK["cuda"]) // itemsize
    return min(max(block // x.shape[1], 1), len(x))


def _seen_equal(e: Tensor, a: Tensor) -> bool:
    """A look that costs little where it finds a difference; False also where looking costs as much as measuring.

    numpy's comparison is a vector loop, torch's is not, but it stops at the first difference.
    """
    if not e.is_cpu or e.dtype not in _BITS:
        return False
    return torch.equal(e[0], a[0]) and bool((e.numpy() == a.numpy()).all())


def workable(x: Tensor, working: torch.dtype) -> Tensor:
    """In a type whose differences are 0 only between equals: integers stay integers until they are subtracted."""
    return x.to(working if x.is_floating_point() else torch.int64)


def _largest(x: Tensor, out: Tensor) -> None:
    """The largest of every row of values without a sign, as bits; NaN before inf."""
    torch.amax(x.view(out.dtype), dim=1, out=out)


def _careful(expected: Tensor, actual: Tensor, gap: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Does the rows again that hold a NaN or an infinity, or overflowed.

    Equal infinities have no gap, a NaN has an infinite one; the scale is that of the finite elements.
    """
    odd = (~np.isfinite(gap + scale)).nonzero()[0]
    for rows, e, a in in_blocks(expected, actual, odd):
        away = (a - e).abs_().nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(e == a, 0.0)
        gap[rows] = away.amax(dim=1).numpy(force=True)
        scale[rows] = e.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(dim=1).numpy(force=True)
    return gap, scale


def in_blocks(expected: Tensor, actual: Tensor, rows: Rows) -> Iterator[tuple[Rows, Tensor, Tensor]]:
    """These rows in float64, a few at a time."""
    step = _rows_of_a_block(expected, torch.float64.itemsize)
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        chosen = torch.from_numpy(some).to(expected.device)
        yield some, expected[chosen].double(), actual[chosen].double()
