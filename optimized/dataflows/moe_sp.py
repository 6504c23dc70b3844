"""``moe-sp``: MoE layers run on shards, dense layers as in ``tp``; a gather leads from the former to the latter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from optimized.batch import AttentionMetadata
from optimized.dataflows.full_sp import full_sp_block
from optimized.dataflows.shards import packed_all_gather, sp_padding
from optimized.dataflows.tp import TpDecoderLayer, fused_norm
from optimized.decoder import Backbone, DecoderParts, HiddenAndResidual, LayerNorms, MtpParts, NormFactory
from optimized.norms import ResidualRMSNorm
from optimized.setup import Setup
from reference.config import ModelConfig


def is_between_shards(config: ModelConfig, index: int) -> bool:
    """Whether moe-sp enters layer ``index`` with shards: a MoE layer of the target model behind another one."""
    inside = 0 < index < config.num_hidden_layers
    return inside and config.is_moe_layer(index) and config.is_moe_layer(index - 1)


def moe_sp_entry_block(
    layer: DecoderParts, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
) -> HiddenAndResidual:
    """What ``tp_block`` takes -> shards. The attention output and the residual are divided behind attention."""
    hidden, full = layer.input_layernorm(hidden, residual)
    hidden = layer.sp.sp_reduce_scatter(layer.self_attn(hidden, positions, attn))
    hidden, shard = layer.post_attention_layernorm(hidden, layer.sp.sp_shard(full))
    return layer.mlp(hidden), shard


class MoeSpEntryLayer(DecoderParts):
    """A MoE layer behind a dense one, or the first layer: from full rows to shards."""

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
    ) -> HiddenAndResidual:
        """[n,D] twice -> [m,D] twice."""
        with sp_padding(self.sp, positions):
            return moe_sp_entry_block(self, hidden, residual, positions, attn)


class MoeSpInnerLayer(DecoderParts):
    """A MoE layer behind another one: it stays on shards."""

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
    ) -> HiddenAndResidual:
        """[m,D] twice -> [m,D] twice."""
        with sp_padding(self.sp, positions):
            return full_sp_block(self, hidden, residual, positions, attn)


@dataclass
class Stream:
    """What moe-sp hands from layer to layer, and the auxiliary states so far: complete, or shards to be gathered."""

    hidden: Tensor
    residual: Tensor | None = None
    aux: list[Tensor] = field(default_factory=list)
    shards: list[Tensor] = field(default_factory=list)


class MoeSpModel(Backbone):
    """The target model on full rows, on shards from each first MoE layer to the dense layer, or the exit, behind it."""

    def __init__(self, setup: Setup, layers: Sequence[nn.Module], norm: NormFactory) -> None:
        super().__init__(setup, layers, norm)
        self.between_shards = frozenset(i for i in range(self.num_hidden_layers) if is_between_shards(setup.config, i))
        behind_moe = frozenset(i + 1 for i in range(self.num_hidden_layers) if setup.config.is_moe_layer(i))
        self.borders = behind_moe - self.between_shards

    def forward(self, ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> tuple[Tensor, ...]:
        """Ids [n] -> final hidden and auxiliary states, each [n,D]."""
        stream = Stream(self.embed_tokens(ids))
        for index, layer in enumerate(self.decoder_layers()):
            self._arrive(stream, index, positions)
            stream.hidden, stream.residual = layer(stream.hidden, stream.residual, positions, attn)
        self._arrive(stream, self.num_hidden_layers, positions)
        hidden, _ = self.norm(stream.hidden, stream.residual)
        return hidden, *stream.aux

    def _arrive(self, stream: Stream, index: int, positions: Tensor) -> None:
        """At the input of layer ``index``: leaves the shards where it is time to, and takes the auxiliary state."""
        if index in self.borders:
            assert stream.residual is not None, "there is a layer before a border"
            shards = [stream.hidden, stream.residual, *stream.shards]
            stream.hidden, stream.residual, *gathered = packed_all_gather(self.sp, shards, positions)
            stream.aux, stream.shards = stream.aux + gathered, []
        states = stream.shards if index in self.between_shards else stream.aux
        states += self.aux_state(index, stream.hidden, stream.residual)


class MoeSpMtpLayer(MtpParts):
    """One MTP layer: full rows up to attention, shards from there to the packed gather before its last norm."""

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Ids [n], hidden [n,D] -> hidden after ``shared_head.norm`` [n,D]."""
        hidden = self.eh_proj(self.embedded(ids, hidden, positions))
        with sp_padding(self.sp, positions):
            shards = moe_sp_entry_block(self, hidden, None, positions, attn)
        out: Tensor = self.shared_head.norm(*packed_all_gather(self.sp, shards, positions))[0]
        return out


def moe_sp_norm(setup: Setup, index: int) -> NormFactory:
    """The norm at the input of layer ``index``, or at the exit: a MoE layer leaves nothing to be summed."""
    behind_moe = index > 0 and setup.config.is_moe_layer(index - 1)
    return ResidualRMSNorm if behind_moe else fused_norm(setup)


def moe_sp_layer(setup: Setup, index: int) -> DecoderParts:
    """Layer ``index`` on the rows that the layer before leaves."""
    moe = setup.config.is_moe_layer(index)
    norms = LayerNorms(moe_sp_norm(setup, index), ResidualRMSNorm if moe else fused_norm(setup))
    return _moe_sp_kind(setup.config, index)(setup, index, norms, use_sequence_parallel=moe)


def _moe_sp_kind(config: ModelConfig, index: int) -> type[DecoderParts]:
    if index >= config.num_hidden_layers:
        return MoeSpMtpLayer
    if is_between_shards(config, index):
        return MoeSpInnerLayer
    return MoeSpEntryLayer if config.is_moe_layer(index) else TpDecoderLayer
