"""Padded rows that are routed: what the gates of one side chose for them, on the ranks that hold them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spcheck.judge.contracts.check import Reports
from spcheck.plan.dispatch import experts_per_rank, members
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

Key = tuple[str, int]
"""(layer, call)."""


class PaddedChoices:
    """The choices of one side; all are zero where padded rows are skipped.

    A padded row belongs to nobody, so it is held against the gate of the very rank that holds it. Without SP every
    tensor-parallel rank holds all rows, and counts its own copy, since it alone serves its experts with them.
    """

    def __init__(self, plan: Plan, subject: str, side: SidePlan, reports: Reports) -> None:
        self._plan, self._side = plan, side
        self._nothing = [0] * plan.config.n_routed_experts
        self._entries: dict[tuple[str, int, int], dict[str, Any]] = {}
        for report in reports:
            for entry in report.get(subject, {}).get("padded", []):
                self._entries[entry["layer"], entry["call"], report["rank"]] = entry

    def rows_of_experts(self, key: Key, rank: int | None) -> list[int]:
        """Padded rows of every expert: those that reach a rank which has a part of all of them.

        None: those that reach each expert's own rank.
        """
        if rank is not None:
            return self._reaching(key, rank)
        block = experts_per_rank(self._plan.case, self._plan.config)
        by_rank = [self._reaching(key, owner) for owner in range(self._plan.case.ranks)]
        return [by_rank[expert // block][expert] for expert in range(len(self._nothing))]

    def rows_to_ranks(self, key: Key, rank: int) -> list[int]:
        """Of the padded rows of a rank those that chose an expert of each rank of the world."""
        entry = self._entries.get((*key, rank))
        return [0] * self._plan.case.ranks if entry is None else list(entry["to_rank"])

    def astray(self, key: Key, rank: int | None) -> Iterator[tuple[int, str]]:
        """(rank, what is wrong) of padded rows of a rank, or of all, that do not go where their own gate chose."""
        ranks = range(self._plan.case.ranks) if rank is None else (rank,)
        for holder in ranks:
            entry = self._entries.get((*key, holder), {})
            if other := entry.get("sent"):
                yield holder, f"{_row(other, holder)} goes to {_found(other)}, its own gate chose {other['wanted']}"
            if other := entry.get("chosen"):
                yield holder, f"{_row(other, holder)} chose {_found(other)} where its scores say {other['wanted']}"

    def _reaching(self, key: Key, rank: int) -> list[int]:
        """Padded rows by expert, from all ranks that dispatch to this one: each rank of its group, itself included."""
        sources = members(self._side, self._plan.case, rank)
        entries = [self._entries[*key, source] for source in sources if (*key, source) in self._entries]
        return [sum(rows) for rows in zip(self._nothing, *(entry["counts"] for entry in entries), strict=True)]


def _row(other: dict[str, Any], rank: int) -> str:
    return f"padded row {other['row']} of rank {rank}"


def _found(other: dict[str, Any]) -> str:
    return f"experts {other['found']}"
