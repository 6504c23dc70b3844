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
        self.choose_groups = Best(config.topk_group)
        self.choose = Best(config.num_experts_per_tok)
        self.groups = config.n_group
        self.weigh = Weigh(config.routed_scaling_factor, normalise=config.norm_topk_prob)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, D] -> [rows, K] twice."""
        scores = self.score(F.linear(x.to(self.weight.dtype), self.weight))
        biased = scores + self.e_score_correction_bias
        if self.choose_groups.count < self.groups:
            biased = within_best_groups(biased, self.groups, self.choose_groups)
        ids: Tensor = self.choose(biased)
        return ids, self.weigh(scores, ids)


def within_best_groups(biased: Tensor, groups: int, choose: nn.Module) -> Tensor:
    """[rows, E] -> the same with -inf outside the chosen groups; a group counts as much as its two best scores."""
    by_group = biased.view(biased.shape[0], groups, -1)
    kept = choose(by_group.topk(2, dim=-1).values.sum(dim=-1))  # values only, so ties cannot matter
    dropped = torch.ones(by_group.shape[:2], dtype=torch.bool, device=biased.device)
    dropped.scatter_(-1, kept, value=False)
    return by_group.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


class Score(nn.Module):
    """Router logits [rows, E] -> sigmoid."""

    def forward(self, logits: Tensor) -> Tensor:
        """[rows, E] -> [rows, E]."""
        return logits.sigmoid()


class Best(nn.Module):
    """Scores [rows, N] -> the ids of the ``count`` best, lowest id first among equals."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> Tensor:
        """[rows, N] -> [rows, count]."""
        _, ids = scores.sort(dim=-1, descending=True, stable=True)
        return ids[..., : self.count]


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
