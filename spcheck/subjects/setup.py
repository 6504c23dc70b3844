"""What a subject is built from, as one object. docs/subjects.md is the same in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from reference.checkpoint import TensorReader
    from reference.config import ModelConfig
    from spcheck.comm.interface import Communicator


@dataclass(frozen=True)
class Setup:
    """One side of a case on one rank.

    ``groups`` are the communicators of this rank by name. ``dtype`` is the working type, ``scheme`` what is asked
    for, maybe ``auto``. The others are settings of the case, those that are declared as handed to a subject
    (:mod:`spcheck.case.case`).
    """

    config: ModelConfig
    weights: TensorReader
    groups: Mapping[str, Communicator]
    dtype: torch.dtype
    device: torch.device
    scheme: str
    expert_parallel: bool
    all2all_backend: str
    aux_layers: tuple[int, ...]
    lora_adapters: int
    pad_to: int | None
    graph_sizes: tuple[int, ...]
    skip_padding: bool
