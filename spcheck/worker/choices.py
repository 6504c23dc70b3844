"""Comparing top-k choices: as sets, and by the margin that a choice had in the reference's scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Choices:
    """Rows compared, chosen alike, and chosen otherwise within or beyond what the scores' own error explains.

    ``margin`` is the least distance in the reference's scores between the last chosen and the best not chosen, over
    all rows; ``flip_margin`` and ``score_error`` are those of the widest flip beyond the error, else of the widest.
    """

    compared: int
    agreeing: int
    within: int
    beyond: int
    margin: float | None = None
    flip_margin: float | None = None
    score_error: float | None = None
    first_beyond: int | None = None
    first_flip: int | None = None


def measure_choices(expected: Tensor, actual: Tensor, scores: Tensor, own_scores: Tensor) -> Choices:
    """Compares chosen ids [rows, k] (-1 is none), given the scores [rows, N] of both sides (-inf: not allowed).

    A correct candidate takes the best of its own scores. Where these are off by at most e, an id that it took instead
    of another can be worse by 2e at most in the reference's scores: a wider flip is no rounding.
    """
    if torch.equal(expected, actual):
        wanted = _mask(expected, scores.shape[1])
        return Choices(len(expected), len(expected), 0, 0, _least_margin(scores, wanted))
    width = max(scores.shape[1], own_scores.shape[1])
    reference, own = (F.pad(s.double(), (0, width - s.shape[1]), value=-math.inf) for s in (scores, own_scores))
    wanted, taken = _mask(expected, width), _mask(actual, width)
    margin = _least_margin(reference, wanted)
    flipped = (wanted != taken).any(dim=1).nonzero().flatten()
    if not len(flipped):
        return Choices(len(expected), len(expected), 0, 0, margin)
    wide = _flip_margin(reference[flipped], wanted[flipped], taken[flipped])
    error = _score_error(reference[flipped], own[flipped])
    beyond = (wide > 2 * error) | _against_its_own_scores(own[flipped], taken[flipped])
    worst = int(torch.where(beyond, wide, wide - math.inf).argmax()) if bool(beyond.any()) else int(wide.argmax())
    rows = tuple(int(r) for r in flipped[beyond].tolist())
    return Choices(
        compared=len(expected),
        agreeing=len(expected) - len(flipped),
        within=len(flipped) - len(rows),
        beyond=len(rows),
        margin=margin,
        flip_margin=float(wide[worst]),
        score_error=float(error[worst]),
        first_beyond=rows[0] if rows else None,
        first_flip=int(flipped[0]),
    )


def _mask(ids: Tensor, width: int) -> Tensor:
    """[rows, width] bool, true at the chosen ids; an id outside counts in the last, added column."""
    ids = ids.long()
    marked = torch.zeros(ids.shape[0], width + 2, dtype=torch.bool, device=ids.device)
    marked.scatter_(1, torch.where(ids < 0, width + 1, ids.clamp(max=width)), True)
    return marked[:, : width + 1]


def _least_margin(scores: Tensor, chosen: Tensor) -> float | None:
    """Over the rows that had anything to leave out."""
    chosen = chosen[:, : scores.shape[1]]
    last = scores.masked_fill(~chosen, math.inf).amin(dim=1)
    best = scores.masked_fill(chosen, -math.inf).amax(dim=1)
    margins = (last - best)[best > -math.inf]
    margins = margins[~margins.isnan()]
    return float(margins.min()) if len(margins) else None


def _flip_margin(scores: Tensor, wanted: Tensor, taken: Tensor) -> Tensor:
    """[rows]: the best id wrongly left out minus the worst one taken instead; inf where no such pair exists."""
    inside = scores.shape[1]
    lost = (wanted & ~taken)[:, :inside]
    gained = (taken & ~wanted)[:, :inside]
    least = scores.masked_fill(~gained, math.inf).amin(dim=1)
    most = scores.masked_fill(~lost, -math.inf).amax(dim=1)
    # Another number of ids, or an id that does not exist, is no near tie.
    uneven = (lost.sum(dim=1) != gained.sum(dim=1)) | taken[:, inside] | (least == -math.inf)
    return torch.where(uneven, math.inf, most - least).nan_to_num(nan=math.inf, posinf=math.inf)


def _against_its_own_scores(own: Tensor, taken: Tensor) -> Tensor:
    """[rows]: whether the choice is not the stable top-k of the scores it was made from, whatever their error."""
    width = own.shape[1]
    order = own.sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(width, device=own.device).expand_as(order))
    allowed = (taken[:, :width].sum(dim=1, keepdim=True) > rank) & (own > -math.inf)
    return (allowed != taken[:, :width]).any(dim=1)


def _score_error(reference: Tensor, own: Tensor) -> Tensor:
    """[rows]: the largest difference of two finite scores."""
    both = reference.isfinite() & own.isfinite()
    return (own - reference).abs().masked_fill(~both, 0.0).amax(dim=1)
