"""The optimized model as a subject of spcheck (docs/subjects.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from optimized.all2all import ALL2ALL_MANAGERS
from optimized.buffers import GraphPadding
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
    graph_sizes: tuple[int, ...],
    skip_padding: bool,
    expert_parallel: bool,
    all2all_backend: str,
    lora_adapters: int,
) -> Engine:
    """One rank's engine with its weights loaded, and those of as many LoRA adapters.

    ``groups``: ``tp``, ``ep`` (the world), and with data parallelism ``dp`` and ``dp_cpu`` (docs/subjects.md).

    Raises:
        ValueError: the scheme cannot be, the backend is unknown, or a size cannot be divided over the ranks.
    """
    tp, ep, dp = groups["tp"], groups["ep"], groups.get("dp")
    parallel = ParallelConfig(
        tensor_parallel_size=tp.size,
        data_parallel_size=dp.size if dp else 1,
        data_parallel_rank=dp.rank if dp else 0,
        enable_expert_parallel=expert_parallel,
        all2all_backend=all2all_backend,
        lora=lora_adapters > 0,
    )
    active, _ = resolve_scheme(scheme, parallel)
    if all2all_backend not in ALL2ALL_MANAGERS:
        raise ValueError(f"unknown all2all backend {all2all_backend!r} ({', '.join(ALL2ALL_MANAGERS)})")
    loader, rotary = Loader(weights, dtype, device), RotaryTable(config, dtype, device)
    dp_cpu = groups.get("dp_cpu")
    setup = Setup(config, parallel, loader, tp, ep, rotary, dp, dp_cpu, aux_layers, skip_padding, lora_adapters)
    return Engine(setup, active, GraphPadding(pad_to, graph_sizes))
