"""Which rows meet which experts on which rank: the rules that alignment and the contract tables share. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from reference.config import ModelConfig
from spcheck.case import Case
from spcheck.plan.phases import Phase
from spcheck.plan.schemes import SidePlan


def is_dispatched(side: SidePlan, case: Case) -> bool:
    """Whether rows travel to experts at all: from shard to shard, or without SP between data-parallel ranks."""
    return not side.plain and (side.sharded or case.dp > 1)


def is_by_choice(side: SidePlan, case: Case) -> bool:
    """Whether a row travels only to ranks that have one of its experts."""
    return is_dispatched(side, case) and case.all2all_backend == "all_to_all"


def members(side: SidePlan, case: Case, rank: int) -> range:
    """The ranks of the world between which a rank dispatches, in the order of their group."""
    return range(case.ranks) if side.sharded else range(rank % case.tp, case.ranks, case.tp)


def expert_rows(side: SidePlan, phase: Phase) -> int:
    """Rows of one data-parallel rank that its experts get or send: all shards, or the batch."""
    return phase.shard_rows(side.tp) * side.tp if side.sharded else phase.padded


def dispatched_sizes(side: SidePlan, phases: Sequence[Phase]) -> tuple[int, ...]:
    """Rows of every rank of the dispatch group, in one forward of all data-parallel ranks.

    Under SP ceil(n_d / tp) of each rank of data-parallel rank d, else n_d.
    """
    if side.sharded:
        return tuple(p.shard_rows(side.tp) for p in phases for _ in range(side.tp))
    return tuple(p.padded for p in phases)


def experts_per_rank(case: Case, config: ModelConfig) -> int:
    """Experts of which a rank of the world has all, or without expert parallelism a part."""
    return config.n_routed_experts // case.ranks if case.expert_parallel else config.n_routed_experts


def experts_of(side: SidePlan, case: Case, config: ModelConfig, rank: int) -> range | None:
    """The experts that a rank of the world has whole; None where it has channels of all of them."""
    if side.plain or not case.expert_parallel:
        return None
    block = experts_per_rank(case, config)
    return range(rank * block, (rank + 1) * block)


def carries_ids(kind: str, dtype: str, dimensions: int) -> bool:
    """Whether a collective is the one all-to-all of a layer that takes expert ids [rows, K] along."""
    return (kind, dtype, dimensions) == ("all_to_all", "int64", 2)
