"""Random LoRA adapters beside a model's own tensors, so that any model can be checked with adapters."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from torch import Tensor

from reference.checkpoint import RandomAdapters, TensorReader
from reference.config import ModelConfig


class WithAdapters:
    """Another reader's tensors, and by seed those of the adapters ``adapters.0 .. adapters.<adapters - 1>``."""

    def __init__(self, stored: TensorReader, config: ModelConfig, rank: int, adapters: int, seed: int) -> None:
        self._stored = stored
        self._drawn = _random_adapters(config, rank, adapters, seed)

    def names(self) -> Collection[str]:
        """As stored, then the adapters' tensors."""
        return [*self._stored.names(), *self._drawn.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._of(name).shape(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type; an adapter's are bfloat16, but for lora_alpha."""
        return self._of(name).tensor(name)

    def _of(self, name: str) -> TensorReader:
        return self._drawn if name.startswith("adapters.") else self._stored


@lru_cache(maxsize=1)
def _random_adapters(config: ModelConfig, rank: int, adapters: int, seed: int) -> RandomAdapters:
    """One for all ranks that are threads."""
    return RandomAdapters(config, seed, rank=rank, adapters=adapters)
