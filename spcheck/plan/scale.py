"""A published config's sizes made small, for random weights. Pure functions of plain data; no torch.

The structure stays: which layers are dense, how many groups of experts are kept, how many experts a token has, MTP
layers, rotary settings, factors and epsilons. The small sizes all differ from each other, as far as they may, so that
one that is taken for another shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

_DENSE_LAYERS = 3  # before the first MoE layer, at most
_MOE_LAYERS = 3  # where every layer behind them has experts; else two, and a dense one behind them
_EXPERTS = 24  # at least, where there are as many
_VOCABULARY = 251  # a prime, so that ranks never divide it

_PLAIN = {
    "hidden_size": 96,
    "q_lora_rank": 44,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "index_n_heads": 20,  # with under 16, scores of exactly 0 tie
    "index_head_dim": 28,
    "index_topk": 7,
}
"""Sizes that no rank divides, and how large they may be."""

_DIVIDED = {"num_attention_heads": 12, "intermediate_size": 144}
"""Sizes that are divided over the tensor-parallel ranks."""

_EXPERT_WIDTH = 48  # divided over all ranks where there is no expert parallelism


@dataclass(frozen=True)
class Change:
    """A key of the config, and its value before and after."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {_short(self.before)} -> {_short(self.after)}"


def _short(value: object) -> str:
    return f"of {len(value)} layers" if isinstance(value, list) else str(value)


def tiny(raw: Mapping[str, Any], tp: int, dp: int) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """The config with small sizes that ``dp * tp`` ranks divide, and what was changed, in the order of the file.

    What is no positive whole number stays as it is: to say so is up to who parses the result.
    """
    out = dict(raw)
    sizes = _layers(raw) | _experts(raw, tp * dp) | _vocabulary(raw, tp)
    sizes |= {key: min(_count(raw, key), most) for key, most in _PLAIN.items()}
    sizes |= {key: _multiple(min(_count(raw, key), most), tp) for key, most in _DIVIDED.items()}
    sizes["moe_intermediate_size"] = _multiple(min(_count(raw, "moe_intermediate_size"), _EXPERT_WIDTH), tp * dp)
    out |= {key: size for key, size in sizes.items() if _count(raw, key)}
    out |= _repeated(raw, out)
    changes = [Change(key, value, out[key]) for key, value in raw.items() if out[key] != value]
    return out, tuple(changes)


def _count(raw: Mapping[str, Any], key: str) -> int:
    """A positive whole number of the file, else 0."""
    value = raw.get(key)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return int(value) if is_count and value is not None else 0


def _multiple(number: int, of: int) -> int:
    """The smallest multiple that is not less."""
    return -(-number // of) * of


def _layers(raw: Mapping[str, Any]) -> dict[str, int]:
    """Dense layers, MoE layers behind them, and a dense one at the end where the two kinds alternate."""
    layers, dense = _count(raw, "num_hidden_layers"), _count(raw, "first_k_dense_replace")
    every = _count(raw, "moe_layer_freq") or 1
    kept = min(dense, _DENSE_LAYERS)
    if dense >= layers:
        return {"num_hidden_layers": min(layers, kept), "first_k_dense_replace": kept}
    first = _multiple(kept, every)
    last = first + (_MOE_LAYERS if every == 1 else every + 2)
    return {"num_hidden_layers": min(layers, last), "first_k_dense_replace": kept}


def _experts(raw: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """A number that ranks and groups divide, with more experts in the kept groups than a token has."""
    experts, chosen = _count(raw, "n_routed_experts"), _count(raw, "num_experts_per_tok")
    groups, kept = _count(raw, "n_group") or 1, _count(raw, "topk_group") or 1
    if experts % groups or kept > groups or chosen > kept * (experts // groups):
        return {}
    per_group = max(chosen // kept + 1, 2 if groups > 1 else 1)
    least = max(per_group * groups, min(experts, _EXPERTS))
    if experts <= least and experts % ranks == 0:
        return {}
    return {"n_routed_experts": _multiple(least, lcm(groups, ranks))}


def _vocabulary(raw: Mapping[str, Any], tp: int) -> dict[str, int]:
    """Small, and not divided by the tensor-parallel ranks: the last of them has a padded part."""
    size = min(_count(raw, "vocab_size"), _VOCABULARY)
    return {"vocab_size": size - 1 if tp > 1 and size > tp and size % tp == 0 else size}


def _repeated(raw: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that say again what others say: of the small sizes, where the file did not contradict itself."""
    before, after = _repeats(raw), _repeats(small)
    return {key: after[key] for key, value in before.items() if key in raw and raw[key] == value}


def _repeats(config: Mapping[str, Any]) -> dict[str, Any]:
    every = _count(config, "moe_layer_freq") or 1
    dense = _count(config, "first_k_dense_replace")
    layers = range(min(_count(config, "num_hidden_layers"), 1000))
    return {
        "num_key_value_heads": config.get("num_attention_heads"),
        "num_local_experts": config.get("n_routed_experts"),
        "qk_head_dim": _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim"),
        "mlp_layer_types": ["sparse" if i >= dense and i % every == 0 else "dense" for i in layers],
    }
