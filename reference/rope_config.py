"""The rotary settings of a published ``config.json``, in either spelling. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference.config_keys import ROPE_BLOCKS
from reference.mistakes import ConfigError, quoted


@dataclass(frozen=True)
class YarnConfig:
    """YaRN's stretch of the rotary frequencies (``rope_scaling`` or ``rope_parameters`` of the file)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


# Least and most of each number: far around every published model, and inside what the formulas give finite results for.
_LIMITS: dict[str, tuple[float, float]] = {
    "factor": (1, 1e6),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3),
}

# Keys of which one value is implemented: limits of the ramp are whole pairs, and all of a head's rotary part turns.
_FIXED: dict[str, object] = {"truncate": True, "partial_rotary_factor": 1.0}

BLOCK_KEYS = ("type", "rope_type", "rope_theta", *_LIMITS, *_FIXED)
"""The keys of a block of rotary settings."""


def rope_settings(raw: Mapping[str, Any]) -> dict[str, object]:
    """``rope_theta`` and ``yarn`` from either spelling: flat keys with ``rope_scaling``, or ``rope_parameters``.

    Raises:
        ConfigError: another type of stretch than YaRN, a key that is not known, numbers that cannot be, or two blocks
            that contradict each other.
    """
    found = {name: raw[name] for name in ROPE_BLOCKS if raw.get(name) is not None}
    settings = [_settings(raw, block, name) for name, block in found.items()]
    if len(settings) == len(ROPE_BLOCKS) and settings[0].get("yarn") != settings[1].get("yarn"):
        raise ConfigError(" contradicts ".join(ROPE_BLOCKS))
    return {key: value for part in settings for key, value in part.items()}


def _settings(raw: Mapping[str, Any], block: object, name: str) -> dict[str, object]:
    if not isinstance(block, dict):
        raise ConfigError(f"{name} must be an object, not {quoted(block)}")
    kinds = {key: block[key] for key in ("rope_type", "type") if block.get(key) is not None}
    kind = next(iter(kinds.values()), "default")
    if any(other != kind for other in kinds.values()):
        raise ConfigError(f"rope_type {quoted(kind)} of {name} contradicts type {quoted(block['type'])}")
    if kind not in ("yarn", "default"):
        raise ConfigError(f"{name} type {quoted(kind)} is not supported (default, yarn)")
    _check_keys(block, name)
    if kind == "yarn":
        return {"yarn": _yarn(block, name)} | _theta(raw, block, name)
    if unused := [key for key in _LIMITS if block.get(key) is not None]:
        raise ConfigError(f"{unused[0]} of {name} is for the type yarn, and the type is {kind}")
    return _theta(raw, block, name)


def _check_keys(block: Mapping[str, Any], name: str) -> None:
    for key, value in block.items():
        if value is not None and key not in BLOCK_KEYS:
            raise ConfigError(f"{name} has the unknown key {quoted(key)}, which may change the model")
    for key, only in _FIXED.items():
        if block.get(key) not in (None, only):
            raise ConfigError(f"{key} {quoted(block[key])} of {name} is not supported (only {only!r})")


def _theta(raw: Mapping[str, Any], block: Mapping[str, Any], name: str) -> dict[str, object]:
    if block.get("rope_theta") is None:
        return {}
    flat = raw.get("rope_theta")
    if flat is not None and flat != block["rope_theta"]:
        raise ConfigError(f"rope_theta {quoted(flat)} contradicts rope_theta {quoted(block['rope_theta'])} of {name}")
    return {"rope_theta": block["rope_theta"]}


def _yarn(block: Mapping[str, Any], block_name: str) -> YarnConfig:
    values = {name: block[name] for name in _LIMITS if block.get(name) is not None}
    for name, value in values.items():
        _check_number(name, value, block_name)
    if not values.keys() >= {"factor", "original_max_position_embeddings"}:
        raise ConfigError(f"{block_name} of type yarn needs factor and original_max_position_embeddings")
    yarn = YarnConfig(**values)
    if yarn.beta_fast < yarn.beta_slow:
        raise ConfigError(f"beta_fast {yarn.beta_fast} of {block_name} is less than beta_slow {yarn.beta_slow}")
    return yarn


def _check_number(name: str, value: Any, block_name: str) -> None:
    whole = name == "original_max_position_embeddings"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{name} of {block_name} must be a {kind}, not {quoted(value)}")
    least, most = _LIMITS[name]
    if value <= 0 < least:
        raise ConfigError(f"{name} of {block_name} must be positive, not {quoted(value)}")
    if not least <= value <= most:  # not a number is in no range
        raise ConfigError(f"{name} of {block_name} must be from {least:g} to {most:g}, not {quoted(value)}")
