"""LoRA adapters: what a request's adapter adds to the projections of the main layers.

y = W x + s B (A x), s = lora_alpha / r, for rows of a request with an adapter; y = W x for the others. Of a
column-parallel projection a rank has its rows of B, of a row-parallel one its columns of A, and the other matrix
whole: what is added is then part of what the rank computes anyway, and no collective is needed.

r  rank of the adapter      x, y  inputs and outputs of the projection, on this rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.checkpoint import CheckpointError, TensorReader
from reference.config import ModelConfig
from reference.layers import Linear
from reference.layout import adapted_modules, adapter_shapes
from reference.parallel import ColumnParallelLinear, RowParallelLinear


@dataclass
class ActiveAdapter:
    """Which of ``count`` adapters the forward in progress uses, None for none.

    Set by the engine, read by every adapted projection.
    """

    count: int
    number: int | None = None

    def checked(self, number: int | None) -> int | None:
        """The number of an adapter that exists, None for None and -1.

        Raises:
            ValueError: there is no such adapter.
        """
        if number is None or number == -1:
            return None
        if not 0 <= number < self.count:
            raise ValueError(f"adapter {number} is not among the {self.count} that were loaded")
        return number


class LowRank(nn.Module):
    """s B (A x)."""

    def __init__(self, A_rx: Tensor, B_yr: Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(A_rx, requires_grad=False)
        self.lora_B = nn.Parameter(B_yr, requires_grad=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """[.., x] -> [.., y]."""
        return self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


class Adapters(nn.Module):
    """All adapters of one projection; the active one computes."""

    def __init__(self, active: ActiveAdapter, adapters: Sequence[LowRank]) -> None:
        super().__init__()
        self.active = active
        self.each = nn.ModuleList(adapters)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Inputs [.., x] and W x [.., y] -> [.., y]."""
        if self.active.number is None:
            return y
        added: Tensor = self.each[self.active.number](x)
        return y + added


def load_adapters(
    root: nn.Module,
    active: ActiveAdapter,
    config: ModelConfig,
    reader: TensorReader,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Gives the projections below ``root`` their parts of the adapters ``0 .. active.count - 1``.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config and the adapter's rank say.
    """
    scales = [_scale(config, reader, f"adapters.{i}") for i in range(active.count)]
    for module in adapted_modules(config) if scales else ():
        projection = root.get_submodule(module)
        assert isinstance(projection, Linear)
        pairs = []
        for i, scale in enumerate(scales):
            A_rx, B_yr = _slices(projection, reader, f"adapters.{i}.base_model.model.{module}")
            pairs.append(LowRank(A_rx.to(device, dtype, copy=True), B_yr.to(device, dtype, copy=True), scale))
        projection.adapters = Adapters(active, pairs)


def _scale(config: ModelConfig, reader: TensorReader, adapter: str) -> float:
    """s of one adapter, whose shapes are checked on the way: its first A says the rank."""
    rank = reader.shape(f"{adapter}.base_model.model.{adapted_modules(config)[0]}.lora_A.weight")[0]
    for part, expected in adapter_shapes(config, rank).items():
        if (shape := reader.shape(f"{adapter}.{part}")) != expected:
            raise CheckpointError(f"{adapter}.{part} has shape {shape}, but config and rank say {expected}")
    return float(reader.tensor(f"{adapter}.lora_alpha")) / rank


def _slices(projection: Linear, reader: TensorReader, name: str) -> tuple[Tensor, Tensor]:
    """This rank's part of A and of B."""
    A, B = reader.tensor(f"{name}.lora_A.weight"), reader.tensor(f"{name}.lora_B.weight")
    if isinstance(projection, ColumnParallelLinear):
        return A, projection.slice_weight(B)
    if isinstance(projection, RowParallelLinear):
        return projection.slice_weight(A), B
    return A, B
