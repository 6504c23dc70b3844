"""The token-count contract: how many rows each probe must see on each rank. Source: the dataflows of SP engines.

Under ``full-sp`` hidden and residual states are shards from model entry to exit; only attention, from its gather to
its output projection, and what stands before the entry or after the exit sees all rows. Under ``moe-sp`` a MoE layer
works on shards from behind its attention, and the next MoE layer's input norm still does; all else sees all rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reference.config import ModelConfig
from spcheck.plan.phases import Phase, layer_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.subjects.protocol import FOR_TOKENS, REJECTION_SAMPLER, SHORT_CONTEXT

_ON_SHARDS = re.compile(
    r"""\.(input_layernorm|post_attention_layernorm)\.(in|out)$  # the residual stream and its norms
      | \.self_attn\.out$                                        # after the reduce-scatter
      | \.mlp\.                                                  # dense MLP, router, shared and routed experts
      | ^model\.norm\.
      | \.eh_proj\.(in|out)$ | \.shared_head\.norm\.             # the MTP chain: sharded before eh_proj
    """,
    re.VERBOSE,
)
_IN_MOE_SP = re.compile(r"\.post_attention_layernorm\.(in|out)$ | \.self_attn\.out$ | \.mlp\.", re.VERBOSE)
_INPUT_NORM = re.compile(r"\.input_layernorm\.(in|out)$")


def expected_rows(probe: str, side: SidePlan, config: ModelConfig, phase: Phase) -> list[int]:
    """Rows per firing of a probe in one forward of all requests, the same on every rank of a data-parallel rank.

    A plain subject has one firing per request, of its own rows; a packed one has one.
    """
    rows: Sequence[int] = phase.counts
    if probe == REJECTION_SAMPLER:
        rows = [1] * len(phase.counts)
    elif probe.endswith(("sampler.in", "sampler.out")):
        rows = phase.samples
    if side.plain:
        return list(rows)
    if rows is not phase.counts:
        return [sum(rows)]
    if probe.endswith(FOR_TOKENS):
        return [phase.real]
    return [phase.shard_rows(side.tp) if _on_shard(probe, side.scheme, config) else phase.padded]


def _on_shard(probe: str, scheme: str, config: ModelConfig) -> bool:
    if scheme == "full-sp":
        return _ON_SHARDS.search(probe) is not None
    layer = layer_of(probe)
    if scheme != "moe-sp" or layer is None or not config.is_moe_layer(layer):
        return False
    return _IN_MOE_SP.search(probe) is not None or (
        enters_on_shards(config, layer) and _INPUT_NORM.search(probe) is not None
    )


def enters_on_shards(config: ModelConfig, layer: int) -> bool:
    """Whether a layer is handed shards under ``moe-sp``: the layer before has experts; an MTP layer has none before."""
    return 0 < layer < config.num_hidden_layers and config.is_moe_layer(layer - 1)


def may_be_silent(probe: str, config: ModelConfig, phase: Phase) -> bool:
    """Whether a probe need not fire: where no row has more keys than the indexer chooses it may choose all unscored."""
    return probe.endswith(SHORT_CONTEXT) and config.index_topk is not None and phase.keys <= config.index_topk


def must_fire(probe: str, plan: Plan, side: SidePlan, dp_rank: int) -> bool:
    """Whether a probe has to fire in some forward of a side on a data-parallel rank.

    Where there is no token a plain subject does not run at all, and attention of a packed one sees no row.
    """
    for_tokens = side.plain or probe.endswith(FOR_TOKENS) or probe == REJECTION_SAMPLER
    return any(
        (phase.real or not for_tokens) and not may_be_silent(probe, plan.config, phase)
        for phase in phases_of_probe(probe, plan, dp_rank)
    )


def phases_of_probe(probe: str, plan: Plan, dp_rank: int = 0) -> list[Phase]:
    """The forwards in which a probe is seen: an MTP layer's in the draft steps that use it, else the target's."""
    return [phase for phase in plan.phases[dp_rank] if _is_seen(probe, plan, phase)]


def phase_of_probe(probe: str, plan: Plan, call: int, dp_rank: int = 0) -> Phase | None:
    """The one of these with that number."""
    phase = plan.phase(kind_of_probe(probe, plan), call, dp_rank)
    return phase if phase is not None and _is_seen(probe, plan, phase) else None


def ids_probe(kind: str, draft: int, plan: Plan) -> str:
    """The probe that shows the token ids that a forward is fed: of a draft step those of its MTP layer."""
    return f"model.layers.{plan.mtp_layer(draft)}.embed_tokens.in" if kind == "draft" else "model.embed_tokens.in"


def kind_of_probe(probe: str, plan: Plan) -> str:
    """The kind of forward in which a probe, or a module, runs: an MTP layer's in drafts, all else in the target."""
    layer = layer_of(probe)
    return "draft" if layer is not None and layer >= plan.config.num_hidden_layers else "target"


def _is_seen(probe: str, plan: Plan, phase: Phase) -> bool:
    if not phase.probed or phase.kind != kind_of_probe(probe, plan):
        return False
    if probe == REJECTION_SAMPLER:
        return phase.drafts is not None
    return phase.kind == "target" or plan.mtp_layer(phase.draft) == layer_of(probe)
