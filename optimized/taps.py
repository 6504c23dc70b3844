"""Where the probes of docs/subjects.md stand in each dataflow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optimized.dataflows.moe_sp import is_between_shards
from reference.config import ModelConfig

Tap = tuple[str, str, int, str, str]


@dataclass(frozen=True)
class Placements:
    """How one layer lays out the values outside attention."""

    entry: str  # a complete value per token row, before attention
    rows: str  # and behind it
    block: str  # what attention and MLP hand on
    channels: str  # inside an MLP
    experts: str  # inside the routed experts


def placements(config: ModelConfig, scheme: str, index: int, *, expert_parallel: bool) -> Placements:
    """The placements in layer ``index``, MTP layers included."""
    experts = "Partial" if expert_parallel else "Shard(1)"
    full = Placements("Replicate", "Replicate", "Partial", "Shard(1)", experts)
    shard = Placements("Shard(0)", "Shard(0)", "Shard(0)", "Shard(0)", experts)
    if scheme != "moe-sp":
        return shard if scheme == "full-sp" else full
    if not config.is_moe_layer(index):
        return full
    return shard if is_between_shards(config, index) else replace(shard, entry="Replicate")


def taps(config: ModelConfig, *, scheme: str, aux_layers: tuple[int, ...], expert_parallel: bool) -> dict[str, Tap]:
    """Probe name -> (module, side, index, placement, kind)."""
    exit_rows = "Shard(0)" if scheme == "full-sp" else "Replicate"
    out = {
        "model.embed_tokens.in": ("model.embed_tokens", "in", 0, "Replicate", "set"),
        "model.embed_tokens.out": _value("model.embed_tokens", "Replicate"),
        **_norm("model.norm", exit_rows),
        "model.out": _value("model", "Replicate"),
        **{f"model.aux.{i}": _value("model", "Replicate", 1 + j) for j, i in enumerate(sorted(set(aux_layers)))},
        "lm_head.out": _value("lm_head", "Replicate"),
        **_sampler("sampler"),
        "rejection_sampler.out": ("rejection_sampler", "out", 0, "Replicate", "accepted"),
    }
    for index in range(config.mtp_layers.stop):
        out |= _layer(config, index, placements(config, scheme, index, expert_parallel=expert_parallel))
    for index in config.mtp_layers:
        out |= _mtp(config, f"model.layers.{index}", exit_rows)
    return out


def padding_inputs(config: ModelConfig) -> list[tuple[str, str, int]]:
    """Where graph-padding rows enter: the embeddings' outputs and the MTP layers' hidden inputs."""
    layers = [f"model.layers.{i}" for i in config.mtp_layers]
    embeddings = [("model.embed_tokens", "out", 0)] + [(f"{layer}.embed_tokens", "out", 0) for layer in layers]
    return embeddings + [(layer, "in", 1) for layer in layers]


def _value(module: str, placement: str, index: int = 0, side: str = "out") -> Tap:
    return module, side, index, placement, "value"


def _norm(module: str, rows: str) -> dict[str, Tap]:
    """A fused norm's input is its second output, the updated residual."""
    return {f"{module}.in": _value(module, rows, 1), f"{module}.out": _value(module, rows)}


def _layer(config: ModelConfig, index: int, at: Placements) -> dict[str, Tap]:
    layer = f"model.layers.{index}"
    post = f"{layer}.post_attention_layernorm"
    mlp = _moe(config, f"{layer}.mlp", at) if config.is_moe_layer(index) else _dense(f"{layer}.mlp", at)
    return {
        **_norm(f"{layer}.input_layernorm", at.entry),
        **_attention(config, f"{layer}.self_attn"),
        f"{layer}.self_attn.out": _value(post, at.block, side="in"),
        **_norm(post, at.rows),
        **mlp,
        f"{layer}.mlp.out": _value(f"{layer}.mlp", at.block),
    }


