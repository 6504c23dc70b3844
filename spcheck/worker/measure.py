"""How far two aligned values are apart: numbers, no opinion.

Everything is per token row: a norm over the whole tensor would hide one wrong token.

The values are walked once (:mod:`spcheck.worker.blocks`), which leaves two numbers per row, max|a - e| and max|e|; the
rest works on those, and on the few rows of note.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spcheck.worker.blocks import Floats, Rows, in_blocks, row_maxima, workable

_MOST_RUNS = 256
_FEW_ELEMENTS = 3  # any factor fits a single one
_FIT = 1e-3  # of the difference: what a factor may leave unexplained


@dataclass(frozen=True)
class Difference:
    """What :func:`measure` found. Rows are local indices; a row's error is max|a - e| / max|e| over the row.

    ``first_over`` is the first row whose error is over the given bound, ``wrong`` are all of them as (first, last) of
    each run of rows, None where there are too many runs. ``ratio`` is the least-squares factor of actual over expected
    on these rows, where one factor explains them; None otherwise.
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
    wrong: list[tuple[int, int]] | None = field(default_factory=list)
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
    rows = expected.shape[0]
    maxima = row_maxima(expected, actual, every_scale=pair.one_scale)
    if maxima is None:
        return Difference(rows, 0, 0.0, 0.0)
    gap, scale = maxima
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
        wrong=runs(over.tolist()),
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
        wrong=runs(unequal),
        note=f"expected {_ids(e[worst])}, got {_ids(a[worst])}",
        histogram=_histogram(_exponents(np.array([distance[row] / sizes[row] for row in unequal]))),
    )


def _worst_element(expected: Tensor, actual: Tensor) -> tuple[int, float, float]:
    """Channel and both values of the element of a row that is furthest apart: a NaN is, equal infinities are not."""
    e, a = (workable(x, torch.float64).numpy(force=True) for x in (expected, actual))
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


def runs(rows: Sequence[int]) -> list[tuple[int, int]] | None:
    """Ascending rows as (first, last) of each run; None where there are too many runs to send."""
    firsts = [row for i, row in enumerate(rows) if i == 0 or rows[i - 1] != row - 1]
    lasts = [row for i, row in enumerate(rows) if i == len(rows) - 1 or rows[i + 1] != row + 1]
    return list(zip(firsts, lasts, strict=True)) if len(firsts) <= _MOST_RUNS else None


def _ratio(expected: Tensor, actual: Tensor, rows: Rows) -> float | None:
    """The one factor that explains the difference of these rows to within 0.1% of itself, if there is one.

    Of elements that are finite on both sides; None where these are not the same ones, or too few to tell.
    """
    power = product = 0.0
    count = 0
    for _, e, a in in_blocks(expected, actual, rows):
        known = e.isfinite()
        if not torch.equal(known, a.isfinite()):
            return None
        e, a = e[known], a[known]
        count += int(e.count_nonzero())
        power += float(e.dot(e))
        product += float((a - e).dot(e))
    if count < _FEW_ELEMENTS or power == 0.0 or not math.isfinite(power + product):
        return None
    excess = product / power
    left = gap = 0.0
    for _, e, a in in_blocks(expected, actual, rows):
        known = e.isfinite()
        difference = (a - e)[known]
        left += float((difference - excess * e[known]).square().sum())
        gap += float(difference.square().sum())
    return 1 + excess if left <= _FIT**2 * gap else None


def _sorted_ids(ids: Tensor, width: int) -> Tensor:
    padded = torch.nn.functional.pad(ids.long(), (0, width - ids.shape[1]), value=-1)
    return padded.sort(dim=1).values


def _ids(row: Tensor) -> list[int]:
    return [int(i) for i in row.tolist() if i >= 0]


def _set_distance(expected: Tensor, actual: Tensor) -> int:
    return len(set(_ids(expected)) ^ set(_ids(actual))) or 1
