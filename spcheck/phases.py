"""Which token rows each forward of a run has, and which rank owns them: the tool's own computation. No torch.

A row of real tokens is known by (request, position) within its data-parallel rank. Rows of a packed forward are the
requests one after the other, then graph padding up to ``padded``, then the rows a shard adds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

DUMMY_ROWS = 1
"""Rows that an idle data-parallel rank runs, so that every rank issues the same collectives."""


@dataclass(frozen=True)
class Phase:
    """One forward on one data-parallel rank: a target step, or one draft step.

    ``call`` counts the forwards of the same kind over all steps of the run; ``draft`` is the number of a draft step
    within its own. ``counts[i]`` rows belong to request ``requests[i]`` and start at position ``starts[i]``. ``padded``
    >= the number of real rows is what a packed subject runs.
    """

    kind: str  # "target", "draft" or "cache"
    call: int
    requests: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    padded: int
    draft: int = 0

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
        firsts = zip(self.requests, self.starts, self.counts, strict=True)
        return [(request, start + i) for request, start, count in firsts for i in range(count)]

    @cached_property
    def last_rows(self) -> list[tuple[int, int]]:
        """(request, position) of each request's last row."""
        ends = zip(self.requests, self.starts, self.counts, strict=True)
        return [(request, start + count - 1) for request, start, count in ends]

    def shard_rows(self, tp: int) -> int:
        """Rows of one shard: m = ceil(n / tp)."""
        return -(-self.padded // tp)

    def owned(self, tp_rank: int, tp: int) -> range:
        """Packed rows that are real and belong to the shard of ``tp_rank``: the rows it compares."""
        return self._owned.get((tp_rank, tp)) or self._own(tp_rank, tp)

    @cached_property
    def _owned(self) -> dict[tuple[int, int], range]:
        return {}

    def _own(self, tp_rank: int, tp: int) -> range:
        m = self.shard_rows(tp)
        own = self._owned[tp_rank, tp] = range(min(tp_rank * m, self.real), min((tp_rank + 1) * m, self.real))
        return own


@dataclass(frozen=True)
class Step:
    """One target step and its drafts: per data-parallel rank the requests by number, and their new tokens."""

    requests: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GraphPadding:
    """How a step is padded: to ``pad_to`` rows, or to the smallest of ``sizes`` that holds it (none: not at all).

    ``agreed``: the data-parallel ranks agree, and if a captured graph sets the rows of one all run the most.
    """

    pad_to: int | None
    sizes: tuple[int, ...]
    agreed: bool

    def padded(self, rows: Sequence[int], *, later_draft: bool = False) -> list[int]:
        """Rows that each data-parallel rank runs, of the rows that each has (0: idle, a dummy)."""
        own = [n or DUMMY_ROWS for n in rows]
        graphs = [self._captured(n, later_draft) for n in own]
        wanted = [graph or n for graph, n in zip(graphs, own, strict=True)]
        return [max(wanted)] * len(wanted) if self.agreed and any(graphs) else wanted

    def _captured(self, rows: int, later_draft: bool) -> int | None:
        """The rows of the graph that runs so many, None where none does."""
        if self.pad_to is not None:
            return None if later_draft else self.pad_to
        return min((size for size in self.sizes if size >= rows), default=None)


def phases_of(steps: Sequence[Step], mtp_steps: int, padding: GraphPadding) -> list[tuple[Phase, ...]]:
    """The forwards of a run, for each data-parallel rank: per step the target, then the draft steps.

    Draft step 0 has the target's rows; each later one has exactly one row per request, one position further.
    """
    by_rank: list[list[Phase]] = [[] for _ in steps[0].requests]
    for number, step in enumerate(steps):
        first = padding.padded([sum(tokens) for tokens in step.tokens])
        later = padding.padded([len(tokens) for tokens in step.tokens], later_draft=True)
        for rank, (requests, tokens) in enumerate(zip(step.requests, step.tokens, strict=True)):
            zeros, ones = (0,) * len(tokens), (1,) * len(tokens)
            by_rank[rank].append(Phase("target", number, requests, zeros, tokens, first[rank]))
            for draft in range(mtp_steps):
                call = number * mtp_steps + draft
                rows = (zeros, tokens, first[rank])
                if draft:
                    rows = (tuple(n + draft - 1 for n in tokens), ones, later[rank])
                by_rank[rank].append(Phase("draft", call, requests, *rows, draft))
    return [tuple(phases) for phases in by_rank]


def layer_of(name: str) -> int | None:
    """The decoder layer a probe, cache or module name belongs to, or None outside the layers."""
    match = re.match(r"model\.layers\.(\d+)(\.|$)", name)
    return int(match[1]) if match else None


def module_of(parameter: str) -> str:
    """The module of a layer, or of the model, that a parameter is in: ``model.layers.3.mlp``, ``model.norm``."""
    match = re.match(r"(model\.layers\.\d+\.\w+|.*)\.", parameter)
    return match[1] if match else ""
