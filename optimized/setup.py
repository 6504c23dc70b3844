"""What every part of one rank's model is built from."""

from __future__ import annotations

from dataclasses import dataclass

from optimized.communicator import Communicator
from optimized.loader import Loader
from optimized.parallel_config import ParallelConfig
from optimized.rotary import RotaryTable
from optimized.sp import SequenceParallel
from reference.config import ModelConfig


@dataclass(frozen=True)
class Setup:
    """Sizes, settings, weights and communicators of one rank.

    ``ep`` is the whole world. ``dp`` joins the ranks of one TP rank, and ``dp_cpu`` the same for tensors on the CPU;
    both are None without data parallelism.
    """

    config: ModelConfig
    parallel: ParallelConfig
    loader: Loader
    tp: Communicator
    ep: Communicator
    rotary: RotaryTable
    dp: Communicator | None = None
    dp_cpu: Communicator | None = None
    aux_layers: tuple[int, ...] = ()
    skip_padding: bool = True
    lora_adapters: int = 0

    @property
    def sp(self) -> SequenceParallel:
        """The sequence-parallel primitives over the tensor-parallel group."""
        return SequenceParallel(self.tp)
