"""The optimized model as a subject of spcheck (docs/subjects.md)."""

from __future__ import annotations

from optimized.all2all import ALL2ALL_MANAGERS
from optimized.buffers import GraphPadding
from optimized.build_setup import BuildSetup
from optimized.engine import Engine
from optimized.loader import Loader
from optimized.parallel_config import ParallelConfig, resolve_scheme
from optimized.rotary import RotaryTable
from optimized.setup import Setup
from optimized.taps import padding_inputs, taps

__all__ = ["BATCHING", "build", "padding_inputs", "taps"]

BATCHING = "packed"


def build(setup: BuildSetup) -> Engine:
    """One rank's engine with its weights loaded, and those of as many LoRA adapters.

    Raises:
        ValueError: the scheme cannot be, the backend is unknown, or a size cannot be divided over the ranks.
    """
    parallel = _parallel_config(setup)
    active, _ = resolve_scheme(setup.scheme, parallel)
    if setup.all2all_backend not in ALL2ALL_MANAGERS:
        raise ValueError(f"unknown all2all backend {setup.all2all_backend!r} ({', '.join(ALL2ALL_MANAGERS)})")
    groups = setup.groups
    parts = Setup(
        config=setup.config,
        parallel=parallel,
        loader=Loader(setup.weights, setup.dtype, setup.device),
        tp=groups["tp"],
        ep=groups["ep"],
        rotary=RotaryTable(setup.config, setup.dtype, setup.device),
        dp=groups.get("dp"),
        dp_cpu=groups.get("dp_cpu"),
        aux_layers=setup.aux_layers,
        skip_padding=setup.skip_padding,
        lora_adapters=setup.lora_adapters,
    )
    return Engine(parts, active, GraphPadding(setup.pad_to, setup.graph_sizes))


def _parallel_config(setup: BuildSetup) -> ParallelConfig:
    dp = setup.groups.get("dp")
    return ParallelConfig(
        tensor_parallel_size=setup.groups["tp"].size,
        data_parallel_size=dp.size if dp else 1,
        data_parallel_rank=dp.rank if dp else 0,
        enable_expert_parallel=setup.expert_parallel,
        all2all_backend=setup.all2all_backend,
        lora=setup.lora_adapters > 0,
    )
