"""The dataflows, side by side: all that differs between them is in this file.

``full`` = every rank holds the same [n,D]; ``shard`` = the rank's rows [m,D]; ``partial`` = [n,D] still to be summed.

|                  | tp                             | moe-sp                            | full-sp                     |
|------------------|--------------------------------|-----------------------------------|-----------------------------|
| between layers   | residual full, hidden partial  | tp's; between MoE layers full-sp's| both shards                 |
| input norm       | all-reduce fused into the norm | tp's; plain behind a MoE layer    | plain, on the shard         |
| before attention | nothing                        | from a shard: all-gather, trim    | all-gather, trim            |
| after attention  | all-reduce fused into the norm | dense: tp's; MoE: full-sp's       | reduce-scatter, plain norm  |
| dense MLP        | channels divided, partial out  | tp's                              | whole on every rank         |
| routed experts   | dispatch over DP, partial out  | full-sp's                         | dispatch over EP, complete  |
| shared expert    | channels divided, partial out  | full-sp's                         | whole on every rank         |
| border and exit  | the next norm's all-reduce     | one packed all-gather, plain norm | norm, one packed all-gather |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from optimized.batch import AttentionMetadata
from optimized.decoder import Backbone, DecoderParts, LayerNorms, MtpParts, NormFactory
from optimized.forward_context import ForwardContext, get_forward_context, narrowed_padding_mask
from optimized.norms import FusedAllReduceRMSNorm, ResidualRMSNorm
from optimized.setup import Setup
from optimized.sp import SequenceParallel
from reference.config import ModelConfig

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
        return tuple(self.through_layers(self.embed_tokens(ids), positions, attn))


class TpMtpLayer(MtpParts):
    """One MTP layer on full rows."""

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Ids [n], hidden [n,D] -> hidden after ``shared_head.norm`` [n,D]."""
        hidden = self.eh_proj(self.embedded(ids, hidden, positions))
        hidden, residual = tp_block(self, hidden, None, positions, attn)
        out: Tensor = self.shared_head.norm(hidden, residual)[0]
        return out


# ---- full-sp -------------------------------------------------------------------------------------------------------


def sp_padding(sp: SequenceParallel, full: Tensor) -> AbstractContextManager[ForwardContext]:
    """For the block the forward's padding mask is that of the shard of ``full`` [n,...]."""
    return narrowed_padding_mask(sp.sp_padding_mask(get_forward_context().is_padding, full))


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


def packed_all_gather(sp: SequenceParallel, shards: Sequence[Tensor], positions: Tensor) -> tuple[Tensor, ...]:
    """Several shards [m,D] -> full [n,D] each, in one collective."""
    return sp.sp_all_gather(torch.cat(list(shards), dim=-1))[: positions.shape[0]].chunk(len(shards), dim=-1)


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


# ---- moe-sp --------------------------------------------------------------------------------------------------------


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


# ---- choice --------------------------------------------------------------------------------------------------------


def fused_norm(setup: Setup) -> NormFactory:
    """Norms of partials; all others are :class:`ResidualRMSNorm`."""
    return lambda weight, eps: FusedAllReduceRMSNorm(weight, eps, setup.tp)


def tp_layer(setup: Setup, index: int) -> DecoderParts:
    """Layer ``index`` on full rows."""
    kind = TpDecoderLayer if index < setup.config.num_hidden_layers else TpMtpLayer
    return kind(setup, index, LayerNorms(fused_norm(setup), fused_norm(setup)), use_sequence_parallel=False)


def full_sp_layer(setup: Setup, index: int) -> DecoderParts:
    """Layer ``index`` on shards."""
    kind = FullSpDecoderLayer if index < setup.config.num_hidden_layers else FullSpMtpLayer
    return kind(setup, index, LayerNorms(ResidualRMSNorm, ResidualRMSNorm), use_sequence_parallel=True)


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


@dataclass(frozen=True)
class Dataflow:
    """The parts of one dataflow, and whether its MoE layers run on shards."""

    model: Callable[[Setup, Sequence[nn.Module], NormFactory], Backbone]
    layer: Callable[[Setup, int], DecoderParts]
    exit_norm: Callable[[Setup, int], NormFactory]
    use_sequence_parallel: bool

    def build(self, setup: Setup) -> Backbone:
        """The decoder layers, then the MTP layers, in one model."""
        layers = [self.layer(setup, index) for index in range(setup.config.mtp_layers.stop)]
        return self.model(setup, layers, self.exit_norm(setup, setup.config.num_hidden_layers))


DATAFLOWS = {
    "tp": Dataflow(TpModel, tp_layer, lambda setup, _: fused_norm(setup), use_sequence_parallel=False),
    "moe-sp": Dataflow(MoeSpModel, moe_sp_layer, moe_sp_norm, use_sequence_parallel=True),
    "full-sp": Dataflow(FullSpModel, full_sp_layer, lambda *_: ResidualRMSNorm, use_sequence_parallel=True),
}
