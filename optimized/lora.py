"""LoRA adapters over packed rows: the rows are grouped by adapter, and each group has one small product per matrix.

What an adapter adds stays what the matrix gives: replicated, a block of channels, or a summand still to be reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized.communicator import Block
from optimized.decoder import Backbone
from optimized.forward_context import get_forward_context
from optimized.linear import Linear
from optimized.loader import Loader
from optimized.setup import Setup


class LoraPair(nn.Module):
    """x [k, in] -> lora_alpha / r * B (A x) [k, out], for one adapter and one matrix.

    A fused matrix has several published ones below each other: their A are stacked ``[p*r, in]``, each has its own B.
    """

    def __init__(self, stacked_a: Tensor, b: Sequence[Tensor], scaling: float) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(stacked_a, requires_grad=False)
        self.lora_b = nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in b)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """[k, in] -> [k, out]."""
        shrunk = F.linear(x, self.lora_a).mul_(self.scaling).chunk(len(self.lora_b), dim=-1)
        return torch.cat([F.linear(s, b) for s, b in zip(shrunk, self.lora_b, strict=True)], dim=-1)


class LoraLinear(Linear):
    """A matrix whose rows may each have an adapter: the forward context says which."""

    def __init__(self, base: Linear, adapters: Sequence[LoraPair]) -> None:
        super().__init__(base.weight)
        self.adapters = nn.ModuleList(adapters)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        out, batch = super().forward(x), get_forward_context().adapter_rows
        for adapter, rows in batch.groups if batch is not None else ():
            out.index_add_(0, rows, self.adapters[adapter](x.index_select(0, rows)))
        return out


def request_adapters(adapters: Sequence[int | None] | None, requests: int, loaded: int) -> list[int]:
    """The adapter of each request, -1 for none.

    Raises:
        ValueError: not one entry per request, or an adapter that was not loaded.
    """
    ids = [-1] * requests if adapters is None else [-1 if a is None else a for a in adapters]
    if len(ids) != requests:
        raise ValueError(f"{len(ids)} adapters are given for {requests} requests")
    if unknown := [a for a in ids if not -1 <= a < loaded]:
        raise ValueError(f"adapter {unknown[0]} was not loaded: there are {loaded}")
    return ids


@dataclass(frozen=True)
class Target:
    """A matrix that takes adapters, the published ones that lie in it, and which of their axes the ranks divide."""

    name: str
    published: tuple[str, ...]
    divided: Literal["", "outputs", "inputs"]

    def read(self, loader: Loader, block: Block, alpha: float) -> LoraPair:
        """One adapter's part; ``loader`` reads below the attention or the MLP, ``block`` is the rank's."""
        inputs, outputs = (block if self.divided == axis else Block() for axis in ("inputs", "outputs"))
        a = torch.cat([loader.columns(f"{name}.lora_A.weight", inputs) for name in self.published])
        b = [loader.rows(f"{name}.lora_B.weight", outputs) for name in self.published]
        return LoraPair(a, b, alpha / b[0].shape[1])


# Absorbed, kv_b_proj is part of the attention product itself, where no row is left to choose an adapter by.
ATTENTION = (
    Target("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"), ""),
    Target("q_b_proj", ("q_b_proj",), "outputs"),
    Target("o_proj", ("o_proj",), "inputs"),
)
MLP = (
    Target("gate_up_proj", ("gate_proj", "up_proj"), "outputs"),
    Target("down_proj", ("down_proj",), "inputs"),
)


def add_adapters(model: Backbone, setup: Setup) -> None:
    """Replaces the matrices of the decoder layers that take adapters; routed experts and MTP layers have none."""
    for index in range(model.num_hidden_layers if setup.lora_adapters else 0):
        layer = f"layers.{index}"
        mlp = f"{layer}.mlp.shared_experts" if setup.config.is_moe_layer(index) else f"{layer}.mlp"
        for parent, targets in ((f"{layer}.self_attn", ATTENTION), (mlp, MLP)):
            for target in targets:
                _replace(model, parent, target, setup)


def _replace(model: Backbone, parent: str, target: Target, setup: Setup) -> None:
    module, pairs = model.get_submodule(parent), []
    for i in range(setup.lora_adapters):
        stored = setup.loader.at(f"adapters.{i}")
        alpha = float(stored.full("lora_alpha", torch.float64))
        pairs.append(target.read(stored.at(f"base_model.model.model.{parent}"), Block.of(setup.tp), alpha))
    base = module.get_submodule(target.name)
    assert isinstance(base, Linear)
    module.register_module(target.name, LoraLinear(base, pairs))
