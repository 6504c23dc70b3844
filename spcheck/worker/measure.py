"""How far two aligned values are apart: numbers, no opinion.

Everything is per token row: a norm over the whole tensor would hide one wrong token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """What :func:`measure` found. Rows are local indices; a row's error is max|a - e| / max|e| over the row.

    ``first_over`` is the first row whose error is over the given bound. ``ratio`` is the least-squares factor
    of actual over expected on the rows over the bound, where one factor explains them; None otherwise.
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


def measure(expected: Tensor, actual: Tensor, bound: float, *, one_scale: bool = False) -> Difference:
    """Compares [rows, width] with [rows, width], in float64.

    Equal means ``==``: -0 equals +0, equal infinities are equal, a NaN equals nothing. With ``one_scale`` errors are
    relative to the largest expected element of all rows: for index scores below float64, sums of terms of either sign,
    of which a row may hold a single one that almost cancels.
    """
    if expected.shape != actual.shape:
        return _misshapen(expected, actual)
    rows = expected.shape[0]
    if rows == 0:
        return Difference(0, 0, 0.0, 0.0)
    same = expected == actual
    if bool(same.all()):
        return Difference(rows, 0, 0.0, 0.0)
    e, a = expected.double(), actual.double()
    gap = (a - e).abs().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    row_gap, channel = gap.max(dim=1)
    size = e.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1)
    if one_scale:
        size = size.amax().expand_as(size)
    row_error = torch.where(row_gap > 0, row_gap / size, 0.0)
    worst = int(row_error.argmax())
    at = int(channel[worst])
    over = (row_error > bound).nonzero().flatten()
    return Difference(
        rows=rows,
        unequal_rows=int((~same).any(dim=1).sum()),
        max_abs=float(row_gap.max()),
        max_rel=float(row_error[worst]),
        worst_row=worst,
        worst_channel=at,
        worst_expected=float(e[worst, at]),
        worst_actual=float(a[worst, at]),
        first_over=int(over[0]) if len(over) else None,
        rows_over=len(over),
        ratio=_ratio(e[over], a[over]) if len(over) else None,
        reference_nan=bool(e.isnan().any()),
    )


def measure_sets(expected: Tensor, actual: Tensor) -> Difference:
    """Compares chosen ids [rows, k] with [rows, k'] as sets; -1 is none.

    A row's error is the share of its expected ids that the actual set lacks or has beyond it (at most 2).
    """
    width = max(expected.shape[1], actual.shape[1])
    e, a = (_sorted_ids(x, width) for x in (expected, actual))
    if e.shape != a.shape:
        return _misshapen(e, a)
    unequal = (e != a).any(dim=1).nonzero().flatten().tolist()
    if not unequal:
        return Difference(len(e), 0, 0.0, 0.0)
    distance = {row: _set_distance(e[row], a[row]) for row in unequal}
    worst = max(distance, key=lambda row: distance[row])
    return Difference(
        rows=len(e),
        unequal_rows=len(unequal),
        max_abs=float(distance[worst]),
        max_rel=distance[worst] / max(int((e[worst] >= 0).sum()), 1),
        worst_row=worst,
        first_over=unequal[0],
        rows_over=len(unequal),
        note=f"expected {_ids(e[worst])}, got {_ids(a[worst])}",
    )


def row_digests(x: Tensor) -> Tensor:
    """[rows] int64 fingerprints of [rows, width]: equal rows (bitwise, but for -0 and +0) have equal ones."""
    flat = x.reshape(x.shape[0], -1)
    if flat.is_floating_point():
        flat = (flat + 0.0).contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    generator = torch.Generator().manual_seed(flat.shape[1])
    odd = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator) * 2 + 1
    return (flat.long() * odd.to(flat.device)).sum(dim=1)


def _misshapen(expected: Tensor, actual: Tensor) -> Difference:
    note = f"shape {list(actual.shape)} where {list(expected.shape)} was expected"
    rows = expected.shape[0]
    return Difference(rows, rows, math.inf, math.inf, worst_row=0, first_over=0, rows_over=rows, note=note)


def _ratio(expected: Tensor, actual: Tensor) -> float | None:
    """The one factor that explains these rows to within 1%, if there is one and it is not 1."""
    power = float((expected * expected).sum())
    if not math.isfinite(power) or power == 0.0:
        return None
    factor = float((expected * actual).sum()) / power
    left = float((actual - factor * expected).norm()) / math.sqrt(power)
    return factor if math.isfinite(left) and left < 0.01 * abs(factor) and abs(factor - 1) > 0.05 else None


def _sorted_ids(ids: Tensor, width: int) -> Tensor:
    padded = torch.nn.functional.pad(ids.long(), (0, width - ids.shape[1]), value=-1)
    return padded.sort(dim=1).values


def _ids(row: Tensor) -> list[int]:
    return [int(i) for i in row.tolist() if i >= 0]


def _set_distance(expected: Tensor, actual: Tensor) -> int:
    return len(set(_ids(expected)) ^ set(_ids(actual))) or 1
