"""The dataflows, side by side: all that differs between them is in this file.

``full`` = every rank holds the same [n,D]; ``shard`` = the rank's rows [m,D]; ``partial`` = [n,D] still to be summed.

|                  | tp                                   | full-sp                                      |
|------------------|--------------------------------------|----------------------------------------------|
| between layers   | residual full, hidden partial        | both shards                                  |
| norms            | all-reduce fused into the norm       | plain, on the shard                          |
| around attention | nothing                              | all-gather and trim; reduce-scatter          |
| MLP, shared      | channels divided, partial out        | whole on every rank                          |
| routed experts   | local rows and experts, partial out  | dispatch, combine, complete out              |
| model exit       | the final norm's all-reduce          | one packed all-gather and trim               |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimized.batch import AttentionMetadata
from optimized.decoder import Backbone, DecoderParts, MtpParts, NormFactory
from optimized.forward_context import get_forward_context, narrowed_padding_mask
from optimized.norms import FusedAllReduceRMSNorm, ResidualRMSNorm
from optimized.setup import Setup
from optimized.sp import SequenceParallel

HiddenAndResidual = tuple[Tensor, Tensor]


# ---- tp ------------------------------------------------------------------------------------------------------------


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
        hidden, residual = self.embed_tokens(ids), None
        aux = []
        for index, layer in enumerate(self.decoder_layers()):
            if index in self.aux_hidden_state_layers:
                aux.append(self._complete(hidden, residual))
            hidden, residual = layer(hidden, residual, positions, attn)
        if self.num_hidden_layers in self.aux_hidden_state_layers:
            aux.append(self._complete(hidden, residual))
        hidden, _ = self.norm(hidden, residual)
        return hidden, *aux

    def _complete(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        return hidden if residual is None else self.tp.all_reduce(hidden) + residual


class TpMtpLayer(MtpParts):
    """One MTP layer on full rows."""

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Ids [n], hidden [n,D] -> hidden after ``shared_head.norm`` [n,D]."""
        hidden = self.eh_proj(self.embedded(ids, hidden, positions))
        hidden, residual = tp_block(self, hidden, None, positions, attn)
        out: Tensor
        out, _ = self.shared_head.norm(hidden, residual)
        return out


# ---- full-sp -------------------------------------------------------------------------------------------------------


@contextmanager
def sp_region(sp: SequenceParallel, hidden: Tensor, residual: Tensor | None = None) -> Iterator[Tensor]:
    """Entry of a model: full hidden [n,...] -> its shard [m,...], and the forward's padding mask with it.

    Raises:
        ValueError: there is a residual: it would be a shard already, and sharded a second time.
    """
    if residual is not None:
        raise ValueError("a sequence-parallel model is entered without a residual")
    with narrowed_padding_mask(sp.sp_padding_mask(get_forward_context().is_padding, hidden)):
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
            states = self._on_shards(hidden, positions, attn)
        packed = self.sp.sp_all_gather(torch.cat(states, dim=-1))[: positions.shape[0]]
        return packed.chunk(len(states), dim=-1)

    def _on_shards(self, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> list[Tensor]:
        """-> final hidden and auxiliary states, each [m,D]."""
        residual, aux = None, []
        for index, layer in enumerate(self.decoder_layers()):
            if index in self.aux_hidden_state_layers:
                aux.append(hidden if residual is None else hidden + residual)
            hidden, residual = layer(hidden, residual, positions, attn)
        hidden, total = self.norm(hidden, residual)
        if self.num_hidden_layers in self.aux_hidden_state_layers:
            aux.append(total)
        return [hidden, *aux]


class FullSpMtpLayer(MtpParts):
    """One MTP layer: norms of the inputs on full rows, then shards up to the gather of the recycled hidden."""

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Ids [n], hidden [n,D] -> hidden after ``shared_head.norm`` [n,D]."""
        with sp_region(self.sp, self.embedded(ids, hidden, positions)) as shard:
            shard, residual = full_sp_block(self, self.eh_proj(shard), None, positions, attn)
        normed, _ = self.shared_head.norm(shard, residual)
        return self.sp.sp_all_gather(normed)[: positions.shape[0]]


# ---- choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataflow:
    """The classes of one dataflow, and whether its blocks run on shards."""

    model: Callable[[Setup, Sequence[nn.Module], NormFactory], Backbone]
    layer: type[DecoderParts]
    mtp_layer: type[MtpParts]
    use_sequence_parallel: bool

    def build(self, setup: Setup) -> Backbone:
        """The decoder layers, then the MTP layers, in one model."""
        norm, sharded = self._norm(setup), self.use_sequence_parallel
        count, mtp = setup.config.num_hidden_layers, setup.config.mtp_layers
        layers: list[nn.Module] = [self.layer(setup, i, norm, use_sequence_parallel=sharded) for i in range(count)]
        layers += [self.mtp_layer(setup, i, norm, use_sequence_parallel=sharded) for i in mtp]
        return self.model(setup, layers, norm)

    def _norm(self, setup: Setup) -> NormFactory:
        if self.use_sequence_parallel:
            return ResidualRMSNorm
        return lambda weight, eps: FusedAllReduceRMSNorm(weight, eps, setup.tp)


DATAFLOWS = {
    "tp": Dataflow(TpModel, TpDecoderLayer, TpMtpLayer, use_sequence_parallel=False),
    "full-sp": Dataflow(FullSpModel, FullSpDecoderLayer, FullSpMtpLayer, use_sequence_parallel=True),
}
