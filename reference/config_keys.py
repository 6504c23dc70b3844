"""Keys of a published ``config.json`` beside the sizes: which are checked, which passed over, and why. No torch.

A key that stands in none of these tables may change the model, so a file that has it is refused. A null is how some
writers spell absent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from reference.mistakes import ConfigError, quoted

ROPE_BLOCKS = ("rope_parameters", "rope_scaling")
QUANTIZATION = "quantization_config"

FIXED: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "index_share_for_mtp_iteration": False,
    "index_topk_freq": 1,
    "indexer_rope_interleave": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "moe_router_dtype": "float32",
    "pretraining_tp": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_sliding_window": False,
}
"""Keys of which one value is implemented."""

EVERY_LAYER = {"indexer_types": "full", "index_topk_pattern": "F"}
"""Keys with an entry for each layer, and the only entry that is implemented."""

ATTENTION = {"deepseek_v3": "full_attention", "deepseek_v32": "indexed_attention"}
"""The only entry of ``layer_types``, by model type."""

REPEATED = {
    "num_key_value_heads": ("num_attention_heads",),
    "num_local_experts": ("n_routed_experts",),
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    "mlp_layer_types": ("num_hidden_layers", "first_k_dense_replace", "moe_layer_freq"),
    "layer_types": ("model_type",),
}
"""Keys that say again what others say, and these others."""

_HARMLESS_BY_REASON = {
    "name the file's writer and what loads it": ("architectures", "auto_map", "transformers_version"),
    "say where a text begins and ends: every run here is of given tokens and a given length": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
    "are for training": ("initializer_range", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "problem_type"),
    "say what a call returns beside the logits": (
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "id2label",
        "label2id",
    ),
    "say how a library computes the same": ("use_cache", "chunk_size_feed_forward"),
    "say the type of stored tensors, and files say it themselves": ("dtype", "torch_dtype"),
    "are read by no model with this attention: its heads have qk_nope_head_dim, qk_rope_head_dim, v_head_dim": (
        "head_dim",
    ),
    "change nothing while index_topk_freq is 1": ("index_skip_topk_offset",),
}
HARMLESS = frozenset(name for names in _HARMLESS_BY_REASON.values() for name in names)
"""Keys of which no value changes what the two models compute; so are notes, whose names begin with an underscore."""


def check_known(raw: Mapping[str, Any], fields: Collection[str]) -> None:
    """Looks for keys that no table has; ``fields`` are those that the models read.

    Raises:
        ConfigError: there is one, and its value is not null.
    """
    for name, value in raw.items():
        if value is not None and not is_harmless(name) and name not in checked_keys(fields):
            close = get_close_matches(name, sorted(fields), n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"config.json has the unknown key {quoted(name)}, which may change the model{hint}")


def is_harmless(name: str) -> bool:
    """Whether no value of the key changes what is computed."""
    return name in HARMLESS or name.startswith("_")


def checked_keys(fields: Collection[str]) -> set[str]:
    """Keys whose values are read or checked."""
    return {*fields, *FIXED, *EVERY_LAYER, *REPEATED, *ROPE_BLOCKS, QUANTIZATION}


def check_fixed(raw: Mapping[str, Any], model_type: str) -> None:
    """Looks at the keys of which one value is implemented.

    Raises:
        ConfigError: one of them has another.
    """
    for name, value in FIXED.items():
        if raw.get(name) not in (None, value):
            only = "null" if value is None else repr(value)
            raise ConfigError(f"{name} {quoted(raw[name])} is not supported (only {only})")
    for name, entry in {**EVERY_LAYER, "layer_types": ATTENTION[model_type]}.items():
        _check_entries(name, raw.get(name), entry)


def _check_entries(name: str, value: object, entry: str) -> None:
    if value is None:
        return
    if not isinstance(value, list | str):
        raise ConfigError(f"{name} must have an entry for each layer, not be {quoted(value)}")
    for found in value:
        if found != entry:
            raise ConfigError(f"{name} with the entry {quoted(found)} is not supported (only {entry!r})")
