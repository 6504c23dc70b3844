"""What holds for one forward: row counts of all ranks and the padding mask.

A context variable, since ranks may be threads of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optimized.batch import AdapterRows
from optimized.communicator import Communicator
from optimized.parallel_config import ParallelConfig


class DPAgreement(NamedTuple):
    """What the DP ranks told each other before a forward."""

    num_tokens_across_dp: Tensor  # [dp] int64 on the CPU: rows that every DP rank must run
    verifies_drafts: bool  # on one of them at least


def coordinate_batch_across_dp(
    num_tokens: int, dp_cpu: Communicator, *, graph_padded: bool, verifies_drafts: bool = False
) -> DPAgreement:
    """Tells the DP ranks what this one is about to run: how many rows, and two flags.

    Where a captured graph sets the rows of one rank, all run the most. Where one verifies drafts, the rows of draft
    step 0 are known only behind this forward, and all will have to agree anew: an idle rank could not know.
    """
    own = torch.zeros(3, dp_cpu.size, dtype=torch.int64)
    own[:, dp_cpu.rank] = torch.tensor([num_tokens, graph_padded, verifies_drafts])
    rows, padded, verifies = dp_cpu.all_reduce(own)
    agreed = torch.full_like(rows, int(rows.max())) if padded.any() else rows
    return DPAgreement(agreed, bool(verifies.any()))


@dataclass(frozen=True)
class DPMetadata:
    """Row counts of the data-parallel ranks, graph padding included: a CPU tensor [dp], one entry at dp = 1.

    Raises:
        ValueError: in ``check``, where the own entry, that of ``dp_rank``, is not the number of the rank's rows.
    """

    num_tokens_across_dp: Tensor
    dp_rank: int = 0

    @classmethod
    def make(
        cls,
        num_tokens: int,
        parallel: ParallelConfig,
        num_tokens_across_dp: Tensor | None = None,
        dp_cpu: Communicator | None = None,
        *,
        has_moe: bool,
        use_sequence_parallel: bool,
    ) -> DPMetadata | None:
        """The counts this forward needs; None where nothing is dispatched (no MoE, or neither DP nor SP).

        With data parallelism they are ``num_tokens_across_dp``, or where None are given the ranks agree here.

        Raises:
            ValueError: the own entry is not ``num_tokens``.
        """
        dispatched = parallel.data_parallel_size > 1 or use_sequence_parallel
        if not has_moe or not dispatched:
            return None
        if parallel.data_parallel_size == 1:
            num_tokens_across_dp = torch.tensor([num_tokens])
        elif num_tokens_across_dp is None:
            assert dp_cpu is not None, "with data parallelism there is a group for CPU tensors"
            num_tokens_across_dp, _ = coordinate_batch_across_dp(num_tokens, dp_cpu, graph_padded=False)
        made = cls(num_tokens_across_dp, parallel.data_parallel_rank)
        made.check(num_tokens)
        return made

    def check(self, num_tokens: int) -> None:
        """Raises ValueError where the rank's own entry is not the number of its rows."""
        own = int(self.num_tokens_across_dp[self.dp_rank])
        if own != num_tokens:
            raise ValueError(f"DP rank {self.dp_rank} announced {own} rows and has {num_tokens}")

    def sp_local_sizes(self, sp_size: int) -> list[int]:
        """Rows of every rank that dispatches, DP-major: ceil(n_d/sp_size), sp_size times per DP rank.

        ``sp_size`` is tp for shards. Full rows are dispatched between DP ranks alone: 1.
        """
        return [-(-n // sp_size) for n in self.num_tokens_across_dp.tolist() for _ in range(sp_size)]


@dataclass
class ForwardContext:
    """One forward's settings. ``is_padding`` [rows] is True on rows that are no token; None: there are none.

    In a region that runs on shards ``is_padding`` is the shard's, see :func:`narrowed_padding_mask`.
    ``adapter_rows`` are of the full batch; None: no row has an adapter. ``verifies_drafts``: some DP rank does, in this
    forward, so draft step 0 cannot run in the same context.
    """

    is_padding: Tensor | None = None
    dp_metadata: DPMetadata | None = None
    adapter_rows: AdapterRows | None = None
    verifies_drafts: bool = False


_context: ContextVar[ForwardContext] = ContextVar("optimized_forward_context")


def get_forward_context() -> ForwardContext:
    """The active context; an empty one where there is none, since an MTP layer also runs outside of any."""
    return _context.get(ForwardContext())


@contextmanager
def override_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes a context active for the block, maybe again, and puts back the one before."""
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


@contextmanager
def set_forward_context(
    num_tokens: int,
    is_padding: Tensor | None = None,
    dp_metadata: DPMetadata | None = None,
    adapter_rows: AdapterRows | None = None,
    *,
    verifies_drafts: bool = False,
) -> Iterator[ForwardContext]:
    """A new context for forwards of ``num_tokens`` rows, active for the block.

    Raises:
        ValueError: the metadata, the mask or the adapters are not for ``num_tokens`` rows.
    """
    if dp_metadata is not None:
        dp_metadata.check(num_tokens)
    if is_padding is not None and is_padding.shape != (num_tokens,):
        raise ValueError(f"the padding mask has shape {tuple(is_padding.shape)} for {num_tokens} rows")
    if adapter_rows is not None and adapter_rows.ids.shape != (num_tokens,):
        raise ValueError(f"adapters are given for {adapter_rows.ids.shape[0]} of {num_tokens} rows")
    made = ForwardContext(is_padding, dp_metadata, adapter_rows, verifies_drafts)
    with override_forward_context(made) as context:
        yield context


@contextmanager
def narrowed_padding_mask(is_padding: Tensor) -> Iterator[ForwardContext]:
    """The active context with a shard's mask in place of the full one, for the block."""
    with override_forward_context(get_forward_context()) as context:
        full, context.is_padding = context.is_padding, is_padding
        try:
            yield context
        finally:
            context.is_padding = full
