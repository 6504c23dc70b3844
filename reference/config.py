"""The model's sizes, read from a published ``config.json``. No torch is imported here.

The comments name the symbols that the models use for the sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.config_keys import QUANTIZATION, check_fixed, check_known
from reference.mistakes import ConfigError, quoted
from reference.model_folder import holds_weights, read_config
from reference.overrides import override
from reference.rope_config import YarnConfig, rope_settings

__all__ = [
    "ConfigError",
    "ModelConfig",
    "YarnConfig",
    "holds_weights",
    "load_config",
    "parse_config",
    "read_config",
]

_LARGEST = 2**31 - 1  # what indices of 32 bits can count
_MOST = {"num_hidden_layers": 1000, "num_nextn_predict_layers": 1000, "n_routed_experts": 10_000}  # each has a name
_MOST_EXPERTS = 200_000  # of all layers
_LARGEST_FLOAT = 1e30  # what float32 holds, with room for a product

_SAME_MODEL = {"kimi_k2": "deepseek_v3"}  # another name for the same architecture, as its file says
SUPPORTED_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", *_SAME_MODEL)


@dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek V3 or V3.2 model, by its published key names.

    ``index_topk`` is None for a model without the lightning indexer (V3). The last block holds settings that
    published files do not have: choices that sources make differently.
    """

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # N, without the MTP layers
    first_k_dense_replace: int  # N0: layers below it are dense
    intermediate_size: int  # F, the dense MLP's width
    moe_intermediate_size: int  # Fe, one expert's width
    num_attention_heads: int  # H
    q_lora_rank: int  # rq
    kv_lora_rank: int  # rk
    qk_nope_head_dim: int  # dn
    qk_rope_head_dim: int  # dr
    v_head_dim: int  # dv
    n_routed_experts: int  # E
    num_experts_per_tok: int  # K
    n_shared_experts: int = 1  # Es
    n_group: int = 1  # G
    topk_group: int = 1  # Gk
    routed_scaling_factor: float = 1.0  # gamma
    norm_topk_prob: bool = True
    moe_layer_freq: int = 1
    index_n_heads: int | None = None  # Hi
    index_head_dim: int | None = None  # di
    index_topk: int | None = None  # k
    rms_norm_eps: float = 1e-6  # epsilon
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None
    num_nextn_predict_layers: int = 0

    latent_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm; engines use rms_norm_eps instead
    fused_eh_norm: bool = False  # an engine may run the MTP layer's two input norms as one kernel
    mtp_zero_first_embedding: bool = False  # vLLM zeroes the MTP embedding at position 0

    @property
    def has_indexer(self) -> bool:
        """Whether attention keeps only the ``index_topk`` best keys of each query."""
        return self.index_topk is not None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` has experts; MTP layers (``layer >= num_hidden_layers``) always do."""
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def mtp_layers(self) -> range:
        """Indices of the MTP layers: they follow the main layers in the checkpoint."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)


_INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")
_FIELDS = {field.name: field for field in dataclasses.fields(ModelConfig)}
_READ = _FIELDS.keys() - {"yarn"}  # keys of a file; YaRN's stand in a block


def load_config(folder: Path) -> ModelConfig:
    """The config of ``folder/config.json``.

    Raises:
        ConfigError: as of :func:`read_config` and :func:`parse_config`.
    """
    return parse_config(read_config(folder))


def parse_config(raw: object, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """Makes a config of a published file's object; harmless keys are passed over (:mod:`reference.config_keys`).

    ``overrides`` are put into the object first. They name keys of the file, the settings that published files do not
    have, or with a dot a key of the rotary settings, ``rope_scaling.factor``.

    Raises:
        ConfigError: a key is missing, is not known, has another type, or contradicts another.
    """
    if not isinstance(raw, dict):
        raise ConfigError("config.json must hold one JSON object")
    own = override(raw, overrides or {}, _READ)
    kind = _model_type(own, overrides or {})
    check_known(own, _READ)
    values = {name: own[name] for name in _READ if name in own}
    values |= rope_settings(own) | {"model_type": kind}
    if kind == "deepseek_v3":
        values |= dict.fromkeys(_INDEXER_KEYS)
    missing = [n for n, f in _FIELDS.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"config lacks {', '.join(missing)}")
    typed: dict[str, Any] = {name: _typed(name, value) for name, value in values.items()}
    config = ModelConfig(**typed)
    _check(config, own)
    return config


def _model_type(raw: Mapping[str, Any], overrides: Mapping[str, object]) -> str:
    """What the model is run as. Before all else: a config of another kind of model lacks keys, and has others."""
    if "model_type" not in raw:
        raise ConfigError("config lacks model_type")
    kind = raw["model_type"]
    if kind not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"model_type {quoted(kind)} is not supported ({', '.join(SUPPORTED_MODEL_TYPES)})")
    run_as = _SAME_MODEL.get(kind, str(kind))
    if run_as == "deepseek_v3" and (set_keys := [k for k in _INDEXER_KEYS if overrides.get(k) is not None]):
        raise ConfigError(f"{set_keys[0]} cannot be set: model_type {kind} has no indexer")
    return run_as


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_FLOAT


def _typed(name: str, value: object) -> Any:
    """The value in the field's type; an int may stand for a float, nothing else is converted."""
    kind = str(_FIELDS[name].type)
    if value is None and "None" in kind:
        return value
    wanted = kind.split(" | ")[0]
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_FLOAT:
        return float(value)
    if type(value).__name__ != wanted:
        raise ConfigError(f"{name} must be {wanted}, not {quoted(value)}")
    return value


def _check(c: ModelConfig, raw: Mapping[str, Any]) -> None:
    if raw.get(QUANTIZATION) is not None:
        raise ConfigError(f"quantized checkpoints are not supported yet ({QUANTIZATION} is set)")
    check_fixed(raw, c.model_type)
    _check_sizes(c)
    _check_numbers(c)
    _check_router(c)
    _check_indexer(c)
    _check_repeated(c, raw)


def _check_sizes(c: ModelConfig) -> None:
    may_be_zero = {"first_k_dense_replace", "num_nextn_predict_layers", "lora_rank"}
    for name in _FIELDS:
        value = getattr(c, name)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if value < (0 if name in may_be_zero else 1):
            raise ConfigError(f"{name} must be {'0 or more' if name in may_be_zero else 'positive'}, not {value}")
        if value > (most := _MOST.get(name, _LARGEST)):
            raise ConfigError(f"{name} must be at most {most}, not {quoted(value)}")
    if c.first_k_dense_replace > c.num_hidden_layers:
        raise ConfigError(
            f"first_k_dense_replace {c.first_k_dense_replace} is more than num_hidden_layers {c.num_hidden_layers}"
        )
    if c.qk_rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim must be even, not {c.qk_rope_head_dim}")


def _check_numbers(c: ModelConfig) -> None:
    for name in ("rms_norm_eps", "latent_norm_eps", "rope_theta", "routed_scaling_factor"):
        value = getattr(c, name)
        if not 0 < value <= _LARGEST_FLOAT:
            kind = f"at most {_LARGEST_FLOAT:g}" if value > 0 else "positive"
            raise ConfigError(f"{name} must be {kind}, not {value}")
    if c.rope_theta <= 1:
        raise ConfigError(f"rope_theta must be more than 1, not {c.rope_theta}")


def _check_repeated(c: ModelConfig, raw: Mapping[str, Any]) -> None:
    """Keys of a file that say again what others say."""
    kinds = ["sparse" if c.is_moe_layer(i) else "dense" for i in range(c.num_hidden_layers)]
    if raw.get("mlp_layer_types") not in (None, kinds):
        raise ConfigError("mlp_layer_types contradicts first_k_dense_replace and moe_layer_freq")
    repeated = {
        "num_key_value_heads": ("num_attention_heads", c.num_attention_heads),
        "num_local_experts": ("n_routed_experts", c.n_routed_experts),
        "qk_head_dim": ("qk_nope_head_dim + qk_rope_head_dim", c.qk_nope_head_dim + c.qk_rope_head_dim),
    }
    for name, (source, value) in repeated.items():
        if raw.get(name) not in (None, value):
            raise ConfigError(f"{name} {quoted(raw[name])} contradicts {source} {value}")


def _check_router(c: ModelConfig) -> None:
    if c.n_routed_experts % c.n_group:
        raise ConfigError(f"n_group {c.n_group} does not divide n_routed_experts {c.n_routed_experts}")
    if c.num_hidden_layers * c.n_routed_experts > _MOST_EXPERTS:
        raise ConfigError(
            f"n_routed_experts {c.n_routed_experts} in {c.num_hidden_layers} layers are more than {_MOST_EXPERTS}"
        )
    per_group = c.n_routed_experts // c.n_group
    if c.n_group > 1 and per_group < 2:
        raise ConfigError("an expert group needs at least 2 experts: its score is the sum of its two best")
    if c.topk_group > c.n_group:
        raise ConfigError(f"topk_group {c.topk_group} is more than n_group {c.n_group}")
    if c.num_experts_per_tok > c.topk_group * per_group:
        raise ConfigError(
            f"num_experts_per_tok {c.num_experts_per_tok} is more than the {c.topk_group * per_group} experts "
            "of the kept groups"
        )


def _check_indexer(c: ModelConfig) -> None:
    keys = {name: getattr(c, name) for name in _INDEXER_KEYS}
    given = [name for name, value in keys.items() if value is not None]
    if given and len(given) < len(keys):
        raise ConfigError(f"an indexer needs {', '.join(keys)}; only {', '.join(given)} given")
    if c.model_type == "deepseek_v32" and not given:
        raise ConfigError("model_type deepseek_v32 needs index_n_heads, index_head_dim and index_topk")
    if c.index_head_dim is not None and c.index_head_dim < c.qk_rope_head_dim:
        raise ConfigError(f"index_head_dim {c.index_head_dim} is less than qk_rope_head_dim {c.qk_rope_head_dim}")
