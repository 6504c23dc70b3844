"""The model of a case: its config with the user's scale and settings, and where its weights come from. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from reference.config import ConfigError, ModelConfig, holds_weights, parse_config, read_config
from spcheck.case import Case
from spcheck.errors import UsageError
from spcheck.plan.scale import Change, tiny

_QUANTIZATION = "quantization_config"


@dataclass(frozen=True)
class Model:
    """What a case runs. ``folder`` holds the weights; None: they are random, by the case's seed.

    ``named`` is whether the user gave a config of one's own, and no preset. ``scaled`` is what ``--scale`` changed.
    """

    config: ModelConfig
    folder: Path | None
    named: bool
    scaled: tuple[Change, ...] = ()
    ignores_quantization: bool = False


def preset_names() -> list[str]:
    """The models that come with spcheck."""
    files = _presets().iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def load_model(case: Case) -> ModelConfig:
    """The config alone.

    Raises:
        UsageError: as of :func:`open_model`.
    """
    return open_model(case).config


def open_model(case: Case) -> Model:
    """The model of the case's preset, config file or folder: scaled first, then with the user's settings.

    Raises:
        UsageError: no such preset, file or folder, or a config that cannot be run.
    """
    is_preset = case.model in preset_names()
    try:
        raw = _preset(case.model) if is_preset else read_config(_path(case.model))
        folder = None if is_preset else _weights_folder(Path(case.model))
    except ConfigError as error:
        raise UsageError(str(error)) from error
    _check_overrides(case)
    raw, scaled = _scaled(raw, case, folder)
    settings = dict(case.overrides)
    raw, ignored = (raw, False) if folder is not None else _without_quantization(raw, settings)
    try:
        config = parse_config(raw, settings)
    except ConfigError as error:
        raise UsageError(f"{case.model}: {error}") from error
    return Model(config, folder, not is_preset, scaled, ignored)


def _presets() -> Traversable:
    return resources.files("spcheck").joinpath("families", "deepseek", "presets")


def _preset(name: str) -> object:
    return json.loads(_presets().joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _path(model: str) -> Path:
    """Unlike methods of Path, those of os say no where they may not look."""
    is_file = model.endswith(".json") and os.path.exists(model)
    if not model or not (is_file or os.path.isdir(model)):
        presets = ", ".join(preset_names())
        raise UsageError(f"--model {model} is neither a preset ({presets}) nor a folder nor a .json file")
    return Path(model)


def _weights_folder(path: Path) -> Path | None:
    """The folder, if it has weights; None for a config alone, whose weights are random."""
    return path if os.path.isdir(path) and holds_weights(path) else None


def _scaled(raw: object, case: Case, folder: Path | None) -> tuple[object, tuple[Change, ...]]:
    if case.scale == "full" or not isinstance(raw, dict):
        return raw, ()
    if folder is not None:
        raise UsageError(
            f"--scale {case.scale} is for random weights, and {folder} holds weights: give its config.json alone"
        )
    return tiny(raw, case.tp, case.dp)


def _without_quantization(raw: object, settings: dict[str, Any]) -> tuple[object, bool]:
    """Random weights are not quantised: what the file, or the user, says of it is left out; whether there was any."""
    if not isinstance(raw, dict):
        return raw, False
    said = settings.pop(_QUANTIZATION, raw.get(_QUANTIZATION))
    return {key: value for key, value in raw.items() if key != _QUANTIZATION}, said is not None


def _check_overrides(case: Case) -> None:
    names = [name for name, _ in case.overrides]
    if twins := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--set {twins[0]} is given {names.count(twins[0])} times")
