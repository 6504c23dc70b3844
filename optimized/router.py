"""The router: sigmoid scores, the choice of experts by biased scores within the best groups, and their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized.loader import Loader
from optimized.norms import statistics_dtype
from reference.config import ModelConfig


class Gate(nn.Module):
    """x [rows, D] -> (global expert ids [rows, K], routing weights [rows, K])."""

    def __init__(self, config: ModelConfig, loader: Loader) -> None:
        super().__init__()
        kind = statistics_dtype(loader.dtype)
        # From the stored type: by way of bfloat16 the bias alone would decide close choices.
        self.weight = nn.Parameter(loader.full("weight", kind), requires_grad=False)
        bias = loader.full("e_score_correction_bias", kind)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.score = Score()
        self.choose = ChooseExperts(config.num_experts_per_tok, config.n_group, config.topk_group)
        self.weigh = Weigh(config.routed_scaling_factor, normalise=config.norm_topk_prob)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, D] -> [rows, K] twice."""
        scores = self.score(F.linear(x.to(self.weight.dtype), self.weight))
        ids = self.choose(scores + self.e_score_correction_bias)
        return ids, self.weigh(scores, ids)


class Score(nn.Module):
    """Router logits [rows, E] -> sigmoid."""

    def forward(self, logits: Tensor) -> Tensor:
        """[rows, E] -> [rows, E]."""
        return logits.sigmoid()


class ChooseExperts(nn.Module):
    """Biased scores [rows, E] -> the K best experts of the best groups, lowest id first among equals.

    A group is ranked by the sum of its two best scores.
    """

    def __init__(self, count: int, groups: int, kept: int) -> None:
        super().__init__()
        self.count, self.groups, self.kept = count, groups, kept

    def forward(self, biased: Tensor) -> Tensor:
        """[rows, E] -> [rows, K]."""
        if self.kept < self.groups:
            biased = self._within_best_groups(biased)
        return _best(biased, self.count)

    def _within_best_groups(self, biased: Tensor) -> Tensor:
        by_group = biased.view(biased.shape[0], self.groups, -1)
        strength = by_group.topk(2, dim=-1).values.sum(dim=-1)  # values only, so ties cannot matter
        dropped = torch.ones_like(strength, dtype=torch.bool)
        dropped.scatter_(-1, _best(strength, self.kept), value=False)
        return by_group.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def _best(scores: Tensor, count: int) -> Tensor:
    _, ids = scores.sort(dim=-1, descending=True, stable=True)
    return ids[..., :count]


class Weigh(nn.Module):
    """(sigmoid scores [rows, E], ids [rows, K]) -> weights [rows, K]: the unbiased scores, normalised, times gamma."""

    def __init__(self, gamma: float, *, normalise: bool) -> None:
        super().__init__()
        self.gamma, self.normalise = gamma, normalise

    def forward(self, scores: Tensor, ids: Tensor) -> Tensor:
        """-> [rows, K]."""
        chosen = scores.gather(-1, ids)
        if self.normalise:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen * self.gamma
