"""What an engine is built from, as its caller hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from optimized.communicator import Communicator
from reference.config import ModelConfig

if TYPE_CHECKING:
    from reference.checkpoint import TensorReader


class BuildSetup(Protocol):
    """What is read of the object; it may have more."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""

    @property
    def weights(self) -> TensorReader:
        """The checkpoint, and the tensors of ``lora_adapters`` adapters."""

    @property
    def groups(self) -> Mapping[str, Communicator]:
        """``tp``, ``ep`` (the world), and with data parallelism ``dp`` and ``dp_cpu``."""

    @property
    def dtype(self) -> torch.dtype:
        """The working type."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    def scheme(self) -> str:
        """The dataflow, or ``auto``."""

    @property
    def expert_parallel(self) -> bool:
        """Whether whole experts are divided over the world, or the channels of each."""

    @property
    def all2all_backend(self) -> str:
        """How rows reach the experts and come back."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input is kept."""

    @property
    def lora_adapters(self) -> int:
        """How many adapters there are."""

    @property
    def pad_to(self) -> int | None:
        """Rows that a step is padded to."""

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the captured graphs, ascending."""

    @property
    def skip_padding(self) -> bool:
        """Whether padded rows are kept from the experts."""
