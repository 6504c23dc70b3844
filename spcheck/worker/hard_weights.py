"""Random weights that are harder than plain ones: with exact ties, or with a few channels a hundred times larger."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from torch import Tensor

from reference.checkpoint import TensorReader
from reference.config import ModelConfig

OUTLIER = 100.0
"""How much larger the few channels are."""

_HEADS = ("lm_head.weight", "shared_head.head.weight")
_ROUTER = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
_LARGE_COLUMNS = ("embed_tokens.weight",)
_LARGE_CHANNELS = ("input_layernorm.weight", "q_a_layernorm.weight")

Change = Callable[[str, Tensor], Tensor]


class Changed:
    """Another reader's tensors, each changed by its name; the stored type stays."""

    def __init__(self, stored: TensorReader, change: Change) -> None:
        self._stored = stored
        self._change = change
        self._made: dict[str, Tensor] = {}

    def names(self) -> Collection[str]:
        """As stored."""
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored."""
        return self._stored.shape(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type; made at its first use."""
        if name not in self._made:
            self._made[name] = self._change(name, self._stored.tensor(name))
        return self._made[name]


def with_ties(stored: TensorReader, config: ModelConfig) -> Changed:
    """Weights with twin rows, so that whatever they score ties exactly.

    Router: neighbours in a group are twins, and the last group is a twin of the first. Heads: tokens are twins of their
    neighbours, and of those half a vocabulary away, which other ranks hold. Indexer: all its heads are twins, so that a
    key scores exactly 0 with all of them or with none.
    """

    def change(name: str, weight: Tensor) -> Tensor:
        if name.endswith(_ROUTER):
            return _twin_experts(weight, config)
        if name.endswith(_HEADS):
            return _twin_tokens(weight)
        if name.endswith("indexer.wq_b.weight"):
            return weight[: config.index_head_dim].repeat(config.index_n_heads or 1, 1)
        return weight

    return Changed(stored, change)


def _twin_experts(weight: Tensor, config: ModelConfig) -> Tensor:
    """[E, D] or [E]: the second expert of every group repeats the first, and the last group the first group.

    Where there is one group all experts are in pairs, as if every pair were a group.
    """
    group = len(weight) // config.n_group if config.n_group > 1 else math.gcd(2, len(weight))
    by_group = weight.clone().view(-1, group, *weight.shape[1:])
    if group > 1:
        by_group[:, 1] = by_group[:, 0]
    by_group[-1] = by_group[0]
    return by_group.reshape(weight.shape)


def _twin_tokens(weight: Tensor) -> Tensor:
    """[V, D]: every second row repeats the one before, and the second half the first."""
    out = weight.clone()
    pairs, half = len(out) // 2, len(out) // 2
    out[1 : 2 * pairs : 2] = out[0 : 2 * pairs : 2]
    out[half : 2 * half] = out[:half]
    return out


def with_outliers(stored: TensorReader) -> Changed:
    """Weights with two channels a hundred times larger in the embedding, and in the norms before attention's logits."""

    def change(name: str, weight: Tensor) -> Tensor:
        if not name.endswith((*_LARGE_COLUMNS, *_LARGE_CHANNELS)):
            return weight
        out = weight.clone()
        out[..., outlier_channels(weight.shape[-1])] *= OUTLIER
        return out

    return Changed(stored, change)


def outlier_channels(width: int) -> list[int]:
    """Which of ``width`` channels are large: one in the first half and one in the second."""
    return sorted({width // 5, width - 1 - width // 7})
