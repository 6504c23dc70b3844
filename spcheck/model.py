"""The model of a case: a preset or a checkpoint folder, with the user's overrides. No torch."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

from reference.config import ConfigError, ModelConfig, parse_config, read_config
from spcheck.case import Case
from spcheck.errors import UsageError


def preset_names() -> list[str]:
    """The models that come with spcheck."""
    files = resources.files("spcheck").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def load_model(case: Case) -> ModelConfig:
    """The config of the case's preset or folder, overrides applied.

    Raises:
        UsageError: no such preset or folder, or a config that cannot be run.
    """
    try:
        raw = _raw_config(case.model)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    _check_overrides(case)
    try:
        return parse_config(raw, dict(case.overrides))
    except ConfigError as error:
        raise UsageError(f"{case.model}: {error}") from error


def _raw_config(model: str) -> object:
    if model in preset_names():
        return json.loads(resources.files("spcheck").joinpath("presets", f"{model}.json").read_text(encoding="utf-8"))
    folder = Path(model)
    if not model or not os.path.isdir(folder):  # unlike Path.is_dir it says no where it may not look
        raise UsageError(f"--model {model} is neither a preset ({', '.join(preset_names())}) nor a folder")
    return read_config(folder)


def _check_overrides(case: Case) -> None:
    names = [name for name, _ in case.overrides]
    if twins := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--set {twins[0]} is given {names.count(twins[0])} times")
