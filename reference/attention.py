"""Multi-head latent attention in its plain form, with the lightning indexer that chooses its keys.

Symbols are the specification's; a suffix tells the dimensions:

    T  new tokens of one request        S  positions of the request so far, the new tokens included
    D  hidden size                      H  attention heads of this rank (all heads / tp)
    Q  query latent width, rq           C  key/value latent width, rk
    N  nope width of a head, dn         R  rotary width, dr           V  value width of a head, dv
    J  index heads, Hi                  I  index head width, di       K  chosen keys, min(k, S)

A query at position p may attend the keys at positions 0 .. p; with an indexer only the chosen ones of these.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from reference.cache import LayerCache
from reference.config import ModelConfig
from reference.layers import LayerNorm, Linear, RMSNorm, wide
from reference.parallel import ColumnParallelLinear, Communicator, RowParallelLinear
from reference.rope import Rotary, attention_scale

INDEX_NORM_EPSILON = 1e-6


class QuerySplit(nn.Module):
    """Separates each head's nope part from its rotary part: [T, H(N+R)] -> [T, H, N], [T, H, R]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.nope, self.rotary = config.qk_nope_head_dim, config.qk_rope_head_dim

    def forward(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The q_b output -> (qn, qr), before rotation."""
        q_THx = q.reshape(q.shape[0], -1, self.nope + self.rotary)
        return q_THx[..., : self.nope], q_THx[..., self.nope :]


class Softmax(nn.Module):
    """Softmax over the keys."""

    def forward(self, z_THS: Tensor) -> Tensor:
        """[T, H, S] -> [T, H, S]."""
        return torch.softmax(z_THS, dim=-1)


class HeadWeights(nn.Module):
    """g = weights_proj output times Hi^(-1/2) di^(-1/2)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(heads * width)

    def forward(self, raw_TJ: Tensor) -> Tensor:
        """[T, J] -> [T, J]."""
        return wide(raw_TJ) * self.scale


class ChooseKeys(nn.Module):
    """The positions of the k largest index scores of each row; the lowest position wins a tie."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, I_TS: Tensor) -> Tensor:
        """Scores [T, S], -inf where not allowed -> positions [T, K], -1 where fewer keys are allowed."""
        best = I_TS.sort(dim=-1, descending=True, stable=True)
        ids_TK, scores_TK = best.indices[:, : self.k], best.values[:, : self.k]
        return torch.where(scores_TK == -math.inf, -1, ids_TK)


class Indexer(nn.Module):
    """Scores every key for every query with few narrow heads, and chooses the best keys. Every rank has all of it."""

    def __init__(self, config: ModelConfig, heads: int, width: int, k: int) -> None:
        super().__init__()
        self.width = width
        self.wq_b = Linear(config.q_lora_rank, heads * width)
        self.wk = Linear(config.hidden_size, width)
        self.k_norm = LayerNorm(width, INDEX_NORM_EPSILON)
        self.weights_proj = Linear(config.hidden_size, heads)
        self.q_rope = Rotary(config, interleaved=False)
        self.k_rope = Rotary(config, interleaved=False)
        self.head_weights = HeadWeights(heads, width)
        self.choose = ChooseKeys(k)

    def forward(self, a_TD: Tensor, cq_TQ: Tensor, positions_T: Tensor, cache: LayerCache, causal_TS: Tensor) -> Tensor:
        """Which keys each query keeps: [T, S] bool."""
        iq_TJI = self.wq_b(cq_TQ).reshape(a_TD.shape[0], -1, self.width)
        iq_TJI = self.q_rope(iq_TJI, positions_T)
        ik_TI = self.k_rope(self.k_norm(self.wk(a_TD)), positions_T)
        ik_SI = cache.write("index_key", ik_TI)
        g_TJ = self.head_weights(self.weights_proj(a_TD))

        dots_TJS = torch.einsum("tji,si->tjs", wide(iq_TJI), wide(ik_SI))
        I_TS = torch.einsum("tj,tjs->ts", g_TJ, dots_TJS.relu())
        ids_TK = self.choose(torch.where(causal_TS, I_TS, -math.inf))
        return chosen_mask(ids_TK, causal_TS.shape[1])


def chosen_mask(ids_TK: Tensor, S: int) -> Tensor:
    """[T, S] bool, true at the chosen positions; ids of -1 choose nothing."""
    chosen_TS1 = torch.zeros(ids_TK.shape[0], S + 1, dtype=torch.bool, device=ids_TK.device)
    chosen_TS1.scatter_(1, torch.where(ids_TK < 0, S, ids_TK), True)
    return chosen_TS1[:, :S]


class Attention(nn.Module):
    """MLA: heads and their output projection are split over the ranks, the latents and the indexer are not."""

    def __init__(self, config: ModelConfig, tp: Communicator) -> None:
        super().__init__()
        D, H, rq, rk = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
        dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent_width, self.nope, self.key_and_value = rk, dn, dn + dv
        self.scale = attention_scale(config)
        self.q_a_proj = Linear(D, rq)
        self.q_a_layernorm = RMSNorm(rq, config.latent_norm_eps)
        self.q_b_proj = ColumnParallelLinear(rq, H * (dn + dr), tp)
        self.q_split = QuerySplit(config)
        self.q_rope = Rotary(config, interleaved=True)
        self.kv_a_proj_with_mqa = Linear(D, rk + dr)
        self.kv_a_layernorm = RMSNorm(rk, config.latent_norm_eps)
        self.k_rope = Rotary(config, interleaved=True)
        self.kv_b_proj = ColumnParallelLinear(rk, H * (dn + dv), tp)
        self.softmax = Softmax()
        self.o_proj = RowParallelLinear(H * dv, D, tp, reduce=True)
        self.indexer: Indexer | None = None
        if config.index_n_heads and config.index_head_dim and config.index_topk:
            self.indexer = Indexer(config, config.index_n_heads, config.index_head_dim, config.index_topk)

    def forward(self, a_TD: Tensor, positions_T: Tensor, cache: LayerCache) -> Tensor:
        """Normed hidden states of the new tokens -> the attention output [T, D], summed over the ranks."""
        held_S = cache.begin(positions_T)
        causal_TS = held_S & (torch.arange(len(held_S), device=a_TD.device) <= positions_T[:, None])
        cq_TQ = self.q_a_layernorm(self.q_a_proj(a_TD))
        qn_THN, qr_THR = self.q_split(self.q_b_proj(cq_TQ))
        qr_THR = self.q_rope(qr_THR, positions_T)
        c_SC, kr_SR = self._latents(a_TD, positions_T, cache)
        kn_SHN, v_SHV = self._keys_and_values(c_SC)
        allowed_TS = causal_TS
        if self.indexer is not None:
            # The causal mask stays: a choice may be another run's, when that is replayed.
            allowed_TS = causal_TS & self.indexer(a_TD, cq_TQ, positions_T, cache, causal_TS)

        z_THS = torch.einsum("thn,shn->ths", wide(qn_THN), wide(kn_SHN))
        z_THS = self.scale * (z_THS + torch.einsum("thr,sr->ths", wide(qr_THR), wide(kr_SR)))
        w_THS = self.softmax(torch.where(allowed_TS[:, None, :], z_THS, -math.inf))
        o_THV = torch.einsum("ths,shv->thv", w_THS.to(v_SHV.dtype), v_SHV)
        out_TD: Tensor = self.o_proj(o_THV.flatten(1))
        return out_TD

    def _latents(self, a_TD: Tensor, positions_T: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """c and kr of all positions, the cached ones first: the latent is normed, the rope key only rotated."""
        kv_Tx = self.kv_a_proj_with_mqa(a_TD)
        c0_TC, kr0_TR = kv_Tx[:, : self.latent_width], kv_Tx[:, self.latent_width :]
        c_SC = cache.write("latent", self.kv_a_layernorm(c0_TC))
        kr_SR = cache.write("rope_key", self.k_rope(kr0_TR, positions_T))
        return c_SC, kr_SR

    def _keys_and_values(self, c_SC: Tensor) -> tuple[Tensor, Tensor]:
        """kn [S, H, N] and v [S, H, V] of all positions."""
        u_SHx = self.kv_b_proj(c_SC).reshape(c_SC.shape[0], -1, self.key_and_value)
        return u_SHx[..., : self.nope], u_SHx[..., self.nope :]
