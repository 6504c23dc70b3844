"""What dataflows on shards share: the padding mask of a shard, and several shards in one gather."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from optimized.forward_context import ForwardContext, get_forward_context, narrowed_padding_mask
from optimized.sp import SequenceParallel


def sp_padding(sp: SequenceParallel, full: Tensor) -> AbstractContextManager[ForwardContext]:
    """For the block the forward's padding mask is that of the shard of ``full`` [n,...]."""
    return narrowed_padding_mask(sp.sp_padding_mask(get_forward_context().is_padding, full))


def packed_all_gather(sp: SequenceParallel, shards: Sequence[Tensor], positions: Tensor) -> tuple[Tensor, ...]:
    """Several shards [m,D] -> full [n,D] each, in one collective."""
    return sp.sp_all_gather(torch.cat(list(shards), dim=-1))[: positions.shape[0]].chunk(len(shards), dim=-1)
