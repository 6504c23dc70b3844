"""The reference as a subject of spcheck: plain, tensor parallel only, one request at a time, no padding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reference.checkpoint import TensorReader
from reference.config import ModelConfig
from reference.engine import Engine
from reference.load import load_weights
from reference.lora import load_adapters
from reference.parallel import Communicator
from reference.taps import Tap, all_taps

BATCHING = "request"


def build(
    config: ModelConfig,
    weights: TensorReader,
    groups: Mapping[str, Communicator],
    *,
    dtype: torch.dtype,
    device: torch.device,
    scheme: str = "reference",
    aux_layers: tuple[int, ...] = (),
    pad_to: int | None = None,
    graph_sizes: tuple[int, ...] = (),
    skip_padding: bool = False,
    expert_parallel: bool = False,
    all2all_backend: str = "",
    lora_adapters: int = 0,
) -> Engine:
    """The engine with its weights loaded.

    There is one dataflow, no padding rows and no expert parallelism, so what is set for these changes nothing.
    With ``lora_adapters`` the reader has the tensors of as many adapters, too.

    Raises:
        ValueError: the tensor-parallel size does not divide a size that is split, or an auxiliary layer does not exist.
        CheckpointError: a tensor is missing or has another shape.
    """
    tp = groups["tp"]
    _check_divisible(config, tp.size)
    for layer in aux_layers:
        if not 0 <= layer <= config.num_hidden_layers:
            raise ValueError(f"auxiliary layer {layer} is not in 0 .. {config.num_hidden_layers}")
    engine = Engine(config, tp, aux_layers, lora_adapters)
    load_weights(engine, config, weights, dtype=dtype, device=device)
    load_adapters(engine, engine.active_adapter, config, weights, dtype=dtype, device=device)
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
