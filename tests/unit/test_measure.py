"""The measure: numbers against small tensors worked out by hand, and properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from spcheck.worker.digests import row_digests
from spcheck.worker.measure import measure, measure_sets


def test_equal_values_have_no_difference():
    d = measure(tensor([[1.0, -0.0], [2.0, math.inf]]), tensor([[1.0, 0.0], [2.0, math.inf]]), 0.0)
    assert (d.rows, d.unequal_rows, d.max_abs, d.max_rel, d.first_over) == (2, 0, 0.0, 0.0, None)


def test_an_error_is_relative_to_its_own_row():
    expected = tensor([[1000.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    actual = tensor([[1000.5, 0.0], [1.0, 0.51]], dtype=torch.float64)
    d = measure(expected, actual, 1e-3)
    assert d.worst_row == 1
    assert d.worst_channel == 1
    assert d.max_rel == pytest.approx(0.01)
    assert d.max_abs == pytest.approx(0.5)
    assert (d.rows_over, d.first_over, d.unequal_rows) == (1, 1, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["expected", "actual", "both"])
def test_a_nan_or_a_lone_infinity_never_passes(value, side):
    good, bad = tensor([[1.0, 2.0]]), tensor([[1.0, value]])
    e, a = (bad if side in ("expected", "both") else good), (bad if side in ("actual", "both") else good)
    d = measure(e, a, 1e-3)
    if side == "both" and math.isinf(value):
        assert d.rows_over == 0
    else:
        assert d.rows_over == 1
        assert d.max_rel == math.inf


def test_something_where_zero_is_expected_never_passes():
    assert measure(torch.zeros(1, 2), tensor([[0.0, 1e-30]]), 1.0).rows_over == 1


def test_another_shape_is_a_difference_with_a_reason():
    d = measure(torch.zeros(3, 2), torch.zeros(2, 2), 1.0)
    assert d.rows_over == 3
    assert "shape [2, 2] where [3, 2] was expected" in d.note


def test_one_factor_over_all_rows_is_named():
    e = torch.randn(4, 8, dtype=torch.float64)
    assert measure(e, 2 * e, 1e-3).ratio == pytest.approx(2)
    assert measure(e, e + torch.randn(4, 8), 1e-3).ratio is None


def test_sets_do_not_know_order():
    assert measure_sets(tensor([[3, 1, -1]]), tensor([[1, 3]])).unequal_rows == 0
    d = measure_sets(tensor([[3, 1], [5, 6]]), tensor([[1, 3], [5, 7]]))
    assert (d.unequal_rows, d.first_over, d.max_abs) == (1, 1, 2.0)
    assert d.note == "expected [5, 6], got [5, 7]"


def test_a_repeated_id_is_not_the_set():
    assert measure_sets(tensor([[3, 3]]), tensor([[3, -1]])).unequal_rows == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_digests_tell_rows_apart(dtype):
    x = torch.arange(24).reshape(4, 6).to(dtype)
    y = x.clone()
    y[2, 3] += 1
    assert (row_digests(x) == row_digests(y)).tolist() == [True, True, False, True]
    assert not torch.equal(row_digests(x)[:1], row_digests(x.flip(1))[:1])


def test_digests_see_one_ulp_and_not_the_sign_of_zero():
    x = torch.ones(1, 3, dtype=torch.float64)
    y = torch.nextafter(x, x + 1)
    assert row_digests(x) != row_digests(y)
    assert row_digests(torch.zeros(1, 2)) == row_digests(-torch.zeros(1, 2))


@pytest.mark.parametrize("shape", [(0, 6), (0, 2, 3), (0, 0), (3, 0)])
def test_digests_of_nothing_are_as_many_as_the_rows(shape):
    assert row_digests(torch.zeros(shape, dtype=torch.float64)).shape == shape[:1]


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 4), st.floats(1e-9, 1e-3))
def test_a_single_wrong_row_is_found_whatever_the_others_hold(rows, width, at, size):
    at %= rows
    expected = torch.randn(rows, width, dtype=torch.float64) * 1e3
    expected[at] = 1.0
    actual = expected.clone()
    actual[at, 0] += size
    d = measure(expected, actual, size / 2)
    assert (d.first_over, d.worst_row, d.rows_over) == (at, at, 1)
