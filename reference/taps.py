"""Where each probe of docs/subjects.md stands in this implementation. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reference.config import ModelConfig

Tap = tuple[str, str, int, str, str]
"""(module, "in" or "out", index, placement, kind)."""

NORMS = ("input_layernorm", "post_attention_layernorm")


def all_taps(config: ModelConfig, aux_layers: Sequence[int]) -> dict[str, Tap]:
    """Probe name -> tap."""
    taps = dict(_ends(aux_layers))
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        taps |= {f"{prefix}.{probe}": (f"{prefix}.{tap[0]}", *tap[1:]) for probe, tap in _layer(config, layer)}
        if layer in config.mtp_layers:
            taps[f"{prefix}.out"] = _out(prefix)
    return taps


def _out(module: str, placement: str = "Replicate", kind: str = "value") -> Tap:
    return module, "out", 0, placement, kind


def _in(module: str, placement: str = "Replicate", kind: str = "value") -> Tap:
    return module, "in", 0, placement, kind


def _ends(aux_layers: Sequence[int]) -> Iterator[tuple[str, Tap]]:
    yield "model.embed_tokens.in", _in("model.embed_tokens", kind="set")
    yield "model.embed_tokens.out", _out("model.embed_tokens")
    yield "model.norm.in", _in("model.norm")
    yield "model.norm.out", _out("model.norm")
    yield "model.out", _out("model")
    for place, layer in enumerate(aux_layers):
        yield f"model.aux.{layer}", ("model", "out", 1 + place, "Replicate", "value")
    yield "lm_head.out", _out("lm_head")
    yield "sampler.in", _in("sampler", kind="logits")
    yield "sampler.out", _out("sampler", kind="token")
    yield "rejection_sampler.out", _out("rejection_sampler", kind="accepted")


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Tap]]:
    """The probes of one layer, names and modules relative to it."""
    if layer in config.mtp_layers:
        yield from _mtp()
    for norm in NORMS:
        yield f"{norm}.in", _in(norm)
        yield f"{norm}.out", _out(norm)
    yield from _attention(f"model.layers.{layer}" if config.has_indexer else None)
    if config.has_indexer:
        yield from _indexer()
    yield from _moe(config, f"model.layers.{layer}") if config.is_moe_layer(layer) else _dense()
    yield "mlp.out", _out("mlp")


def _attention(prefix: str | None) -> Iterator[tuple[str, Tap]]:
    """``prefix`` is the layer's name where an indexer chooses the keys."""
    for module in ("q_a_layernorm", "kv_a_layernorm", "k_rope"):
        yield f"self_attn.{module}.out", _out(f"self_attn.{module}")
    yield "self_attn.q_split.out", _out("self_attn.q_split", "Shard(1)")
    yield "self_attn.q_rope.out", _out("self_attn.q_rope", "Shard(1)")
    kind = f"all-keys:{prefix}.self_attn.indexer.choose.out" if prefix else "keys"
    yield "self_attn.softmax.in", _in("self_attn.softmax", "Shard(1)", kind)
    yield "self_attn.softmax.out", _out("self_attn.softmax", "Shard(1)", kind)
    yield "self_attn.o_proj.in", _in("self_attn.o_proj", "Shard(1)")
    yield "self_attn.out", _out("self_attn")


def _indexer() -> Iterator[tuple[str, Tap]]:
    yield "self_attn.indexer.k_norm.in", _in("self_attn.indexer.k_norm")
    for module in ("q_rope", "k_rope", "head_weights"):
        yield f"self_attn.indexer.{module}.out", _out(f"self_attn.indexer.{module}")
    yield "self_attn.indexer.choose.in", _in("self_attn.indexer.choose", kind="scores")
    yield "self_attn.indexer.choose.out", _out("self_attn.indexer.choose", kind="set")


def _dense() -> Iterator[tuple[str, Tap]]:
    yield "mlp.act_fn.out", _out("mlp.act_fn", "Shard(1)")


def _moe(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Tap]]:
    yield "mlp.gate.score.out", _out("mlp.gate.score")
    if config.topk_group < config.n_group:
        yield "mlp.gate.choose_groups.in", _in("mlp.gate.choose_groups", kind="scores")
        yield "mlp.gate.choose_groups.out", _out("mlp.gate.choose_groups", kind="set")
    yield "mlp.gate.choose.in", _in("mlp.gate.choose", kind="scores")
    yield "mlp.gate.choose.out", _out("mlp.gate.choose", kind="set")
    yield "mlp.gate.weigh.out", _out("mlp.gate.weigh", kind=f"by:{prefix}.mlp.gate.choose.out")
    yield "mlp.experts.order", ("mlp.experts", "in", 1, "Replicate", "order")
    yield "mlp.experts.act_fn.out", _out("mlp.experts.act_fn", "Shard(1)", f"routed:{prefix}.mlp.gate.choose.out")
    yield "mlp.experts.out", _out("mlp.experts", "Partial")
    yield "mlp.shared_experts.act_fn.out", _out("mlp.shared_experts.act_fn", "Shard(1)")
    yield "mlp.shared_experts.out", _out("mlp.shared_experts", "Partial")


def _mtp() -> Iterator[tuple[str, Tap]]:
    yield "embed_tokens.in", _in("embed_tokens", kind="set")
    yield "embed_tokens.out", _out("embed_tokens")
    yield "enorm.out", _out("enorm")
    yield "hnorm.out", _out("hnorm")
    for module in ("eh_proj", "shared_head.norm"):
        yield f"{module}.in", _in(module)
        yield f"{module}.out", _out(module)
    yield "shared_head.head.out", _out("shared_head.head")
    yield "shared_head.sampler.in", _in("shared_head.sampler", kind="logits")
    yield "shared_head.sampler.out", _out("shared_head.sampler", kind="token")
