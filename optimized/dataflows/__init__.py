"""The dataflows, side by side: all that differs between them is in this folder, a file for each.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from optimized.dataflows.full_sp import FullSpModel, full_sp_layer
from optimized.dataflows.moe_sp import MoeSpModel, moe_sp_layer, moe_sp_norm
from optimized.dataflows.tp import TpModel, fused_norm, tp_layer
from optimized.decoder import Backbone, DecoderParts, NormFactory
from optimized.norms import ResidualRMSNorm
from optimized.setup import Setup


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
