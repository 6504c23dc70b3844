"""Which tensors a published checkpoint holds, and their shapes. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterator

from reference.config import ModelConfig

Shape = tuple[int, ...]

_ADAPTED_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
_ADAPTED_MLP = ("gate_proj", "up_proj", "down_proj")


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the checkpoint by its published name, the optional copies of the MTP layers included."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes |= _prefixed(f"model.layers.{layer}", _decoder_layer(config, layer))
    for layer in config.mtp_layers:
        shapes |= _prefixed(f"model.layers.{layer}", _decoder_layer(config, layer) | _mtp_extras(config))
    shapes["model.norm.weight"] = (config.hidden_size,)
    shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def optional_copies(config: ModelConfig) -> dict[str, str]:
    """Tensors that a checkpoint may leave out -> the tensor each of them repeats."""
    copies = {}
    for layer in config.mtp_layers:
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return copies


def adapted_modules(config: ModelConfig) -> list[str]:
    """The projections that a LoRA adapter adds to: of the main layers, but neither kv_b_proj nor routed experts."""
    modules = []
    for layer in range(config.num_hidden_layers):
        mlp = "mlp.shared_experts" if config.is_moe_layer(layer) else "mlp"
        modules += [f"model.layers.{layer}.self_attn.{name}" for name in _ADAPTED_ATTENTION]
        modules += [f"model.layers.{layer}.{mlp}.{name}" for name in _ADAPTED_MLP]
    return modules


def adapter_shapes(config: ModelConfig, rank: int) -> dict[str, Shape]:
    """Every tensor of one LoRA adapter of rank ``rank``, by its name below ``adapters.<number>.``."""
    base = tensor_shapes(config)
    shapes: dict[str, Shape] = {"lora_alpha": (1,)}
    for module in adapted_modules(config):
        outputs, inputs = base[f"{module}.weight"]
        shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, inputs)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (outputs, rank)
    return shapes


def _prefixed(prefix: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _decoder_layer(config: ModelConfig, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (config.hidden_size,),
        "post_attention_layernorm.weight": (config.hidden_size,),
    }
    shapes |= _prefixed("self_attn", _attention(config))
    if config.has_indexer:
        shapes |= _prefixed("self_attn.indexer", dict(_indexer(config)))
    mlp = _moe(config) if config.is_moe_layer(layer) else _swiglu(config.hidden_size, config.intermediate_size)
    return shapes | _prefixed("mlp", mlp)


def _attention(config: ModelConfig) -> dict[str, Shape]:
    D, H, rq, rk = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "q_a_proj.weight": (rq, D),
        "q_a_layernorm.weight": (rq,),
        "q_b_proj.weight": (H * (dn + dr), rq),
        "kv_a_proj_with_mqa.weight": (rk + dr, D),
        "kv_a_layernorm.weight": (rk,),
        "kv_b_proj.weight": (H * (dn + dv), rk),
        "o_proj.weight": (D, H * dv),
    }


def _indexer(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    if config.index_n_heads is None or config.index_head_dim is None:
        return
    yield "wq_b.weight", (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield "wk.weight", (config.index_head_dim, config.hidden_size)
    yield "k_norm.weight", (config.index_head_dim,)
    yield "k_norm.bias", (config.index_head_dim,)
    yield "weights_proj.weight", (config.index_n_heads, config.hidden_size)


def _moe(config: ModelConfig) -> dict[str, Shape]:
    D, E, Fe = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    shapes: dict[str, Shape] = {"gate.weight": (E, D), "gate.e_score_correction_bias": (E,)}
    for expert in range(E):
        shapes |= _prefixed(f"experts.{expert}", _swiglu(D, Fe))
    return shapes | _prefixed("shared_experts", _swiglu(D, config.n_shared_experts * Fe))


def _swiglu(D: int, F: int) -> dict[str, Shape]:
    return {"gate_proj.weight": (F, D), "up_proj.weight": (F, D), "down_proj.weight": (D, F)}


def _mtp_extras(config: ModelConfig) -> dict[str, Shape]:
    V, D = config.vocab_size, config.hidden_size
    return {
        "enorm.weight": (D,),
        "hnorm.weight": (D,),
        "eh_proj.weight": (D, 2 * D),
        "embed_tokens.weight": (V, D),
        "shared_head.norm.weight": (D,),
        "shared_head.head.weight": (V, D),
    }
