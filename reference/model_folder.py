"""What lies in a model's folder: ``config.json``, and files of weights by their names. No torch is imported here."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from reference.mistakes import ConfigError, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

NOT_READ = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml", ".h5", ".hdf5", ".keras"),
    *(".msgpack", ".npy", ".npz", ".onnx", ".ot", ".pdparams", ".tflite", ".distcp", ".nemo"),
)
"""Endings of files of weights that no reader here opens; unpickling some of them would run what they say."""


def read_config(path: Path) -> object:
    """What a config file holds: ``path`` itself, or the ``config.json`` of the folder ``path``.

    Raises:
        ConfigError: no such file, or no JSON.
    """
    is_folder = os.path.isdir(path)
    file = path / "config.json" if is_folder else path
    try:
        if not file.is_file():
            raise ConfigError(f"{path} has no readable config.json" if is_folder else f"{path} is no readable file")
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=partial(_without_twins, file.name))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except ValueError as error:  # Python reads no whole number of so many digits
        raise ConfigError(f"{file} holds a whole number of too many digits") from error


def _without_twins(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that stands there twice, readers take the one or the other."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{file} has the key {shown(twin)} twice")
    return out


def holds_weights(folder: Path) -> bool:
    """Whether a file of the folder has the name of weights or of their index, whole or not, readable or not.

    Raises:
        ConfigError: the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    return any(_is_weights(name) for name in names)


def _is_weights(name: str) -> bool:
    """``model.safetensors``, ``model-00001-of-00002.safetensors.part``, ``pytorch_model.bin.index.json``."""
    endings = {f".{word}" for word in name.lower().split(".")[1:]}
    return not endings.isdisjoint((".safetensors", *NOT_READ))
