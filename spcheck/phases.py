"""Which token rows each forward of a run has, and which rank owns them: the tool's own computation. No torch.

A row of real tokens is known by (request, position). Rows of a packed forward are the requests one after the
other, then graph padding up to ``padded``, then the rows a shard adds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Phase:
    """One forward of the whole batch: the target step, or one draft step.

    ``call`` counts the forwards of the same kind. ``counts[i]`` rows belong to request ``i`` and start at position
    ``starts[i]``. ``padded`` >= the number of real rows is what a packed subject runs.
    """

    kind: str  # "target" or "draft"
    call: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    padded: int

    @cached_property
    def real(self) -> int:
        """Rows that belong to a request."""
        return sum(self.counts)

    def row(self, index: int) -> tuple[int, int]:
        """(request, position) of packed row ``index`` < ``real``."""
        return self.rows[index]

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """(request, position) of all real rows."""
        firsts = zip(self.starts, self.counts, strict=True)
        return [(request, start + i) for request, (start, count) in enumerate(firsts) for i in range(count)]

    def last_row(self, request: int) -> tuple[int, int]:
        """(request, position) of a request's last row."""
        return request, self.starts[request] + self.counts[request] - 1

    def shard_rows(self, tp: int) -> int:
        """Rows of one shard: m = ceil(n / tp)."""
        return -(-self.padded // tp)

    def owned(self, rank: int, tp: int) -> range:
        """Packed rows that are real and belong to the shard of ``rank``: the rows it compares."""
        return self._owned.get((rank, tp)) or self._own(rank, tp)

    @cached_property
    def _owned(self) -> dict[tuple[int, int], range]:
        return {}

    def _own(self, rank: int, tp: int) -> range:
        m = self.shard_rows(tp)
        own = self._owned[rank, tp] = range(min(rank * m, self.real), min((rank + 1) * m, self.real))
        return own


def phases_of(requests: tuple[int, ...], mtp_steps: int, pad_to: int | None) -> tuple[Phase, ...]:
    """The target step and the draft steps of a case.

    Draft step 0 has the target's rows; each later one has exactly one row per request, one position further,
    and no graph padding.
    """
    zeros = (0,) * len(requests)
    ones = (1,) * len(requests)
    padded = pad_to or sum(requests)
    phases = [Phase("target", 0, zeros, requests, padded)]
    for step in range(mtp_steps):
        if step == 0:
            phases.append(Phase("draft", 0, zeros, requests, padded))
        else:
            starts = tuple(n + step - 1 for n in requests)
            phases.append(Phase("draft", step, starts, ones, len(requests)))
    return tuple(phases)


def layer_of(name: str) -> int | None:
    """The decoder layer a probe, cache or module name belongs to, or None outside the layers."""
    match = re.match(r"model\.layers\.(\d+)(\.|$)", name)
    return int(match[1]) if match else None
