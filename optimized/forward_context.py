"""What holds for one forward: row counts of all ranks and the padding mask.

A context variable, since ranks may be threads of one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.batch import AdapterRows
from optimized.parallel_config import ParallelConfig


@dataclass(frozen=True)
class DPMetadata:
    """Row counts of the data-parallel ranks, graph padding included: a CPU tensor [dp], one entry at dp = 1."""

    num_tokens_across_dp: Tensor

    @classmethod
    def make(
        cls, num_tokens: int, parallel: ParallelConfig, *, has_moe: bool, use_sequence_parallel: bool
    ) -> DPMetadata | None:
        """The counts this forward needs; None where nothing is dispatched (no MoE, or neither DP nor SP)."""
        if not has_moe or not (parallel.data_parallel_size > 1 or use_sequence_parallel):
            return None
        if parallel.data_parallel_size > 1:
            raise ValueError("data parallelism is not supported yet")
        return cls(torch.tensor([num_tokens]))

    def check(self, num_tokens: int, dp_rank: int = 0) -> None:
        """Raises ValueError where the rank's own entry is not the number of its rows."""
        own = int(self.num_tokens_across_dp[dp_rank])
        if own != num_tokens:
            raise ValueError(f"DP rank {dp_rank} announced {own} rows and has {num_tokens}")

    def sp_local_sizes(self, tp: int) -> list[int]:
        """Rows of every rank of the expert-parallel group under SP, DP-major: ceil(n_d/tp), tp times per DP rank."""
        return [-(-n // tp) for n in self.num_tokens_across_dp.tolist() for _ in range(tp)]


@dataclass(frozen=True)
class ForwardContext:
    """One forward's settings. ``is_padding`` [rows] is True on rows that are no token; None: there are none.

    ``adapter_rows`` are of the full batch; None: no row has an adapter.
    """

    is_padding: Tensor | None = None
    dp_metadata: DPMetadata | None = None
    adapter_rows: AdapterRows | None = None


_context: ContextVar[ForwardContext] = ContextVar("optimized_forward_context")


def get_forward_context() -> ForwardContext:
    """The active context; an empty one where there is none, since an MTP layer also runs outside of any."""
    return _context.get(ForwardContext())


@contextmanager
def set_forward_context(
    num_tokens: int,
    is_padding: Tensor | None = None,
    dp_metadata: DPMetadata | None = None,
    adapter_rows: AdapterRows | None = None,
) -> Iterator[ForwardContext]:
    """Makes a context active for the block and puts back the one before.

    Raises:
        ValueError: the metadata, the mask or the adapters are not for ``num_tokens`` rows.
    """
    if dp_metadata is not None:
        dp_metadata.check(num_tokens)
    if is_padding is not None and is_padding.shape != (num_tokens,):
        raise ValueError(f"the padding mask has shape {tuple(is_padding.shape)} for {num_tokens} rows")
    if adapter_rows is not None and adapter_rows.ids.shape != (num_tokens,):
        raise ValueError(f"adapters are given for {adapter_rows.ids.shape[0]} of {num_tokens} rows")
    with _active(ForwardContext(is_padding, dp_metadata, adapter_rows)) as context:
        yield context


@contextmanager
def narrowed_padding_mask(is_padding: Tensor) -> Iterator[ForwardContext]:
    """The active context with a shard's mask in place of the full one, for the block."""
    with _active(dataclasses.replace(get_forward_context(), is_padding=is_padding)) as context:
        yield context


@contextmanager
def _active(context: ForwardContext) -> Iterator[ForwardContext]:
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)
