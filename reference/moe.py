"""The MLPs: the dense SwiGLU, and the mixture of experts with its router.

T  rows (tokens)      D  hidden size      E  experts      G  expert groups      K  experts chosen per token
F  width of an MLP on this rank (its whole width / tp)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import ModelConfig
from reference.layers import SiluAndMultiply, empty_parameter, wide
from reference.parallel import ColumnParallelLinear, Communicator, RowParallelLinear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), its width split over the ranks; summed over them with ``reduce``."""

    def __init__(self, D: int, width: int, tp: Communicator, *, reduce: bool, act_fn: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(D, width, tp)
        self.up_proj = ColumnParallelLinear(D, width, tp)
        self.act_fn = act_fn or SiluAndMultiply()
        self.down_proj = RowParallelLinear(width, D, tp, reduce=reduce)

    def forward(self, m_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        y_TD: Tensor = self.down_proj(self.act_fn(self.gate_proj(m_TD), self.up_proj(m_TD)))
        return y_TD


class Score(nn.Module):
    """s = sigmoid(r)."""

    def forward(self, r_TE: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return torch.sigmoid(r_TE)


class Choose(nn.Module):
    """The k largest scores of each row; the lowest index wins a tie."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, c_Tx: Tensor) -> Tensor:
        """Scores [T, x] -> ids [T, k]."""
        return c_Tx.sort(dim=-1, descending=True, stable=True).indices[:, : self.k]


def group_scores(c_TGx: Tensor) -> Tensor:
    """A group's score is the sum of its two best experts: [T, G, E/G] -> [T, G]."""
    return c_TGx.sort(dim=-1, descending=True).values[:, :, :2].sum(dim=-1)


class Weigh(nn.Module):
    """wt = γ s[ids] / Σ s[ids]: the scores without the bias, γ after normalising."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.normalise = config.norm_topk_prob
        self.gamma = config.routed_scaling_factor

    def forward(self, s_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Scores [T, E] and expert ids [T, K] -> routing weights [T, K]."""
        s_TK = s_TE.gather(1, ids_TK)
        if self.normalise:
            s_TK = s_TK / s_TK.sum(dim=-1, keepdim=True)
        return s_TK * self.gamma


class Gate(nn.Module):
    """The router: which experts each token goes to, and how much each of them counts. Every rank has all of it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(config.n_routed_experts, config.hidden_size)
        self.e_score_correction_bias = empty_parameter(config.n_routed_experts)
        self.groups = config.n_group
        self.score = Score()
        self.choose_groups = Choose(config.topk_group)
        self.choose = Choose(config.num_experts_per_tok)
        self.weigh = Weigh(config)

    def forward(self, m_TD: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> expert ids [T, K], routing weights [T, K]."""
        r_TE = F.linear(wide(m_TD), wide(self.weight))
        s_TE = self.score(r_TE)
        ids_TK = self.choose(self.in_kept_groups(s_TE + wide(self.e_score_correction_bias)))
        return ids_TK, self.weigh(s_TE, ids_TK)

    def in_kept_groups(self, c_TE: Tensor) -> Tensor:
        """Biased scores [T, E], -inf outside the best groups: not 0, since a biased score may be negative."""
        c_TGx = c_TE.reshape(c_TE.shape[0], self.groups, -1)
        kept_Tk = self.choose_groups(group_scores(c_TGx))
        kept_TG = torch.zeros(c_TGx.shape[:2], dtype=torch.bool, device=c_TE.device).scatter_(1, kept_Tk, True)
        return torch.where(kept_TG[:, :, None], c_TGx, -math.inf).flatten(1)


class Experts(nn.Module):
    """All experts, each with its width split over the ranks; they run one after the other and share an activation."""

    def __init__(self, config: ModelConfig, tp: Communicator) -> None:
        D, Fe = config.hidden_size, config.moe_intermediate_size
        super().__init__()
        self.act_fn = SiluAndMultiply()
        for e in range(config.n_routed_experts):
            self.add_module(str(e), SwiGLU(D, Fe, tp, reduce=False, act_fn=self.act_fn))

    def forward(self, m_TD: Tensor, ids_TK: Tensor, wt_TK: Tensor) -> Tensor:
        """Σ_k wt[k] Expert_ids[k](m): [T, D], this rank's partial sum."""
        y_TD = torch.zeros_like(wide(m_TD))
        for e in sorted(set(ids_TK.flatten().tolist())):
            rows, k = (ids_TK == e).nonzero(as_tuple=True)
            y_TD[rows] += wt_TK[rows, k, None] * self.get_submodule(str(e))(m_TD[rows])
        return y_TD.to(m_TD.dtype)


class MoE(nn.Module):
    """The chosen experts plus the shared ones, whose weight is 1; one sum over the ranks for both."""

    def __init__(self, config: ModelConfig, tp: Communicator) -> None:
        super().__init__()
        D, shared_width = config.hidden_size, config.n_shared_experts * config.moe_intermediate_size
        self.tp = tp
        self.gate = Gate(config)
        self.experts = Experts(config, tp)
        self.shared_experts = SwiGLU(D, shared_width, tp, reduce=False)

    def forward(self, m_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        ids_TK, wt_TK = self.gate(m_TD)
        partial_TD = self.experts(m_TD, ids_TK, wt_TK) + self.shared_experts(m_TD)
        return self.tp.all_reduce(partial_TD)
