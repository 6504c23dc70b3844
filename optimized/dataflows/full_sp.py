"""``full-sp``: hidden and residual states are shards from a model's entry to its exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from optimized.batch import AttentionMetadata
from optimized.dataflows.shards import packed_all_gather, sp_padding
from optimized.decoder import Backbone, DecoderParts, HiddenAndResidual, LayerNorms, MtpParts
from optimized.norms import ResidualRMSNorm
from optimized.setup import Setup
from optimized.sp import SequenceParallel


@contextmanager
def sp_region(sp: SequenceParallel, hidden: Tensor, residual: Tensor | None = None) -> Iterator[Tensor]:
    """Entry of a model: full hidden [n,...] -> its shard [m,...], and the forward's padding mask with it.

    Raises:
        ValueError: there is a residual: it would be a shard already, and sharded a second time.
    """
    if residual is not None:
        raise ValueError("a sequence-parallel model is entered without a residual")
    with sp_padding(sp, hidden):
        yield sp.sp_shard(hidden)


def full_sp_block(
    layer: DecoderParts, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
) -> HiddenAndResidual:
    """Shards -> shards. One all-gather and one reduce-scatter, both around attention."""
    hidden, shard = layer.input_layernorm(hidden, residual)
    full = layer.sp.sp_all_gather(hidden)[: positions.shape[0]]
    hidden = layer.sp.sp_reduce_scatter(layer.self_attn(full, positions, attn))
    hidden, shard = layer.post_attention_layernorm(hidden, shard)
    return layer.mlp(hidden), shard


class FullSpDecoderLayer(DecoderParts):
    """One layer on shards; ``positions`` and ``attn`` are those of the full rows."""

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, attn: AttentionMetadata
    ) -> HiddenAndResidual:
        """[m,D] twice -> [m,D] twice."""
        return full_sp_block(self, hidden, residual, positions, attn)


class FullSpModel(Backbone):
    """The target model on shards, from the embedding to the exit."""

    def forward(self, ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> tuple[Tensor, ...]:
        """Ids [n] -> final hidden and auxiliary states, each [n,D]."""
        with sp_region(self.sp, self.embed_tokens(ids)) as hidden:
            states = self.through_layers(hidden, positions, attn)
        return packed_all_gather(self.sp, states, positions)


class FullSpMtpLayer(MtpParts):
    """One MTP layer: norms of the inputs on full rows, then shards up to the gather of the recycled hidden."""

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Ids [n], hidden [n,D] -> hidden after ``shared_head.norm`` [n,D]."""
        with sp_region(self.sp, self.embedded(ids, hidden, positions)) as shard:
            shard, residual = full_sp_block(self, self.eh_proj(shard), None, positions, attn)
        normed, _ = self.shared_head.norm(shard, residual)
        return self.sp.sp_all_gather(normed)[: positions.shape[0]]


def full_sp_layer(setup: Setup, index: int) -> DecoderParts:
    """Layer ``index`` on shards."""
    kind = FullSpDecoderLayer if index < setup.config.num_hidden_layers else FullSpMtpLayer
    return kind(setup, index, LayerNorms(ResidualRMSNorm, ResidualRMSNorm), use_sequence_parallel=True)
