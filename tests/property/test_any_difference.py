"""`measure` against an obviously right one: row by row in numpy's float64, over odd values, types and block borders."""

import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spcheck.worker import blocks as module
from spcheck.worker.measure import measure

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ODD = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e-45, -6e-8, 1.7e308, -1.7e308, 3e38, -3e38, 6e4]


def element(e, a):
    if e == a:
        return 0.0
    return math.inf if math.isnan(a - e) else abs(a - e)


def naive(expected, actual, one_scale):
    """Per row: (gap, scale, gaps of its elements)."""
    out = []
    for e_row, a_row in zip(expected.double().tolist(), actual.double().tolist(), strict=True):
        gaps = [element(e, a) for e, a in zip(e_row, a_row, strict=True)]
        out.append((max(gaps), max((abs(e) for e in e_row if math.isfinite(e)), default=0.0), gaps))
    largest = max(scale for _, scale, _ in out)
    return [(gap, largest if one_scale else scale, gaps) for gap, scale, gaps in out]


def relative(gap, scale):
    with np.errstate(all="ignore"):
        return float(np.float64(gap) / np.float64(scale)) if gap else 0.0


@st.composite
def pairs(draw):
    """Two tensors that share most elements; the rest is off by a little, or anything."""
    dtype = draw(st.sampled_from(FLOATS))
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    expected = random.standard_normal((rows, width)) * 10.0 ** random.integers(-8, 8, (rows, 1))
    actual = expected.copy()
    for side, share in ((expected, 0.02), (actual, draw(st.sampled_from([0.0, 0.05])))):
        odd = random.random(side.shape) < share * draw(st.booleans())
        side[odd] = random.choice(ODD, side.shape)[odd]
    if draw(st.booleans()):
        shared = random.random(expected.shape) < 0.5
        actual[shared] = expected[shared]
    if draw(st.booleans()):
        actual *= 1 + random.integers(-2, 3, actual.shape) * draw(st.sampled_from([2.0**-52, 2.0**-23, 0.01]))
    with np.errstate(all="ignore"):
        return torch.from_numpy(expected).to(dtype), torch.from_numpy(actual).to(dtype)


@settings(max_examples=600, deadline=None)
@given(
    pairs(), st.sampled_from([0.0, 1e-7, 1e-3]), st.booleans(), st.sampled_from([0, 2**14]), st.sampled_from([8, 512])
)
def test_the_measure_is_the_naive_one(pair, bound, one_scale, small, block):
    expected, actual = pair
    with mock.patch.object(module, "_SMALL", small), mock.patch.dict(module._BLOCK, cpu=block):
        d = measure(expected, actual, bound, one_scale=one_scale)
    rows = naive(expected, actual, one_scale)
    errors = [relative(gap, scale) for gap, scale, _ in rows]
    near = {"rel": 1.3e-7, "abs": 0.0}  # float32 rounds a gap and nothing else
    assert (d.rows, d.unequal_rows) == (len(rows), sum(gap > 0 for gap, _, _ in rows))
    assert d.max_abs == pytest.approx(max(gap for gap, _, _ in rows), **near)
    assert d.max_rel == pytest.approx(max(errors), **near)
    assert sum(count for _, count in d.histogram) == d.unequal_rows
    if not d.unequal_rows:
        assert (d.worst_row, d.first_over, d.rows_over) == (None, None, 0)
        return
    over = [i for i, error in enumerate(errors) if error > bound]
    assert (d.first_over, d.rows_over) == (over[0] if over else None, len(over))
    assert errors[d.worst_row] == pytest.approx(max(errors), **near)
    gaps = rows[d.worst_row][2]
    assert d.worst_channel == gaps.index(max(gaps))
    seen = d.worst_expected, d.worst_actual
    assert seen == pytest.approx([x[d.worst_row, d.worst_channel].item() for x in pair], nan_ok=True)
    assert d.reference_nan == bool(expected.isnan().any())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([5e-324, 1e-300, 0.25, 0.5, 0.7, 1.0, 1e300, 1.7e308, math.inf]), min_size=1))
def test_a_row_is_in_the_bin_of_its_error(errors):
    actual = torch.tensor(errors, dtype=torch.float64)[:, None]
    expected = torch.ones_like(actual).masked_fill_(actual.isinf(), 0)
    pair = [torch.cat([expected, column], dim=1) for column in (torch.zeros_like(actual), actual)]
    want = Counter(min(math.frexp(error)[1], 1024) if math.isfinite(error) else 1024 for error in errors)
    assert measure(*pair, 1.0).histogram == sorted(want.items())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 33, 70, 300])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_an_odd_value_is_seen_at_every_place(dtype, width, value):
    for side in range(2):
        for at in range(width):
            pair = torch.randn(2, 3, width).to(dtype)
            pair[side, 1, at] = value
            pair[1 - side, 1, at] = 1.0
            with mock.patch.object(module, "_SMALL", 0):
                d = measure(*pair, 1e9)
            assert (d.max_rel, d.worst_row, d.worst_channel, d.rows_over) == (math.inf, 1, at, 1)
            assert d.reference_nan == (side == 0 and math.isnan(value))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64, 65])
def test_a_wrong_row_is_found_in_every_block(dtype, rows):
    expected = torch.randn(rows, 5000).to(dtype)
    for wrong in {0, rows // 2, rows - 1}:
        actual = expected.clone()
        actual[wrong, 7] += 100
        d = measure(expected, actual, 1e-3)
        assert (d.worst_row, d.first_over, d.worst_channel, d.rows_over, d.unequal_rows) == (wrong, wrong, 7, 1, 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_are_compared_as_integers(dtype):
    large = torch.full((3, 9), 2**60).to(dtype)
    assert measure(large, large.clone(), 0.0).unequal_rows == 0
    other = large.clone()
    other[1, 2] = large[1, 2] - 1 if dtype != torch.bool else False
    for small in (0, 2**14):
        with mock.patch.object(module, "_SMALL", small):
            d = measure(large, other, 0.0)
        assert (d.unequal_rows, d.worst_row) == (1, 1)


def test_types_that_differ_are_compared_in_the_wider():
    x = torch.tensor([[1.0, 0.1]], dtype=torch.float32)
    assert measure(x, x.double(), 0.0).unequal_rows == 0
    assert measure(x.double() + 1e-12, x, 0.0).unequal_rows == 1


@pytest.mark.parametrize("small", [0, 2**14])
def test_values_that_do_not_lie_in_a_row_are_measured_as_they_are(small):
    expected = torch.randn(40, 30).t()
    actual = expected.clone()
    actual[29, 39] += 1
    with mock.patch.object(module, "_SMALL", small):
        assert measure(expected, actual, 1e-3).worst_channel == 39
        assert measure(expected, expected.contiguous(), 0.0).unequal_rows == 0


def test_a_nan_beside_itself_in_memory_is_still_unequal():
    x = torch.full((3, 10000), math.nan)
    assert measure(x, x, 1.0).unequal_rows == 3
    assert measure(x[:, :5], x[:, :5], 1.0).unequal_rows == 3
