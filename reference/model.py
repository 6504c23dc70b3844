"""The decoder and the MTP layer.

T  new tokens of one request      D  hidden size      V  vocabulary
h  hidden states after the final norm; g is what an MTP layer receives: h, or the g' of the layer before
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reference.attention import Attention
from reference.cache import LayerCache
from reference.config import ModelConfig
from reference.layers import GreedySampler, Linear, RMSNorm
from reference.moe import MoE, SwiGLU
from reference.parallel import Communicator, VocabularyParallelEmbedding, VocabularyParallelHead


class TransformerBlock(nn.Module):
    """Attention and an MLP around a residual stream; the parts that decoder layers and MTP layers both have."""

    def __init__(self, config: ModelConfig, layer: int, tp: Communicator) -> None:
        super().__init__()
        D, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, epsilon)
        self.self_attn = Attention(config, tp)
        self.post_attention_layernorm = RMSNorm(D, epsilon)
        self.mlp: nn.Module
        if config.is_moe_layer(layer):
            self.mlp = MoE(config, tp)
        else:
            self.mlp = SwiGLU(D, config.intermediate_size, tp, reduce=True)

    def block(self, x_TD: Tensor, positions_T: Tensor, cache: LayerCache) -> Tensor:
        """x + Attention(RMSNorm(x)), then x + Mlp(RMSNorm(x)): [T, D] -> [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), positions_T, cache)
        out_TD: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out_TD


class DecoderLayer(TransformerBlock):
    """One main layer."""

    def forward(self, x_TD: Tensor, positions_T: Tensor, cache: LayerCache) -> Tensor:
        """The residual stream [T, D] at the layer's input -> at its output."""
        return self.block(x_TD, positions_T, cache)


class SharedHead(nn.Module):
    """The end of an MTP layer: its own norm, and a head and sampler like the main model's."""

    def __init__(self, config: ModelConfig, tp: Communicator) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = VocabularyParallelHead(config.vocab_size, config.hidden_size, tp)
        self.sampler = GreedySampler()

    def forward(self, g_TD: Tensor) -> Tensor:
        """Normed hidden states [T, D] -> the drafted token [1], from the last row."""
        token_1: Tensor = self.sampler(self.head(g_TD)[-1:])
        return token_1


class MtpLayer(TransformerBlock):
    """One multi-token-prediction layer: a token and the hidden state before it make the input of a block."""

    def __init__(self, config: ModelConfig, layer: int, tp: Communicator) -> None:
        super().__init__(config, layer, tp)
        D, epsilon = config.hidden_size, config.rms_norm_eps
        self.zero_first_embedding = config.mtp_zero_first_embedding
        self.embed_tokens = VocabularyParallelEmbedding(config.vocab_size, D, tp)
        self.enorm = RMSNorm(D, epsilon)
        self.hnorm = RMSNorm(D, epsilon)
        self.eh_proj = Linear(2 * D, D)
        self.shared_head = SharedHead(config, tp)

    def forward(self, ids_T: Tensor, g_TD: Tensor, positions_T: Tensor, cache: LayerCache) -> Tensor:
        """Hidden states g [T, D], each with the id of the token that follows it -> g' [T, D], to be used again."""
        e_TD = self.embed_tokens(ids_T)
        if self.zero_first_embedding:
            e_TD = torch.where((positions_T == 0)[:, None], 0, e_TD)
        z_TD = self.eh_proj(torch.cat((self.enorm(e_TD), self.hnorm(g_TD)), dim=-1))  # the embedding first
        recycled_TD: Tensor = self.shared_head.norm(self.block(z_TD, positions_T, cache))
        return recycled_TD


class Decoder(nn.Module):
    """Embedding, the main layers, the final norm. ``layers`` holds the MTP layers too, behind the main ones."""

    def __init__(self, config: ModelConfig, tp: Communicator, aux_layers: Sequence[int]) -> None:
        super().__init__()
        self.main_layers = config.num_hidden_layers
        self.aux_layers = tuple(aux_layers)
        self.embed_tokens = VocabularyParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        main = [DecoderLayer(config, i, tp) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([*main, *(MtpLayer(config, i, tp) for i in config.mtp_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache]) -> tuple[Tensor, ...]:
        """Token ids -> h [T, D], then the auxiliary states [T, D] in the order of ``aux_layers``.

        State i is the residual stream at the input of layer i; the last one stands before the final norm.
        """
        streams = [self.embed_tokens(ids_T)]
        for layer, cache in zip(self.layers[: self.main_layers], caches, strict=False):
            streams.append(layer(streams[-1], positions_T, cache))
        return self.norm(streams[-1]), *(streams[i] for i in self.aux_layers)
