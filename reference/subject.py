"""The reference as a subject of spcheck: plain, tensor parallel only, one request at a time, no padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from reference.checkpoint import TensorReader
from reference.config import ModelConfig
from reference.engine import Engine
from reference.load import load_weights
from reference.lora import load_adapters
from reference.parallel import Communicator
from reference.taps import Tap, all_taps

BATCHING = "request"


class Setup(Protocol):
    """What is read of the object that an engine is built from."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""

    @property
    def weights(self) -> TensorReader:
        """The checkpoint, and the tensors of ``lora_adapters`` adapters."""

    @property
    def groups(self) -> Mapping[str, Communicator]:
        """``tp``: the ranks that share the model."""

    @property
    def dtype(self) -> torch.dtype:
        """The working type."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input is kept."""

    @property
    def lora_adapters(self) -> int:
        """How many adapters there are."""


def build(setup: Setup) -> Engine:
    """The engine with its weights loaded.

    There is one dataflow, no padding rows and no expert parallelism, so nothing is read that is set for these.

    Raises:
        ValueError: the tensor-parallel size does not divide a size that is split, or an auxiliary layer does not exist.
        CheckpointError: a tensor is missing or has another shape.
    """
    config, tp = setup.config, setup.groups["tp"]
    _check_divisible(config, tp.size)
    for layer in setup.aux_layers:
        if not 0 <= layer <= config.num_hidden_layers:
            raise ValueError(f"auxiliary layer {layer} is not in 0 .. {config.num_hidden_layers}")
    engine = Engine(config, tp, setup.aux_layers, setup.lora_adapters)
    load_weights(engine, config, setup.weights, dtype=setup.dtype, device=setup.device)
    load_adapters(engine, engine.active_adapter, config, setup.weights, dtype=setup.dtype, device=setup.device)
    return engine


def taps(
    config: ModelConfig, *, scheme: str = "reference", aux_layers: tuple[int, ...] = (), expert_parallel: bool = False
) -> dict[str, Tap]:
    """Probe name -> where its value stands."""
    return all_taps(config, aux_layers)


def padding_inputs(config: ModelConfig) -> list[tuple[str, str, int]]:
    """Where padding rows enter: nowhere."""
    return []


def _check_divisible(config: ModelConfig, tp: int) -> None:
    for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
        if getattr(config, name) % tp:
            raise ValueError(f"tensor-parallel size {tp} does not divide {name} {getattr(config, name)}")
