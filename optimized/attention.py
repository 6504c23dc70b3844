"""Multi-head latent attention, absorbed: queries are taken into the latent space, so keys are never expanded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized.batch import AttentionMetadata
from optimized.chunks import row_chunks
from optimized.communicator import Block, Communicator
from optimized.indexer import Indexer
from optimized.linear import Linear
from optimized.loader import Loader
from optimized.norms import RMSNorm, statistics_dtype
from optimized.rotary import InterleavedRotary, RotaryTable, attention_scale
from reference.config import ModelConfig


class MLAAttention(nn.Module):
    """(hidden [n,D], positions [n]) -> the rank's summand of the output [n,D]; H/tp heads here.

    ``cache`` [slots, rk+dr] holds a position's latent and its rope key side by side.
    """

    def __init__(self, config: ModelConfig, loader: Loader, tp: Communicator, rotary: RotaryTable) -> None:
        super().__init__()
        block, eps = Block.of(tp), config.latent_norm_eps
        own = block.span(config.num_attention_heads, "num_attention_heads")
        self.heads = own.stop - own.start
        self.widths = [config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim]
        self.latent_width = config.kv_lora_rank
        self.scale = attention_scale(config)
        self.fused_qkv_a_proj = Linear(loader.fused(["q_a_proj.weight", "kv_a_proj_with_mqa.weight"], Block()))
        self.q_a_layernorm = RMSNorm(loader.full("q_a_layernorm.weight"), eps)
        self.kv_a_layernorm = RMSNorm(loader.full("kv_a_layernorm.weight"), eps)
        self.q_b_proj = Linear(loader.rows("q_b_proj.weight", block))
        self.q_split = SplitQuery(self.heads, config.qk_nope_head_dim)
        self.q_rope, self.k_rope = InterleavedRotary(rotary), InterleavedRotary(rotary)
        self.indexer = Indexer(config, loader.at("indexer"), rotary) if config.has_indexer else None
        expand = loader.rows("kv_b_proj.weight", block).view(self.heads, -1, config.kv_lora_rank)
        key, value = expand[:, : config.qk_nope_head_dim], expand[:, config.qk_nope_head_dim :].mT
        # Clones, since a single head's parts are contiguous where they lie, and would keep the whole matrix.
        self.absorb_key = nn.Parameter(key.clone(memory_format=torch.contiguous_format), requires_grad=False)
        self.absorb_value = nn.Parameter(value.clone(memory_format=torch.contiguous_format), requires_grad=False)
        self.softmax = Softmax()
        self.o_proj = Linear(loader.columns("o_proj.weight", block))
        self.cache = torch.empty(0)

    def allocate(self, slots: int) -> None:
        """Forgets all keys and makes room for ``slots``."""
        self.cache = self.o_proj.weight.new_zeros(slots, sum(self.widths[1:]))
        if self.indexer is not None:
            self.indexer.allocate(slots)

    def caches(self) -> dict[str, Tensor]:
        """Name -> [slots, width]."""
        latent, rope_key = torch.split(self.cache, self.widths[1:], dim=-1)
        held = {"latent": latent, "rope_key": rope_key}
        return held if self.indexer is None else held | {"index_key": self.indexer.keys}

    def forward(self, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """[n,D] -> partial [n,D]."""
        q_latent, latent, rope_key = torch.split(self.fused_qkv_a_proj(hidden), self.widths, dim=-1)
        q_latent = self.q_a_layernorm(q_latent)
        key = torch.cat([self.kv_a_layernorm(latent), self.k_rope(rope_key, positions)], dim=-1)
        self.cache.index_copy_(0, attn.slot_mapping, key[: attn.num_actual_tokens])
        query, rope_query = self.q_split(self.q_b_proj(q_latent))
        query = torch.cat([self._absorbed(query), self.q_rope(rope_query, positions)], dim=-1)
        chosen = attn.causal_choice
        if self.indexer is not None:
            chosen = self.indexer(hidden, q_latent, positions, attn)
        heads = self._attend(query[: attn.num_actual_tokens], chosen, attn)
        out: Tensor = self.o_proj(F.pad(heads, (0, 0, 0, hidden.shape[0] - heads.shape[0])))
        return out

    def _absorbed(self, query: Tensor) -> Tensor:
        """[n,h,dn] -> [n,h,rk]."""
        return torch.bmm(query.transpose(0, 1), self.absorb_key).transpose(0, 1)

    def _attend(self, query: Tensor, chosen: Tensor, attn: AttentionMetadata) -> Tensor:
        """[r,h,rk+dr] and key positions [n,k] -> [r,h*dv] of the r rows that are tokens."""
        ids = chosen[: attn.num_actual_tokens]
        slots = attn.base[:, None] + ids.clamp(min=0)
        unused = (ids < 0).unsqueeze(1)
        per_row = ids.shape[1] * self.cache.shape[1]
        chunks = row_chunks(slice(0, ids.shape[0]), per_row)
        parts = [self._attend_chunk(query[c], slots[c], unused[c]) for c in chunks]
        latent = torch.cat(parts) if parts else query[..., : self.latent_width]
        return torch.bmm(latent.transpose(0, 1), self.absorb_value).transpose(0, 1).flatten(1)

    def _attend_chunk(self, query: Tensor, slots: Tensor, unused: Tensor) -> Tensor:
        """[c,h,rk+dr], slots [c,k], unused [c,1,k] -> weighted latents [c,h,rk]."""
        keys = self.cache.index_select(0, slots.flatten()).view(*slots.shape, -1)
        logits = torch.bmm(query, keys.mT).to(statistics_dtype(query.dtype)) * self.scale
        weights = self.softmax(logits.masked_fill(unused, -torch.inf)).to(query.dtype)
        return torch.bmm(weights, keys[..., : self.latent_width])


class SplitQuery(nn.Module):
    """q_b's output [n, h*(dn+dr)] -> (plain part [n,h,dn], part to be rotated [n,h,dr])."""

    def __init__(self, heads: int, nope: int) -> None:
        super().__init__()
        self.heads, self.nope = heads, nope

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """[n, h*(dn+dr)] -> [n,h,dn], [n,h,dr]."""
        by_head = query.view(query.shape[0], self.heads, -1)
        return by_head[..., : self.nope], by_head[..., self.nope :]


class Softmax(nn.Module):
    """Logits [rows, heads, keys] -> probabilities over the keys."""

    def forward(self, logits: Tensor) -> Tensor:
        """[rows, heads, keys] -> the same."""
        return logits.softmax(dim=-1)
