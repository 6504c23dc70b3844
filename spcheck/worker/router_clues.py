"""What a router's wrong scores are made of, where they are a simpler sum of the scores that agree."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.config import ModelConfig

_CLOSE = 1e-5  # a probe shows scores before they are rounded to their grid
_BEST = 2  # experts that a group's score is the sum of


def scores_without(probe: str, e: Tensor, a: Tensor, others: Mapping[str, Tensor], config: ModelConfig) -> str | None:
    """What a group's scores [rows, groups], or the experts' [rows, E], were made without, in words."""
    gate, _, end = probe.rpartition(".gate.")
    scores = others.get(f"{gate}.gate.score.out")
    biased = others.get(f"{gate}.gate.choose.in")
    if end not in ("choose_groups.in", "choose.in") or scores is None or biased is None:
        return None
    scores, bias = scores.double(), _bias(scores.double(), biased.double())
    if end == "choose.in":
        known = a.isfinite()
        alike = a.shape == scores.shape and _same(a[known], scores[known])
        return "the correction bias" if alike else None
    made = {
        "the correction bias": _group_scores(scores, config.n_group, _BEST),
        "the second best expert of each group": _group_scores(scores + bias, config.n_group, 1),
        "the correction bias and the second best expert": _group_scores(scores, config.n_group, 1),
    }
    return next((name for name, value in made.items() if value.shape == a.shape and _same_columns(a, value)), None)


def _bias(scores: Tensor, biased: Tensor) -> Tensor:
    """[E]: what is added to each expert's score; not a number where no row shows it."""
    gap = (biased - scores).masked_fill(~biased.isfinite(), torch.nan)
    return gap.nanmedian(dim=0).values


def _group_scores(scores: Tensor, groups: int, best: int) -> Tensor:
    by_group = scores.view(len(scores), groups, -1)
    return by_group.topk(min(best, by_group.shape[-1]), dim=-1).values.sum(dim=-1)


def _same_columns(x: Tensor, y: Tensor) -> bool:
    """Where ``y`` is known: an expert's bias is not, where no row shows it."""
    known = y.isfinite().all(dim=0)
    return _same(x[:, known], y[:, known])


def _same(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and bool(((x - y).abs() <= _CLOSE * y.abs().amax()).all())
