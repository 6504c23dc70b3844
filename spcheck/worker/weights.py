"""The case's weights: a checkpoint folder's, or random ones by seed; on a grid in exact mode."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import lru_cache

import torch
from torch import Tensor

from reference.checkpoint import Checkpoint, RandomWeights, TensorReader, check_tensors
from reference.config import ModelConfig
from spcheck.errors import UsageError
from spcheck.families.deepseek.guard import merge_norms
from spcheck.plan.grid import Grid
from spcheck.plan.plan import Plan
from spcheck.worker.adapters import WithAdapters
from spcheck.worker.hard_weights import with_outliers, with_ties
from spcheck.worker.snap import snap

MOST_LOST = 0.25
"""Of a weight's norm; more, and a run on the grid says little about it."""


def open_weights(plan: Plan) -> TensorReader:
    """A reader of the published tensor names, in the stored type; in exact mode float64 on the plan's grid.

    Raises:
        reference.checkpoint.CheckpointError: the folder's files cannot be read.
    """
    case = plan.case
    stored: TensorReader = (
        Checkpoint(plan.folder) if plan.folder is not None else _random_weights(plan.config, case.seed, case.weights)
    )
    if case.lora_adapters:
        stored = WithAdapters(stored, plan.config, case.lora_rank, case.lora_adapters, case.seed)
    return stored if plan.grid is None else Snapped(stored, plan.grid)


class Snapped:
    """Another reader's tensors in float64, rounded to the grid of weights; ``stored`` is that reader."""

    def __init__(self, stored: TensorReader, grid: Grid) -> None:
        self.stored = stored
        self._bits = grid.weight

    def names(self) -> Collection[str]:
        """As stored."""
        return self.stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored."""
        return self.stored.shape(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor, float64."""
        return self.rounded(self.stored.tensor(name))

    def rounded(self, stored: Tensor) -> Tensor:
        """Stored values in float64 on the grid, as a new tensor."""
        return snap(stored.double(), self._bits)

    def lost(self, name: str) -> float:
        """The part of a tensor's norm that rounding takes away or adds: 1 where all of it becomes zero."""
        stored = self.stored.tensor(name).double()
        size = float(torch.linalg.vector_norm(stored))
        return float(torch.linalg.vector_norm(stored - snap(stored, self._bits))) / size if size else 0.0


@lru_cache(maxsize=64)
def lost_weights(plan: Plan, rank: int, size: int) -> dict[str, float]:
    """Of the tensors that fall to a rank those of which the grid leaves little: what they do was not tested."""
    reader = open_weights(plan)
    if not isinstance(reader, Snapped):
        return {}
    lost = {name: reader.lost(name) for name in sorted(reader.names())[rank::size]}
    return {name: part for name, part in lost.items() if part > MOST_LOST}


@lru_cache(maxsize=64)
def weight_norms(plan: Plan, rank: int, size: int) -> dict[str, float]:
    """Largest row norm of the matrices that fall to a rank, for the guard (:mod:`spcheck.families.deepseek.guard`).

    Experts of a layer have one name. ``kv_b_proj`` has two more entries: ``.key``, the largest Frobenius norm of a
    head's key part, and ``.value``, the largest row norm of the value parts. An adapter's ``lora_A``
    has ``.whole``, its Frobenius norm, and ``.scale``, lora_alpha / r.
    """
    norms: dict[str, float] = {}
    reader, config = open_weights(plan), plan.config
    for name in sorted(reader.names())[rank::size]:
        if name.endswith(".e_score_correction_bias"):
            norms[name] = float(reader.tensor(name).double().abs().max())
        if len(reader.shape(name)) == 2:
            module = re.sub(r"\.experts\.\d+\.", ".experts.", name.removesuffix(".weight"))
            weight = reader.tensor(name).double()
            norms[module] = merge_norms([{module: _largest_norm(weight)}, {module: norms.get(module, 0.0)}])[module]
            if module.endswith(".kv_b_proj"):
                heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
                keys, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
                norms[f"{module}.key"] = _largest_norm(keys.flatten(1))
                norms[f"{module}.value"] = _largest_norm(values)
            if module.endswith(".lora_A"):
                alpha = float(reader.tensor(re.sub(r"\.base_model\..*", ".lora_alpha", name)))
                norms[f"{module}.whole"] = _largest_norm(weight.flatten())
                norms[f"{module}.scale"] = abs(alpha) / weight.shape[0]
    return norms


def _largest_norm(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dim=-1).max())


@lru_cache(maxsize=1)
def _random_weights(config: ModelConfig, seed: int, kind: str) -> TensorReader:
    """One reader for all ranks that are threads, and for cases of one model that follow each other."""
    plain = RandomWeights(config, seed, own_tables=True)
    if kind == "ties":
        return with_ties(plain, config)
    return with_outliers(plain) if kind == "outliers" else plain


def check_room(plan: Plan, free: int | None) -> None:
    """Compares random weights with the bytes of memory that are free, before any is drawn; None: nobody knows.

    All ranks together hold each tensor as it is drawn, in bfloat16, and one subject's copy in the working type. What a
    run needs besides is not counted.

    Raises:
        UsageError: they cannot be held.
    """
    if plan.folder is not None or free is None:
        return
    reader = _random_weights(plan.config, plan.case.seed, plan.case.weights)
    elements = sum(math.prod(reader.shape(name)) for name in reader.names())
    need = elements * (torch.bfloat16.itemsize + getattr(torch, plan.dtype).itemsize)
    if need > free:
        raise UsageError(
            f"the weights of {plan.case.model} take {need / 2**30:,.1f} GiB at least, and {free / 2**30:,.1f} GiB of "
            f"memory are free{'' if plan.case.scale != 'full' else ': try --scale tiny'}"
        )


def check_weights(plan: Plan) -> None:
    """Reads the names and shapes in a folder's headers, before any rank starts.

    Raises:
        reference.checkpoint.CheckpointError: a tensor is missing, misshapen or unknown.
    """
    if plan.folder is not None:
        check_tensors(plan.config, Checkpoint(plan.folder))
