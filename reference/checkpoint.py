"""Weights by their published names: from safetensors files, or random. The raw tensor reader both subjects use.

Only safetensors is read; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reference.config import ModelConfig
from reference.layout import Shape, adapter_shapes, optional_copies, tensor_shapes
from reference.mistakes import quoted, shown
from reference.model_folder import INDEX, NOT_READ, SINGLE

_TYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


class CheckpointError(ValueError):
    """Weights that cannot be used; the message is one sentence that names the file or tensor."""


class TensorReader(Protocol):
    """Where a model's weights come from."""

    def names(self) -> Collection[str]:
        """The tensors there are."""

    def shape(self, name: str) -> Shape:
        """A tensor's shape, without reading it."""

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type; the caller does not write into it."""


class Checkpoint:
    """``model.safetensors``, or the shards of ``model.safetensors.index.json``, read tensor by tensor.

    Raises:
        CheckpointError: no weights file, a file cut short, an index that points outside the folder or contradicts
            its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        if _is_there(folder / INDEX):
            self._file_of = _read_index(folder / INDEX)
            self._files = {file: _open(folder / file) for file in sorted(set(self._file_of.values()))}
            self._check_index()
        elif _is_there(folder / SINGLE):
            self._files = {SINGLE: _open(folder / SINGLE)}
            self._file_of = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        else:
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{_pickles(folder)}")

    def names(self) -> Collection[str]:
        """The tensors there are."""
        return self._file_of.keys()

    def shape(self, name: str) -> Shape:
        """A tensor's shape, from its file's header.

        Raises:
            CheckpointError: no such tensor, or one of a type that no model here computes with.
        """
        try:
            entry = self._holder(name).get_slice(name)
        except SafetensorError as error:
            raise self._unreadable(name) from error
        if entry.get_dtype() not in _TYPES:
            raise CheckpointError(
                f"{shown(name)} is stored as {entry.get_dtype()}, which is not supported ({', '.join(_TYPES)})"
            )
        return tuple(entry.get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type."""
        try:
            return self._holder(name).get_tensor(name)
        except SafetensorError as error:
            raise self._unreadable(name) from error

    def _holder(self, name: str) -> _File:
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder} has no tensor {shown(name)}")
        return self._files[self._file_of[name]]

    def _unreadable(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self._folder / self._file_of[name]} does not hold the tensor {shown(name)}")

    def _check_index(self) -> None:
        """Of a tensor that is in two files, or in none by the index, readers take this one or that."""
        for file, opened in self._files.items():
            for name in opened.keys():  # noqa: SIM118 - no mapping, it only has this method
                if self._file_of.get(name) != file:
                    other = self._file_of.get(name)
                    says = "does not name" if other is None else f"places in {shown(other)}"
                    raise CheckpointError(
                        f"{self._folder / file} holds the tensor {shown(name)}, which the index {says}"
                    )


def _is_there(path: Path) -> bool:
    """Whether there is a file; a link may lead to it, as a download cache has them."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _pickles(folder: Path) -> str:
    """Says so where there are weights of a kind that is not read: unpickling a file runs what it says."""
    try:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in NOT_READ)
    except OSError:
        return ""
    return f"; {shown(others[0])} is not read, only safetensors is" if others else ""


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _File(Protocol):
    """The part of safetensors' own class used here, which has no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


def _open(path: Path) -> _File:
    if not _is_there(path):  # a pipe, say, would be waited for
        what = "is no plain file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} is named by the index but {what}")
    try:
        path.open("rb").close()  # safetensors reports a file it may not read as missing
        return cast(_File, safe_open(path, framework="pt"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    file_of = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{path} has no weight_map")
    for file in file_of.values():
        # By name, not by resolved path: a download cache keeps its files as links to somewhere else.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise CheckpointError(f"{path} names {quoted(file)}, which is no safetensors file of its folder")
    return file_of


class RandomWeights:
    """Weights of any config by seed, with a spread that makes every part of the model matter.

    Every tensor has a generator of its own, so the order of reading does not matter. The router's are float32, with
    values that bfloat16 cannot hold, all others bfloat16. Tensors are kept once they are made. With ``own_tables`` an
    MTP layer's embedding and head, in a published file copies of the main ones, have values of their own: one that is
    read in the place of the other shows.
    """

    def __init__(self, config: ModelConfig, seed: int, *, own_tables: bool = False) -> None:
        self._shapes = tensor_shapes(config)
        self._copies = {} if own_tables else optional_copies(config)
        self._seed = seed
        self._made: dict[str, Tensor] = {}

    def names(self) -> Collection[str]:
        """Every tensor of the config's layout."""
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        """A tensor's shape."""
        if name not in self._shapes:
            raise CheckpointError(f"the config has no tensor {name}")
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type; made at its first use."""
        name = self._copies.get(name, name)
        if name not in self._made:
            r = torch.randn(self.shape(name), generator=_generator(self._seed, name))
            self._made[name] = _spread(name, r).to(_stored_type(name))
        return self._made[name]


class RandomAdapters(RandomWeights):
    """LoRA adapters ``adapters.0``, ``adapters.1``, ... for any config by seed; lora_alpha / r is 2 and 0.5 in turn."""

    def __init__(self, config: ModelConfig, seed: int, *, rank: int, adapters: int) -> None:
        super().__init__(config, seed)
        shapes = adapter_shapes(config, rank)
        self._shapes = {f"adapters.{i}.{name}": shape for i in range(adapters) for name, shape in shapes.items()}
        scalings = {i: 0.5 if i % 2 else 2.0 for i in range(adapters)}  # not all alike: one may be taken for another
        self._made = {f"adapters.{i}.lora_alpha": torch.tensor([s * rank]) for i, s in scalings.items()}


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def _stored_type(name: str) -> torch.dtype:
    return torch.float32 if ".mlp.gate." in name else torch.bfloat16


def _spread(name: str, r: Tensor) -> Tensor:
    """Standard normal ``r`` scaled for the part that tensor ``name`` plays."""
    if name.endswith("e_score_correction_bias"):
        return 0.03 * r - 1  # negative scores: a dropped group masked with 0 would win; a wide spread starves experts
    if name.endswith(".bias"):
        return 0.2 * r
    if r.ndim == 1:
        return 1 + 0.2 * r
    if name.endswith("embed_tokens.weight"):
        return r
    if name.endswith("lora_B.weight"):
        return r * (0.125 / math.sqrt(r.shape[-1]))  # with lora_alpha / r = 2 an adapter gives a quarter of its matrix
    return r * (1.3 / math.sqrt(r.shape[-1]))


def write_checkpoint(folder: Path, config_json: Mapping[str, object], reader: TensorReader, shards: int = 1) -> None:
    """Writes ``config.json`` and the reader's tensors in the published layout, with an index if ``shards`` > 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
    names = sorted(reader.names())
    if shards == 1:
        _save(folder / SINGLE, names, reader)
        return
    file_of = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(file_of.values())):
        _save(folder / file, [name for name in names if file_of[name] == file], reader)
    size = sum(t.numel() * t.element_size() for t in map(reader.tensor, names))
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(path: Path, names: list[str], reader: TensorReader) -> None:
    # A clone each: the writer refuses tensors that share memory, as the optional copies may.
    save_file({name: reader.tensor(name).clone() for name in names}, path, metadata={"format": "pt"})


def check_tensors(config: ModelConfig, reader: TensorReader) -> None:
    """Compares the reader's tensors with the config's layout.

    The optional copies may be missing. Stored rotary frequencies are passed over, and so are the layers behind
    the last main one if the config has no MTP layer.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or belongs to no part of the model.
    """
    expected, present = tensor_shapes(config), set(reader.names())
    missing = sorted(expected.keys() - optional_copies(config).keys() - present)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    surplus = sorted(name for name in present - expected.keys() if not _passed_over(config, name))
    if surplus:
        raise CheckpointError(f"the config has no place for {_some(surplus)}")
    for name in sorted(expected.keys() & present):
        if (shape := reader.shape(name)) != expected[name]:
            raise CheckpointError(f"{name} has shape {quoted(shape)}, but the config says {expected[name]}")


def _some(names: list[str]) -> str:
    return shown(names[0]) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def _passed_over(config: ModelConfig, name: str) -> bool:
    layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
    beyond = layer is not None and int(layer[1]) >= config.num_hidden_layers
    return name.endswith("rotary_emb.inv_freq") or (beyond and config.num_nextn_predict_layers == 0)
