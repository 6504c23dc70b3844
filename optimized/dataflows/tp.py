"""``tp``: every rank has all rows; hidden states are summands until the next norm."""

from __future__ import annotations

from torch import Tensor

from optimized.batch import AttentionMetadata
from optimized.decoder import Backbone, DecoderParts, HiddenAndResidual, LayerNorms, MtpParts, NormFactory
from optimized.norms import FusedAllReduceRMSNorm
from optimized.setup import Setup


def tp_block(
    layer: DecoderParts, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
) -> HiddenAndResidual:
    """Partial hidden, full residual (None: hidden is complete) -> the same kinds. Two all-reduces, in the norms."""
    hidden, full = layer.input_layernorm(hidden, residual)
    hidden = layer.self_attn(hidden, positions, attn)
    hidden, full = layer.post_attention_layernorm(hidden, full)
    return layer.mlp(hidden), full


class TpDecoderLayer(DecoderParts):
    """One layer on full rows."""

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
    ) -> HiddenAndResidual:
        """[n,D] twice -> [n,D] twice."""
        return tp_block(self, hidden, residual, positions, attn)


class TpModel(Backbone):
    """The target model on full rows."""

    def forward(self, ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> tuple[Tensor, ...]:
        """Ids [n] -> final hidden and auxiliary states, each [n,D]."""
        return tuple(self.through_layers(self.embed_tokens(ids), positions, attn))


class TpMtpLayer(MtpParts):
    """One MTP layer on full rows."""

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Ids [n], hidden [n,D] -> hidden after ``shared_head.norm`` [n,D]."""
        hidden = self.eh_proj(self.embedded(ids, hidden, positions))
        hidden, residual = tp_block(self, hidden, None, positions, attn)
        out: Tensor = self.shared_head.norm(hidden, residual)[0]
        return out


def fused_norm(setup: Setup) -> NormFactory:
    """Norms of partials; all others are :class:`ResidualRMSNorm`."""
    return lambda weight, eps: FusedAllReduceRMSNorm(weight, eps, setup.tp)


def tp_layer(setup: Setup, index: int) -> DecoderParts:
    """Layer ``index`` on full rows."""
    kind = TpDecoderLayer if index < setup.config.num_hidden_layers else TpMtpLayer
    return kind(setup, index, LayerNorms(fused_norm(setup), fused_norm(setup)), use_sequence_parallel=False)
