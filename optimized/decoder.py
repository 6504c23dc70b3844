"""The parts of a model, without a forward: what runs on which rows is said in dataflows/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from optimized.attention import MLAAttention
from optimized.batch import AttentionMetadata
from optimized.linear import GreedySampler, Linear, ParallelLMHead, VocabParallelEmbedding
from optimized.loader import Loader
from optimized.mlp import MLP
from optimized.moe import MoE
from optimized.mtp import FusedEhNorm
from optimized.norms import ResidualRMSNorm, RMSNorm
from optimized.setup import Setup

NormFactory = Callable[[Tensor, float], ResidualRMSNorm]
HiddenAndResidual = tuple[Tensor, Tensor]


class LayerNorms(NamedTuple):
    """The kinds of a layer's norms: of what the layer before hands on, and of what its own attention and MLP do."""

    entry: NormFactory
    inner: NormFactory


class DecoderParts(nn.Module):
    """Two norms of the dataflow's kinds, attention, and the layer's MLP or MoE.

    ``use_sequence_parallel``: the MLP or MoE runs on shards. It decides here which weights a rank holds, and nothing
    else.
    """

    def __init__(self, setup: Setup, index: int, norms: LayerNorms, *, use_sequence_parallel: bool) -> None:
        super().__init__()
        config, loader = setup.config, setup.loader.at(f"model.layers.{index}")
        self.sp = setup.sp
        self.input_layernorm = norms.entry(loader.full("input_layernorm.weight"), config.rms_norm_eps)
        self.self_attn = MLAAttention(config, loader.at("self_attn"), setup.tp, setup.rotary)
        post_norm = loader.full("post_attention_layernorm.weight")
        self.post_attention_layernorm = norms.inner(post_norm, config.rms_norm_eps)
        self.mlp: nn.Module
        if config.is_moe_layer(index):
            self.mlp = MoE(setup, loader.at("mlp"), already_sequence_parallel=use_sequence_parallel)
        else:
            self.mlp = MLP(loader.at("mlp"), setup.tp, is_sequence_parallel=use_sequence_parallel)


class MtpParts(DecoderParts):
    """A decoder layer with the MTP layer's embedding, its two input norms and projection, and its head."""

    def __init__(self, setup: Setup, index: int, norms: LayerNorms, *, use_sequence_parallel: bool) -> None:
        super().__init__(setup, index, norms, use_sequence_parallel=use_sequence_parallel)
        config, loader = setup.config, setup.loader.at(f"model.layers.{index}")
        self.zero_first_embedding = config.mtp_zero_first_embedding
        self.embed_tokens = VocabParallelEmbedding(_own_or_main(setup, loader, "embed_tokens", "model."), setup.tp)
        self.enorm = RMSNorm(loader.full("enorm.weight"), config.rms_norm_eps)
        self.hnorm = RMSNorm(loader.full("hnorm.weight"), config.rms_norm_eps)
        self.fused_eh_norm = FusedEhNorm(self.enorm, self.hnorm) if config.fused_eh_norm else None
        self.eh_proj = Linear(loader.full("eh_proj.weight"))
        self.shared_head = SharedHead(setup, loader.at("shared_head"), norms.inner)

    def embedded(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Ids [n], hidden [n,D], positions [n] -> normed embedding and hidden side by side [n,2D]."""
        embedding: Tensor = self.embed_tokens(ids)
        if self.zero_first_embedding:
            embedding = torch.where(positions.unsqueeze(1) == 0, 0, embedding)
        if self.fused_eh_norm is None:
            return torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1)
        return torch.cat(self.fused_eh_norm(embedding, hidden), dim=-1)


class SharedHead(nn.Module):
    """An MTP layer's final norm, head and sampler; called one by one."""

    def __init__(self, setup: Setup, loader: Loader, norm: NormFactory) -> None:
        super().__init__()
        self.norm = norm(loader.full("norm.weight"), setup.config.rms_norm_eps)
        head = loader.at("head") if loader.has("head.weight") else setup.loader.at("lm_head")
        self.head = ParallelLMHead(head, setup.config.vocab_size, setup.tp)
        self.sampler = GreedySampler()


def _own_or_main(setup: Setup, loader: Loader, name: str, main: str) -> Loader:
    """Published MTP layers carry copies of the main tables, or leave them out."""
    return loader.at(name) if loader.has(f"{name}.weight") else setup.loader.at(main + name)


class Backbone(nn.Module):
    """Embedding, layers (the MTP layers last) and final norm; gives the final hidden and the auxiliary states [n,D]."""

    def __init__(self, setup: Setup, layers: Sequence[nn.Module], norm: NormFactory) -> None:
        super().__init__()
        self.sp = setup.sp
        self.num_hidden_layers = setup.config.num_hidden_layers
        self.aux_hidden_state_layers = frozenset(setup.aux_layers)
        self.embed_tokens = VocabParallelEmbedding(setup.loader.at("model.embed_tokens"), setup.tp)
        self.layers = nn.ModuleList(layers)
        self.norm = norm(setup.loader.full("model.norm.weight"), setup.config.rms_norm_eps)

    def decoder_layers(self) -> list[nn.Module]:
        """The layers of the target model."""
        return list(islice(self.layers, self.num_hidden_layers))

    def through_layers(self, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> list[Tensor]:
        """Embedding -> final hidden and auxiliary states, where one layout holds from entry to exit."""
        residual: Tensor | None = None
        aux: list[Tensor] = []
        for index, layer in enumerate(self.decoder_layers()):
            aux += self.aux_state(index, hidden, residual)
            hidden, residual = layer(hidden, residual, positions, attn)
        aux += self.aux_state(self.num_hidden_layers, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return [hidden, *aux]

    def aux_state(self, index: int, hidden: Tensor, residual: Tensor | None) -> list[Tensor]:
        """The auxiliary state at the input of layer ``index`` if it is asked for; what the norm there would norm."""
        if index not in self.aux_hidden_state_layers:
            return []
        last = index == self.num_hidden_layers
        norm = self.norm if last else cast(DecoderParts, self.layers[index]).input_layernorm
        return [norm.stream(hidden, residual)]
