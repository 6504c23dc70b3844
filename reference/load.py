"""Gives a built model its weights: reads each parameter by its name, takes this rank's slice, sets the type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from reference.checkpoint import CheckpointError, TensorReader
from reference.config import ModelConfig
from reference.layout import optional_copies, tensor_shapes
from reference.moe import Gate
from reference.parallel import Sliced


def load_weights(
    root: nn.Module, config: ModelConfig, reader: TensorReader, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Fills every parameter below ``root``, whose module names are the checkpoint's.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config says.
    """
    shapes, read = tensor_shapes(config), _with_copies(config, reader)
    for path, module in root.named_modules():
        for part in [name for name, _ in module.named_parameters(recurse=False)]:
            name = f"{path}.{part}"
            full = read(name)
            if tuple(full.shape) != shapes[name]:
                raise CheckpointError(f"{name} has shape {tuple(full.shape)}, but the config says {shapes[name]}")
            local = module.slice_weight(full) if isinstance(module, Sliced) else full
            # The router is never narrower than float32: in bfloat16 the bias alone would decide close choices.
            kept = torch.promote_types(dtype, torch.float32) if isinstance(module, Gate) else dtype
            value = local.to(device=device, dtype=kept, copy=True)
            module.register_parameter(part, nn.Parameter(value, requires_grad=False))


def _with_copies(config: ModelConfig, reader: TensorReader) -> Callable[[str], Tensor]:
    """Reads by name, and the main table where an MTP layer's copy of it is not stored."""
    present, copies = set(reader.names()), optional_copies(config)
    return lambda name: reader.tensor(name if name in present else copies.get(name, name))
