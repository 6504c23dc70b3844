"""The case's weights: a checkpoint folder's, or random ones by seed for a preset."""

from __future__ import annotations

from functools import lru_cache

from reference.checkpoint import Checkpoint, RandomWeights, TensorReader, check_tensors
from reference.config import ModelConfig
from spcheck.plan import Plan


def open_weights(plan: Plan) -> TensorReader:
    """A reader of the published tensor names, in the stored type.

    Raises:
        reference.checkpoint.CheckpointError: the folder's files cannot be read.
    """
    if plan.folder is not None:
        return Checkpoint(plan.folder)
    return _random_weights(plan.config, plan.case.seed)


@lru_cache(maxsize=1)
def _random_weights(config: ModelConfig, seed: int) -> RandomWeights:
    """One reader for all ranks that are threads, and for cases of one model that follow each other."""
    return RandomWeights(config, seed)


def check_weights(plan: Plan) -> None:
    """Reads the names and shapes in a folder's headers, before any rank starts.

    Raises:
        reference.checkpoint.CheckpointError: a tensor is missing, misshapen or unknown.
    """
    if plan.folder is not None:
        check_tensors(plan.config, Checkpoint(plan.folder))
