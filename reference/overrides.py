"""Settings of a user's own, put into the object of a ``config.json`` before it is parsed. No torch is imported here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from reference.config_keys import REPEATED, ROPE_BLOCKS, checked_keys, is_harmless
from reference.mistakes import ConfigError, quoted
from reference.rope_config import BLOCK_KEYS


def override(raw: Mapping[str, Any], overrides: Mapping[str, object], fields: Collection[str]) -> dict[str, Any]:
    """``raw`` with each override in its place; ``fields`` are the keys that the models read.

    ``rope_scaling.factor`` is the key ``factor`` of the block ``rope_scaling``, which is made where the file has no
    rotary settings. A key that says again what an overridden one says is left out, unless it is overridden as well.

    Raises:
        ConfigError: no such key, one that changes nothing, or a block in the spelling that the file does not use.
    """
    out = dict(raw)
    for path, value in overrides.items():
        _check_path(path, fields)
        block, _, key = path.partition(".")
        if block in ROPE_BLOCKS:
            _check_spelling(out, block, path)
        out[block] = {**_block(out, block), key: value} if key else value
        _drop_repeated(out, path, overrides)
    return out


def _check_path(path: str, fields: Collection[str]) -> None:
    nested = {f"{block}.{key}" for block in ROPE_BLOCKS for key in BLOCK_KEYS}
    settable = checked_keys(fields) | nested
    if path in settable:
        return
    if is_harmless(path):
        raise ConfigError(f"config key {quoted(path)} cannot be set: it changes nothing that is computed")
    close = get_close_matches(path, sorted(settable), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"unknown config key {quoted(path)}{hint}")


def _check_spelling(raw: Mapping[str, Any], block: str, path: str) -> None:
    """Of two spellings of one block a file has one; set beside it, the other would be passed over or contradict it."""
    (other,) = (name for name in ROPE_BLOCKS if name != block)
    if raw.get(block) is None and raw.get(other) is not None:
        raise ConfigError(f"{path} cannot be set: this config's rotary settings are in {other}")


def _block(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = raw.get(name)
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise ConfigError(f"{name} must be an object, not {quoted(block)}")
    return block


def _drop_repeated(raw: dict[str, Any], path: str, overrides: Mapping[str, object]) -> None:
    for name, sources in REPEATED.items():
        if path in sources and name not in overrides:
            raw.pop(name, None)
    if path == "rope_theta":
        _drop_theta_of_blocks(raw, overrides)
    elif "rope_theta" not in overrides and _sets_theta(raw, path):
        raw.pop("rope_theta", None)


def _sets_theta(raw: Mapping[str, Any], path: str) -> bool:
    """Whether an override has just put a rope_theta into a block."""
    block, _, key = path.partition(".")
    if block not in ROPE_BLOCKS or key not in ("", "rope_theta"):
        return False
    return _block(raw, block).get("rope_theta") is not None


def _drop_theta_of_blocks(raw: dict[str, Any], overrides: Mapping[str, object]) -> None:
    for name in ROPE_BLOCKS:
        block = raw.get(name)
        if isinstance(block, dict) and f"{name}.rope_theta" not in overrides:
            raw[name] = {key: value for key, value in block.items() if key != "rope_theta"}
