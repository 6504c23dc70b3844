"""Why order cannot matter: sums of products of grid values, in any order, sharding and form, against whole numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spcheck.plan.grid import GRIDS, LIMIT
from spcheck.worker.snap import snap

seeds = st.integers(0, 2**32 - 1)
grids = st.sampled_from(sorted(GRIDS)).map(GRIDS.get)


def grid_values(rng, shape, bits, size):
    return snap(torch.from_numpy(rng.standard_normal(shape) * size), bits)


def whole(x, bits):
    """A tensor of grid values as Python integers, in units of the grid."""
    scaled = (x * 2.0**bits).numpy()
    assert (scaled == np.round(scaled)).all(), "off the grid"
    return np.vectorize(int, otypes=[object])(scaled)


def needed_bits(x, w, unit):
    """The guard's bound: the largest row norm of one times that of the other."""
    return math.log2(max(float(x.norm(dim=1).max() * w.norm(dim=1).max()), 1e-300)) + unit


def any_order(rng, x, w):
    """x w^T, its summed axis dealt out to ranks and chunks in a random order, and their sums added as a random tree."""
    order = torch.from_numpy(rng.permutation(x.shape[1]))
    parts = [x[:, part] @ w[:, part].T for part in order.tensor_split(int(rng.integers(1, 6)))]
    while len(parts) > 1:
        i, j = sorted(rng.choice(len(parts), 2, replace=False))
        b, a = parts.pop(j), parts.pop(i)
        parts.append(a + b)
    return parts[0]


@given(seeds, grids, st.integers(1, 300), st.floats(0.01, 1e6))
@settings(max_examples=150, deadline=None)
def test_a_product_within_the_guard_is_exact_in_any_order(seed, grid, k, size):
    rng = np.random.default_rng(seed)
    x = grid_values(rng, (5, k), grid.activation, size)
    w = grid_values(rng, (7, k), grid.weight, 1.0)
    unit = grid.activation + grid.weight
    assume(needed_bits(x, w, unit) <= LIMIT)
    truth = whole(x, grid.activation) @ whole(w, grid.weight).T
    for _ in range(4):
        assert (whole(any_order(rng, x, w), unit) == truth).all()


@given(seeds, grids, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_the_absorbed_form_is_the_plain_one(seed, grid, width, latent):
    """qn . (Wk c) and (Wk' qn) . c; p . (Wv c) and Wv . (p . c): the same whole numbers."""
    rng = np.random.default_rng(seed)
    q = grid_values(rng, (3, width), grid.activation, 1.0)
    c = grid_values(rng, (6, latent), grid.activation, 1.0)
    w = grid_values(rng, (width, latent), grid.weight, latent**-0.5)
    assume(
        math.log2(float(q.norm(dim=1).max() * w.norm() * c.norm(dim=1).max())) + grid.activation * 2 + grid.weight < 53
    )
    assert torch.equal(q @ (c @ w.T).T, (q @ w) @ c.T)
    p = snap(torch.softmax(torch.from_numpy(rng.standard_normal((3, 6)) * 4), dim=-1), grid.probability)
    assert torch.equal(p @ (c @ w.T), (p @ c) @ w.T)


@given(seeds, grids, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_routing_weights_may_come_before_or_after_the_last_product(seed, grid, experts):
    rng = np.random.default_rng(seed)
    inner = grid_values(rng, (experts, 16), grid.activation, 1.0)
    down = grid_values(rng, (experts, 9, 16), grid.weight, 0.25)
    weights = grid_values(rng, (experts,), grid.routing, 1.0).abs()
    after = sum(weights[e] * (down[e] @ inner[e]) for e in range(experts))
    before = sum(down[e] @ (weights[e] * inner[e]) for e in reversed(range(experts)))
    assert torch.equal(after, before)


def test_beyond_the_guard_order_does_matter():
    """The check can fail: with bits to spare nothing was shown."""
    rng = np.random.default_rng(0)
    x, w = grid_values(rng, (5, 200), 30, 1.0), grid_values(rng, (7, 200), 30, 1.0)
    assert needed_bits(x, w, 60) > LIMIT
    assert any(not torch.equal(any_order(rng, x, w), any_order(rng, x, w)) for _ in range(20))


@given(st.floats(-(2.0**30), 2.0**30), st.integers(8, 20))
def test_snap_is_round_half_even(x, bits):
    expected = Fraction(round(Fraction(x) * 2**bits), 2**bits)
    assert float(snap(torch.tensor([x], dtype=torch.float64), bits)[0]) == float(expected)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_snap_keeps_what_is_no_number(value):
    out = float(snap(torch.tensor([value], dtype=torch.float64), 14)[0])
    assert out == value or math.isnan(out) == math.isnan(value)
