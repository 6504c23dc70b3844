"""The token-count contract: how many rows each probe must see on each rank. Source: the full-chain SP dataflow.

Under ``full-sp`` hidden and residual states are shards from model entry to exit; only attention, from its gather to
its output projection, and what stands before the entry or after the exit sees all rows.
"""

from __future__ import annotations

import re

from spcheck.phases import Phase, layer_of
from spcheck.plan import Plan

_ON_SHARDS = re.compile(
    r"""\.(input_layernorm|post_attention_layernorm)\.(in|out)$  # the residual stream and its norms
      | \.self_attn\.out$                                        # after the reduce-scatter
      | \.mlp\.                                                  # dense MLP, router, shared and routed experts
      | ^model\.norm\.
      | \.eh_proj\.(in|out)$ | \.shared_head\.norm\.             # the MTP chain: sharded before eh_proj
    """,
    re.VERBOSE,
)


def expected_rows(probe: str, dataflow: str, phase: Phase, tp: int) -> list[int]:
    """Rows per firing of a probe in one forward of all requests, the same on every rank.

    ``dataflow`` is ``"reference"`` (one firing per request, its own rows), ``"tp"`` or ``"full-sp"`` (one firing).
    """
    per_request = probe.endswith(("sampler.in", "sampler.out"))
    if dataflow == "reference":
        return [1] * len(phase.counts) if per_request else list(phase.counts)
    if per_request:
        return [len(phase.counts)]
    if probe.endswith((".softmax.in", ".softmax.out")):
        return [phase.real]  # attention runs for tokens only
    if dataflow == "full-sp" and _ON_SHARDS.search(probe):
        return [phase.shard_rows(tp)]
    return [phase.padded]


def phases_of_probe(probe: str, plan: Plan) -> list[Phase]:
    """The forwards in which a probe must fire: an MTP layer's in the draft steps that use it, else the target's."""
    layer = layer_of(probe)
    if layer is None or layer < plan.config.num_hidden_layers:
        return [phase for phase in plan.phases if phase.kind == "target"]
    return [phase for phase in plan.phases if phase.kind == "draft" and plan.mtp_layer(phase.call) == layer]