def _attention(config: ModelConfig, attention: str) -> dict[str, Tap]:
    """Attention sees full rows in every dataflow."""
    replicated = ["q_a_layernorm", "kv_a_layernorm", "k_rope"]
    if config.has_indexer:
        replicated += ["indexer.q_rope", "indexer.k_rope", "indexer.head_weights"]
    out = {f"{attention}.{name}.out": _value(f"{attention}.{name}", "Replicate") for name in replicated}
    out[f"{attention}.q_split.out"] = _value(f"{attention}.q_split", "Shard(1)")
    out[f"{attention}.q_rope.out"] = _value(f"{attention}.q_rope", "Shard(1)")
    keys = f"keys:{attention}.indexer.choose.out" if config.has_indexer else "keys"
    out |= {
        f"{attention}.softmax.{side}": (f"{attention}.softmax", side, 0, "Shard(1)", keys) for side in ("in", "out")
    }
    out[f"{attention}.o_proj.in"] = _value(f"{attention}.o_proj", "Shard(1)", side="in")
    if config.has_indexer:
        out[f"{attention}.indexer.k_norm.in"] = _value(f"{attention}.indexer.k_norm", "Replicate", side="in")
        choose = f"{attention}.indexer.choose"
        out[f"{choose}.in"] = (f"{attention}.indexer.score", "out", 0, "Replicate", "scores")
        out[f"{choose}.out"] = (choose, "out", 0, "Replicate", "set")
    return out


def _choice(module: str, placement: str) -> dict[str, Tap]:
    return {
        f"{module}.in": (module, "in", 0, placement, "scores"),
        f"{module}.out": (module, "out", 0, placement, "set"),
    }


def _sampler(module: str) -> dict[str, Tap]:
    return {
        f"{module}.in": (module, "in", 0, "Replicate", "logits"),
        f"{module}.out": (module, "out", 0, "Replicate", "token"),
    }


def _dense(mlp: str, at: Placements) -> dict[str, Tap]:
    return {f"{mlp}.act_fn.out": _value(f"{mlp}.act_fn", at.channels)}


def _moe(config: ModelConfig, mlp: str, at: Placements) -> dict[str, Tap]:
    gate = f"{mlp}.gate"
    return {
        f"{gate}.score.out": _value(f"{gate}.score", at.rows),
        **(_choice(f"{gate}.choose_groups", at.rows) if config.topk_group < config.n_group else {}),
        **_choice(f"{gate}.choose", at.rows),
        f"{gate}.weigh.out": (f"{gate}.weigh", "out", 0, at.rows, f"by:{gate}.choose.out"),
        f"{mlp}.experts.ids": (f"{mlp}.experts", "in", 1, at.rows, "order"),
        f"{mlp}.experts.order": (f"{mlp}.experts.permute", "in", 0, "Shard(0)", "order"),
        f"{mlp}.experts.act_fn.out": (f"{mlp}.experts.act_fn", "out", 0, at.experts, f"routed:{gate}.choose.out"),
        f"{mlp}.experts.out": _value(f"{mlp}.experts", at.block),
        f"{mlp}.experts.work": (f"{mlp}.experts.permute", "out", 1, "Shard(0)", "work"),
        f"{mlp}.shared_experts.act_fn.out": _value(f"{mlp}.shared_experts.act_fn", at.channels),
        f"{mlp}.shared_experts.out": _value(f"{mlp}.shared_experts", at.block),
    }


def _mtp(config: ModelConfig, layer: str, rows: str) -> dict[str, Tap]:
    """``rows``: where the hidden is complete, but for the input norms and the end."""
    head = f"{layer}.shared_head"
    norms = [("enorm", 0), ("hnorm", 0)] if not config.fused_eh_norm else [("fused_eh_norm", 0), ("fused_eh_norm", 1)]
    enorm, hnorm = (_value(f"{layer}.{module}", "Replicate", index) for module, index in norms)
    return {
        f"{layer}.enorm.out": enorm,
        f"{layer}.hnorm.out": hnorm,
        f"{layer}.embed_tokens.in": (f"{layer}.embed_tokens", "in", 0, "Replicate", "set"),
        f"{layer}.embed_tokens.out": _value(f"{layer}.embed_tokens", "Replicate"),
        f"{layer}.eh_proj.in": _value(f"{layer}.eh_proj", rows, side="in"),
        f"{layer}.eh_proj.out": _value(f"{layer}.eh_proj", rows),
        **_norm(f"{head}.norm", rows),
        f"{layer}.out": _value(layer, "Replicate"),
        f"{head}.head.out": _value(f"{head}.head", "Replicate"),
        **_sampler(f"{head}.sampler"),
    }
