"""How far two aligned values are apart: numbers, no opinion.

Everything is per token row: a norm over the whole tensor would hide one wrong token.

Measuring should cost little more than reading, so the values are walked once in blocks of rows that stay in a core's
cache. A block leaves two numbers per row, max|a - e| and max|e|; the rest works on those, and on the few rows of note.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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


@dataclass(frozen=True)
class Difference:
    """What :func:`measure` found. Rows are local indices; a row's error is max|a - e| / max|e| over the row.

    ``first_over`` is the first row whose error is over the given bound. ``ratio`` is the least-squares factor
    of actual over expected on the rows over the bound, where one factor explains them; None otherwise.
    ``histogram`` holds (x, rows): so many unequal rows have an error from 2**(x - 1) to below 2**x; 1024 takes inf too.
    """

    rows: int
    unequal_rows: int
    max_abs: float
    max_rel: float
    worst_row: int | None = None
    worst_channel: int | None = None
    worst_expected: float | None = None
    worst_actual: float | None = None
    first_over: int | None = None
    rows_over: int = 0
    ratio: float | None = None
    note: str = ""
    reference_nan: bool = False
    histogram: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """Two values to compare, both [rows, width], and the largest error of a row that passes.

    Errors are relative to a row's largest expected element; with ``one_scale`` to that of all rows; with ``scale``
    [rows] to that, for sums of terms of either sign, of which a row may hold a single one that almost cancels.
    """

    expected: Tensor
    actual: Tensor
    bound: float
    one_scale: bool = False
    scale: Tensor | None = None


def measure(expected: Tensor, actual: Tensor, bound: float, *, one_scale: bool = False) -> Difference:
    """Compares one pair; see :func:`measure_all`."""
    return measure_all([Pair(expected, actual, bound, one_scale)])[0]


@np.errstate(all="ignore")
def measure_all(pairs: Sequence[Pair]) -> list[Difference]:
    """Compares many pairs at once, since a forward has many small ones.

    Equal means ``==``: -0 equals +0, equal infinities are equal, a NaN equals nothing.

    float64 is subtracted in float64, all narrower floats in float32: a difference of two such values is exact where
    they are close, else rounded once (6e-8 of itself), and it is 0 only where they are equal.
    """
    seen = [_look(pair) for pair in pairs]
    apart = [x for x in seen if isinstance(x, _Apart)]
    if not apart:
        return [x for x in seen if isinstance(x, Difference)]
    judged = iter(_judged(apart))
    return [next(judged) if isinstance(x, _Apart) else x for x in seen]


@dataclass
class _Apart:
    """Two values that are not equal, their max|a - e| and max|e| per row."""

    expected: Tensor
    actual: Tensor
    bound: float
    gap: Floats
    scale: Floats


def _look(pair: Pair) -> Difference | _Apart:
    expected, actual = pair.expected, pair.actual
    if expected.shape != actual.shape:
        return _misshapen(expected, actual)
    if expected.dtype != actual.dtype:
        wider = torch.promote_types(expected.dtype, actual.dtype)
        expected, actual = expected.to(wider), actual.to(wider)
    rows, size = expected.shape[0], expected.numel()
    if size == 0 or (size <= _SMALL and torch.equal(expected, actual)):
        return Difference(rows, 0, 0.0, 0.0)
    gap, scale = _row_maxima(expected, actual, every_scale=pair.one_scale)
    if not np.isfinite(gap.sum() + scale.sum()):
        gap, scale = _careful(expected, actual, gap, scale)
    if not gap.any():
        return Difference(rows, 0, 0.0, 0.0)
    if pair.scale is not None:
        scale = pair.scale.double().numpy(force=True)
    return _Apart(expected, actual, pair.bound, gap, np.full(rows, scale.max()) if pair.one_scale else scale)


def _judged(apart: Sequence[_Apart]) -> Iterator[Difference]:
    """The arithmetic on all rows of all values at once, then a result for each value."""
    gaps = np.concatenate([x.gap for x in apart])
    errors = np.divide(gaps, np.concatenate([x.scale for x in apart]), out=np.zeros(len(gaps)), where=gaps > 0)
    exponents = _exponents(errors)
    first = 0
    for x in apart:
        here = slice(first, first + len(x.gap))
        yield _difference(x, errors[here], exponents[here])
        first = here.stop


def _difference(x: _Apart, error: Floats, exponents: Rows) -> Difference:
    worst = int(error.argmax())
    largest, most = float(x.gap.max()), float(error[worst])
    over = (error > x.bound).nonzero()[0]
    channel, wanted, got = _worst_element(x.expected[worst], x.actual[worst])
    return Difference(
        rows=len(error),
        unequal_rows=int(np.count_nonzero(x.gap)),
        max_abs=largest,
        max_rel=most,
        worst_row=worst,
        worst_channel=channel,
        worst_expected=wanted,
        worst_actual=got,
        first_over=int(over[0]) if len(over) else None,
        rows_over=len(over),
        ratio=_ratio(x.expected, x.actual, over) if len(over) else None,
        reference_nan=largest == math.inf and bool(x.expected.isnan().any()),
        histogram=_histogram(exponents[x.gap > 0]),
    )


def measure_sets(expected: Tensor, actual: Tensor) -> Difference:
    """Compares chosen ids [rows, k] with [rows, k'] as sets; -1 is none.

    A row's error is the share of its expected ids that the actual set lacks or has beyond it (at most 2).
    """
    if torch.equal(expected, actual):
        return Difference(len(expected), 0, 0.0, 0.0)
    width = max(expected.shape[1], actual.shape[1])
    e, a = (_sorted_ids(x, width) for x in (expected, actual))
    if e.shape != a.shape:
        return _misshapen(e, a)
    unequal = (e != a).any(dim=1).nonzero().flatten().tolist()
    if not unequal:
        return Difference(len(e), 0, 0.0, 0.0)
    sizes = (e >= 0).sum(dim=1).clamp_(min=1).tolist()
    distance = {row: _set_distance(e[row], a[row]) for row in unequal}
    worst = max(distance, key=lambda row: distance[row])
    return Difference(
        rows=len(e),
        unequal_rows=len(unequal),
        max_abs=float(distance[worst]),
        max_rel=distance[worst] / sizes[worst],
        worst_row=worst,
        first_over=unequal[0],
        rows_over=len(unequal),
        note=f"expected {_ids(e[worst])}, got {_ids(a[worst])}",
        histogram=_histogram(_exponents(np.array([distance[row] / sizes[row] for row in unequal]))),
    )


def row_digests(x: Tensor) -> Tensor:
    """[rows] int64 fingerprints of [rows, width]: equal rows (bitwise, but for -0 and +0) have equal ones."""
    flat = x.reshape(x.shape[0], -1)
    if flat.is_floating_point():
        flat = (flat + 0.0).contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return (mixed(flat) * _odd_numbers(flat.shape[1]).to(flat.device)).sum(dim=1)


def mixed(bits: Tensor) -> Tensor:
    """Integers as int64 with their high bits folded into the low ones: in a sum two flipped signs would cancel."""
    wide = bits.long()
    return wide ^ (wide >> 31)


@lru_cache(maxsize=512)
def _odd_numbers(count: int) -> Tensor:
    """Random ones, the same on every rank."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def _row_maxima(expected: Tensor, actual: Tensor, *, every_scale: bool) -> tuple[Floats, Floats]:
    """max|a - e| and max|e| of every row; without ``every_scale`` the latter is left at 0 in a block of equal rows."""
    working = _WORKING.get(expected.dtype, torch.float64)
    if expected.is_cpu and expected.numel() <= _SMALL:
        return _small_maxima(_workable(expected, working), _workable(actual, working))
    rows, width = expected.shape
    step = _rows_of_a_block(expected, working.itemsize)
    scratch = torch.empty(step, width, dtype=working, device=expected.device)
    gap, scale = torch.zeros(2, rows, dtype=_BITS[working], device=expected.device)
    for here in (slice(at, at + step) for at in range(0, rows, step)):
        e, a = expected[here], actual[here]
        equal = _seen_equal(e, a)
        e, a, x = _workable(e, working), _workable(a, working), scratch[: len(e)]
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


def _workable(x: Tensor, working: torch.dtype) -> Tensor:
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
    for rows, e, a in _in_blocks(expected, actual, odd):
        away = (a - e).abs_().nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(e == a, 0.0)
        gap[rows] = away.amax(dim=1).numpy(force=True)
        scale[rows] = e.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(dim=1).numpy(force=True)
    return gap, scale


def _worst_element(expected: Tensor, actual: Tensor) -> tuple[int, float, float]:
    """Channel and both values of the element of a row that is furthest apart: a NaN is, equal infinities are not."""
    e, a = (_workable(x, torch.float64).numpy(force=True) for x in (expected, actual))
    gap = np.abs(a - e)
    at = int(gap.argmax())
    if not math.isfinite(gap[at]):
        gap[np.isnan(gap)] = math.inf
        gap[e == a] = 0.0
        at = int(gap.argmax())
    return at, float(e[at]), float(a[at])


def _exponents(errors: Floats) -> Rows:
    """x of the bin from 2**(x - 1) to below 2**x that each error falls into."""
    within = np.minimum(np.maximum(errors, math.ulp(0.0)), sys.float_info.max)  # frexp knows no exponent of 0 and inf
    exponents: Rows = np.frexp(within)[1]
    return exponents


def _histogram(exponents: Rows) -> list[tuple[int, int]]:
    return sorted(Counter(exponents.tolist()).items())


def _misshapen(expected: Tensor, actual: Tensor) -> Difference:
    note = f"shape {list(actual.shape)} where {list(expected.shape)} was expected"
    rows = expected.shape[0]
    bins = _histogram(_exponents(np.full(rows, math.inf)))
    return Difference(
        rows, rows, math.inf, math.inf, worst_row=0, first_over=0, rows_over=rows, note=note, histogram=bins
    )


def _ratio(expected: Tensor, actual: Tensor, rows: Rows) -> float | None:
    """The one factor that explains these rows to within 1%, if there is one and it is not 1."""
    squares = power = product = 0.0
    for _, *block in _in_blocks(expected, actual, rows):
        e, a = (x.flatten() for x in block)
        power += float(e.dot(e))
        product += float(e.dot(a))
        squares += float(a.dot(a))
    if not math.isfinite(power + squares) or power == 0.0:
        return None
    factor = product / power
    left = squares - factor * product  # of the squares, after the best factor
    return factor if left < 1e-4 * factor * product and abs(factor - 1) > 0.05 else None


def _in_blocks(expected: Tensor, actual: Tensor, rows: Rows) -> Iterator[tuple[Rows, Tensor, Tensor]]:
    """These rows in float64, a few at a time."""
    step = _rows_of_a_block(expected, torch.float64.itemsize)
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        chosen = torch.from_numpy(some).to(expected.device)
        yield some, expected[chosen].double(), actual[chosen].double()


def _sorted_ids(ids: Tensor, width: int) -> Tensor:
    padded = torch.nn.functional.pad(ids.long(), (0, width - ids.shape[1]), value=-1)
    return padded.sort(dim=1).values


def _ids(row: Tensor) -> list[int]:
    return [int(i) for i in row.tolist() if i >= 0]


def _set_distance(expected: Tensor, actual: Tensor) -> int:
    return len(set(_ids(expected)) ^ set(_ids(actual))) or 1
