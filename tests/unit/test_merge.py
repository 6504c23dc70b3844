"""Quantiles of the row error of a probe: bins add up over ranks, and an upper edge is told."""

import json
import math
from fractions import Fraction

import pytest
import torch

from spcheck.judge.merge import ProbeResult, merge_probes
from spcheck.worker.measure import measure, measure_sets


def merged(*differences):
    """As the ranks send them."""
    probe = {"probe": "a", "phase": "target", "call": 0, "kind": "value"}
    reports = [{"rank": r, "probes": [{**probe, "difference": vars(d)}]} for r, d in enumerate(differences)]
    (result,) = merge_probes(json.loads(json.dumps(reports)))
    return result


def with_errors(*errors):
    expected = torch.ones(len(errors), 2, dtype=torch.float64)
    return measure(expected, expected + torch.tensor(errors, dtype=torch.float64)[:, None] / torch.ones(2), 1.0)


def test_bins_of_ranks_add_up():
    result = merged(with_errors(0.3, 0.0, 0.6), with_errors(0.3, 1e-3))
    assert result.histogram == {-9: 1, -1: 2, 0: 1}
    assert (result.rows, result.median_rel, result.p99_rel) == (5, 0.5, 1.0)


def test_equal_rows_have_no_error():
    result = merged(with_errors(0.0, 0.0, 0.3))
    assert (result.median_rel, result.p99_rel) == (0.0, 0.5)
    assert merged(with_errors(0.0)).p99_rel == 0.0
    assert ProbeResult("a", "target", 0, "value").p99_rel == 0.0


def test_one_row_in_a_hundred_is_beyond_the_99th_percentile():
    assert merged(with_errors(*[0.0] * 99, 0.3)).p99_rel == 0.0
    assert merged(with_errors(*[0.0] * 98, 0.3, 0.3)).p99_rel == 0.5


def test_an_infinite_error_has_no_upper_edge():
    assert merged(with_errors(0.0, math.inf)).quantile(Fraction(1)) == math.inf
    assert merged(measure(torch.zeros(3, 2), torch.zeros(2, 2), 1.0)).median_rel == math.inf


def test_choices_have_quantiles_too():
    sets = measure_sets(torch.tensor([[3, 1], [5, 6]]), torch.tensor([[1, 3], [5, 7]]))
    assert merged(sets).quantile(Fraction(1)) == 2.0


@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(99, 100)])
def test_a_quantile_is_at_most_twice_the_error_and_never_below_it(share):
    errors = (torch.rand(101, dtype=torch.float64) * 1e-3).tolist()
    exact = sorted(errors)[math.ceil(share * len(errors)) - 1]
    assert exact * (1 - 1e-9) <= merged(with_errors(*errors)).quantile(share) <= 2 * exact * (1 + 1e-9)
