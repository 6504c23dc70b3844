"""The lightning indexer: which earlier keys a row attends to. Replicated on every tensor-parallel rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized.batch import AttentionMetadata, Span
from optimized.chunks import row_chunks
from optimized.linear import Linear
from optimized.loader import Loader
from optimized.norms import statistics_dtype
from optimized.rotary import HalfSplitRotary, RotaryTable
from reference.config import ModelConfig

KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """(hidden [n,D], query latent [n,rq], positions [n]) -> chosen key positions [n, min(k,T)], -1 for none.

    Hi heads of di components; the keys of a request lie in a row in ``keys`` [slots, di].
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
        self.choose = ChooseKeys(config.index_topk)
        self.keys = torch.empty(0)

    def allocate(self, slots: int) -> None:
        """Forgets all keys and makes room for ``slots``."""
        self.keys = self.wk.weight.new_zeros(slots, self.width)

    def forward(self, hidden: Tensor, q_latent: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """-> ids [n, min(k,T)]."""
        query = self.q_rope(self.wq_b(q_latent).view(-1, self.heads, self.width), positions)
        key = self.k_rope(self.k_norm(self.wk(hidden)), positions)
        self.keys.index_copy_(0, attn.slot_mapping, key[: attn.num_actual_tokens])
        weights = self.head_weights(self.weights_proj(hidden))
        ids: Tensor = self.choose(self.scores(query, weights, attn))
        return ids

    def scores(self, query: Tensor, weights: Tensor, attn: AttentionMetadata) -> Tensor:
        """[n,Hi,di], [n,Hi] -> [n,T]: sum over heads of weight * max(0, query . key), -inf where not visible."""
        kind = statistics_dtype(query.dtype)
        out = torch.zeros(attn.visible.shape, dtype=kind, device=query.device)
        query, weights = query.to(kind), weights.to(kind)
        for span in attn.spans:
            keys = self.keys[span.base : span.base + span.end].to(kind).t()
            for rows in self._row_chunks(span):
                out[rows, : span.end] = _weighted_relu(query[rows], keys, weights[rows])
        return torch.where(attn.visible, out, -torch.inf)

    def _row_chunks(self, span: Span) -> list[slice]:
        return row_chunks(span.rows, self.heads * span.end)


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
    """Scores [n, T] -> the positions of the k largest, lowest first among equals; -1 where fewer are allowed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> Tensor:
        """[n, T] -> [n, min(k,T)]."""
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return ids[:, : self.count].masked_fill(values[:, : self.count] == -torch.inf, -1)
