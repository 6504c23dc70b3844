"""Choices by their margins: a flip that the scores' own error explains, and one that it does not."""

import math

import pytest
import torch

from spcheck.worker.choices import measure_choices

INF, NAN = math.inf, math.nan


def measured(expected, actual, scores, own):
    ids = (torch.tensor([row]) for row in (expected, actual))
    values = (torch.tensor([row], dtype=torch.float64) for row in (scores, own))
    return measure_choices(*ids, *values)


@pytest.mark.parametrize(
    ("why", "expected", "actual", "scores", "own"),
    [
        ("another order is the same set", [0, 1], [1, 0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]),
        ("all chosen", [0, 1, 2], [2, 1, 0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ("fewer allowed than chosen", [0, -1], [0, -1], [1.0, -INF], [1.0, -INF]),
        ("another number of forbidden columns", [0, 1], [0, 1], [2.0, 1.0], [2.0, 1.0, -INF]),
    ],
)
def test_alike(why, expected, actual, scores, own):
    c = measured(expected, actual, scores, own)
    assert (c.compared, c.agreeing, c.within, c.beyond) == (1, 1, 0, 0), why


@pytest.mark.parametrize(
    ("why", "expected", "actual", "scores", "own"),
    [
        ("by twice the error, the lower id wins the tie", [1], [0], [0.5, 1.0], [0.75, 0.75]),
        ("by less than twice the error", [0], [1], [1.0, 0.9, 0.0], [0.93, 0.97, 0.0]),
    ],
)
def test_within_the_error(why, expected, actual, scores, own):
    c = measured(expected, actual, scores, own)
    assert (c.agreeing, c.within, c.beyond) == (0, 1, 0), why
    assert c.flip_margin <= 2 * c.score_error


@pytest.mark.parametrize(
    ("why", "expected", "actual", "scores", "own"),
    [
        ("scores equal, another choice", [0], [1], [1.0, 0.5], [1.0, 0.5]),
        ("scores equal and tied, the higher id", [0], [1], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]),
        ("against its own scores, however wrong these are", [0], [1], [1.0, 0.5, 0.0], [1.0, 0.5, -50.0]),
        ("a forbidden id", [0], [1], [2.0, -INF], [2.0, 3.0]),
        ("another number of ids", [0, -1], [0, 1], [1.0, 0.9], [1.0, 0.9]),
        ("the same id twice", [0, 1], [0, 0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]),
        ("an id that does not exist", [0], [9], [2.0, 1.0], [2.0, 1.0]),
    ],
)
def test_beyond_the_error(why, expected, actual, scores, own):
    c = measured(expected, actual, scores, own)
    assert (c.agreeing, c.within, c.beyond, c.first_beyond) == (0, 0, 1, 0), why


def test_the_least_margin_is_over_all_rows_that_left_something_out():
    ids = torch.tensor([[0, 1], [2, 1], [0, 1]])
    scores = torch.tensor([[5.0, 4.0, 1.0], [0.0, 2.0, 3.0], [1.0, 0.5, -INF]])
    assert measure_choices(ids, ids, scores, scores).margin == 2.0
    assert measure_choices(ids[2:], ids[2:], scores[2:], scores[2:]).margin is None
    assert measure_choices(ids[:1], ids[:1], torch.full((1, 3), NAN), scores[:1]).margin is None
