"""The rotary settings of a published ``config.json``, in either spelling. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def rope_settings(raw: Mapping[str, Any]) -> dict[str, object]:
    """``rope_theta`` and ``yarn`` from either spelling: flat keys with ``rope_scaling``, or ``rope_parameters``.

    Raises:
        ConfigError: another type of stretch than YaRN, or numbers that cannot be.
    """
    name = next((n for n in ("rope_parameters", "rope_scaling") if raw.get(n) is not None), "rope_scaling")
    block = raw.get(name)
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise ConfigError(f"{name} must be an object, not {quoted(block)}")
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in ("yarn", "default"):
        raise ConfigError(f"{name} type {quoted(kind)} is not supported (default, yarn)")
    out: dict[str, object] = {} if kind == "default" else {"yarn": _yarn(block, name)}
    return out | _theta(raw, block, name)


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
