"""Where a rank stands in a world of data-parallel times tensor-parallel ranks. No torch.

DP-major: rank = dp_rank * tp + tp_rank. Every communicator that a subject is handed is one of :func:`groups_of`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One rank of ``dp * tp``."""

    rank: int
    tp: int
    dp: int

    @property
    def dp_rank(self) -> int:
        """Number of its data-parallel rank."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """Number within its data-parallel rank."""
        return self.rank % self.tp

    @property
    def peers(self) -> range:
        """The ranks of its data-parallel rank."""
        return range(self.dp_rank * self.tp, (self.dp_rank + 1) * self.tp)


def groups_of(tp: int, dp: int, members: int, *, plain: bool) -> list[tuple[str, tuple[int, ...]]]:
    """(name, ranks) of every group that a subject is handed, in the order in which all ranks of the world make them.

    The first ``members`` ranks of each data-parallel rank run the subject: all ``tp`` of them, or one alone. A
    ``plain`` one has its tensor-parallel group only.
    """
    by_dp = [tuple(range(d * tp, d * tp + members)) for d in range(dp)]
    if plain:
        return [("tp", ranks) for ranks in by_dp]
    columns = [tuple(range(t, dp * tp, tp)) for t in range(members)]
    groups = [("tp", ranks) for ranks in by_dp]
    groups += [("ep", tuple(rank for ranks in by_dp for rank in ranks))]
    if dp > 1:
        groups += [(name, ranks) for name in ("dp", "dp_cpu") for ranks in columns]
    return groups
