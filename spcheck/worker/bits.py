"""Whether values passed through a narrower type: by the bits they use, and by the size of their error."""

from __future__ import annotations

import torch
from torch import Tensor

_NARROWER = {
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
    torch.float32: (torch.bfloat16, torch.float16),
}
_MANTISSA = 52
_FEW_BITS = 14  # of a sum of some bfloat16 numbers of like size
_ROUNDING = (2.0**-31, 2.0**-23)  # of a row's largest element: what a row's largest error is behind a cast to float32
_ROWS = 3


def narrower_type(expected: Tensor, actual: Tensor, apart: Tensor) -> str | None:
    """The type that rows [rows, width] seem to have passed: ``bfloat16``, or with a question ``float32 rounding``.

    By the elements that are ``apart``, in float64 and float32: all actual ones are numbers of that type and most
    expected ones are not; or sums of such; or every row's error is as large as a rounding to float32.
    """
    e, a = expected[apart], actual[apart]
    if len(a) < _ROWS or not bool(a.any()):
        return None
    for kind in _NARROWER.get(expected.dtype, ()):
        if _fits(a, kind) == 1.0 and _fits(e, kind) < 0.5:
            return _name(kind, e, a)
    return "float32 rounding" if expected.dtype == torch.float64 and _rounded(expected, actual) else None


def _fits(x: Tensor, kind: torch.dtype) -> float:
    return float((x.to(kind).to(x.dtype) == x).double().mean())


def _name(kind: torch.dtype, e: Tensor, a: Tensor) -> str:
    if kind is torch.float32 and _median_bits(a) <= _FEW_BITS < _median_bits(e) - 8:
        return "sums of bfloat16"
    return str(kind).removeprefix("torch.")


def _median_bits(x: Tensor) -> int:
    """Bits from the first to the last that is set."""
    mantissa = (x.double().view(torch.int64) & (2**_MANTISSA - 1)) | 2**_MANTISSA
    last = (mantissa & -mantissa).double().log2()
    return _MANTISSA + 1 - int(last.median())


def _rounded(expected: Tensor, actual: Tensor) -> bool:
    errors = (actual - expected).abs().amax(dim=1) / expected.abs().amax(dim=1).clamp(min=2.0**-1000)
    inside = (errors >= _ROUNDING[0]) & (errors <= _ROUNDING[1])
    return len(errors) >= _ROWS and bool(inside.all())
