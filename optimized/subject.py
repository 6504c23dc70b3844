"""The optimized model as a subject of spcheck (docs/subjects.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from optimized.communicator import Communicator
from optimized.engine import Engine
from optimized.loader import Loader
from optimized.parallel_config import ParallelConfig, resolve_scheme
from optimized.rotary import RotaryTable
from optimized.setup import Setup
from optimized.taps import padding_inputs, taps
from reference.config import ModelConfig

if TYPE_CHECKING:
    from reference.checkpoint import TensorReader

__all__ = ["BATCHING", "build", "padding_inputs", "taps"]

BATCHING = "packed"


def build(
    config: ModelConfig,
    weights: TensorReader,
    groups: Mapping[str, Communicator],
    *,
    dtype: torch.dtype,
    device: torch.device,
    scheme: str,
    aux_layers: tuple[int, ...],
    pad_to: int | None,
    skip_padding: bool,
    lora_adapters: int = 0,
) -> Engine:
    """One rank's engine with its weights loaded, and those of as many LoRA adapters.

    Raises:
        ValueError: the scheme cannot be, or a size cannot be divided over the ranks.
    """
    tp, ep = groups["tp"], groups["ep"]
    parallel = ParallelConfig(
        tensor_parallel_size=tp.size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        lora=config.lora_rank > 0 or lora_adapters > 0,
    )
    active, _ = resolve_scheme(scheme, parallel)
    loader, rotary = Loader(weights, dtype, device), RotaryTable(config, dtype, device)
    setup = Setup(config, parallel, loader, tp, ep, rotary, aux_layers, skip_padding, lora_adapters=lora_adapters)
    return Engine(setup, active, pad_to)
