"""The lightning indexer: which earlier keys a row attends to. Replicated on every tensor-parallel rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized.batch import AttentionMetadata
from optimized.chunks import row_chunks
from optimized.linear import Linear
from optimized.loader import Loader
from optimized.norms import statistics_dtype
from optimized.rotary import HalfSplitRotary, RotaryTable
from reference.config import ModelConfig

KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """(hidden [n,D], query latent [n,rq], positions [n]) -> chosen key positions [n, min(k,T)], -1 for none.

    Hi heads of di components; the keys of a request lie in a row in ``keys`` [slots, di]. Where no row has more keys
    than may be chosen, keys are made and kept for later forwards, and nothing is scored.
    """

    def __init__(self, config: ModelConfig, loader: Loader, rotary: RotaryTable) -> None:
        super().__init__()
        assert config.index_n_heads is not None
        assert config.index_head_dim is not None
        assert config.index_topk is not None
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(loader.full("wq_b.weight"))
        self.wk = Linear(loader.full("wk.weight"))
        self.k_norm = LayerNorm(loader.full("k_norm.weight"), loader.full("k_norm.bias"), KEY_NORM_EPS)
        self.weights_proj = Linear(loader.full("weights_proj.weight"))
        self.q_rope, self.k_rope = HalfSplitRotary(rotary), HalfSplitRotary(rotary)
        self.head_weights = HeadWeights(self.heads, self.width)
        self.score = ScoreKeys()
        self.choose = ChooseKeys(config.index_topk)
        self.keys = torch.empty(0)

    def allocate(self, slots: int) -> None:
        """Forgets all keys and makes room for ``slots``."""
        self.keys = self.wk.weight.new_zeros(slots, self.width)

    def forward(self, hidden: Tensor, q_latent: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """-> ids [n, min(k,T)]."""
        key = self.k_rope(self.k_norm(self.wk(hidden)), positions)
        self.keys.index_copy_(0, attn.slot_mapping, key[: attn.num_actual_tokens])
        scores = None
        if attn.max_seq_len > self.choose.count:
            scores = self._scores(hidden, q_latent, positions, attn)
        ids: Tensor = self.choose(attn.causal_choice, scores)
        return ids

    def _scores(self, hidden: Tensor, q_latent: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """-> [n,T]."""
        query = self.q_rope(self.wq_b(q_latent).view(-1, self.heads, self.width), positions)
        weights = self.head_weights(self.weights_proj(hidden))
        scores: Tensor = self.score(query, weights, self.keys, attn)
        return scores


class ScoreKeys(nn.Module):
    """(query [n,Hi,di], head weights [n,Hi], keys [slots,di]) -> scores [n,T].

    The sum over heads of weight * max(0, query . key), -inf where a key is not visible.
    """

    def forward(self, query: Tensor, weights: Tensor, keys: Tensor, attn: AttentionMetadata) -> Tensor:
        """-> [n,T]."""
        kind = statistics_dtype(query.dtype)
        out = torch.zeros(attn.visible.shape, dtype=kind, device=query.device)
        query, weights = query.to(kind), weights.to(kind)
        for span in attn.spans:
            own = keys[span.base : span.base + span.end].to(kind).t()
            for rows in row_chunks(span.rows, query.shape[1] * span.end):
                out[rows, : span.end] = _weighted_relu(query[rows], own, weights[rows])
        return torch.where(attn.visible, out, -torch.inf)


def _weighted_relu(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """[r,Hi,di], [di,t], [r,Hi] -> [r,t]."""
    return torch.bmm(weights.unsqueeze(1), torch.matmul(query, keys).relu_()).squeeze(1)


class LayerNorm(nn.Module):
    """x [n, di] -> centred, divided by the root of variance + eps, times weight plus bias."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[n, di] -> [n, di]."""
        kind = statistics_dtype(x.dtype)
        normed: Tensor = F.layer_norm(x.to(kind), self.weight.shape, self.weight.to(kind), self.bias.to(kind), self.eps)
        return normed.to(x.dtype)


class HeadWeights(nn.Module):
    """Projected [n, Hi] -> g [n, Hi]: times Hi^-1/2 di^-1/2."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.scale = (heads * width) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        """[n, Hi] -> [n, Hi], in the type of index scores."""
        wide = x.to(statistics_dtype(x.dtype))
        return wide.mul(self.scale)


class ChooseKeys(nn.Module):
    """(Visible key positions [n, T], -1 elsewhere, their scores [n, T]) -> those of the k best, -1 where fewer are.

    The lowest position wins a tie. Without scores all are chosen.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, visible: Tensor, scores: Tensor | None) -> Tensor:
        """[n, T] twice -> [n, min(k,T)]; [n, T] alone stays as it is."""
        if scores is None:
            return visible
        _, best = scores.sort(dim=-1, descending=True, stable=True)
        return visible.gather(-1, best[:, : self.count])
