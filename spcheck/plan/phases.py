"""Which token rows each forward of a run has, and which rank owns them: the tool's own computation. No torch.

A row of real tokens is known by (request, position) within its data-parallel rank. Rows of a packed forward are the
requests one after the other, then graph padding up to ``padded``, then the rows a shard adds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from spcheck.plan.steps import Part, Step

DUMMY_ROWS = 1
"""Rows that an idle data-parallel rank runs, so that every rank issues the same collectives."""

Row = tuple[int, int]
"""(request, position)."""


@dataclass(frozen=True)
class Phase:
    """One forward on one data-parallel rank: a target step, or one draft step.

    ``call`` counts the forwards of the same kind over all steps of the run, ``step`` is the number of the target step,
    and ``draft`` that of a draft step within it. ``counts[i]`` rows belong to request ``requests[i]`` and start at
    position ``starts[i]``; ``drafts[i]`` of them, the last ones, are drafted tokens that are verified, None where the
    forward verifies none. ``padded`` >= the number of real rows is what a packed subject runs. A forward that is not
    ``probed`` is not compared; one that is ``recounted`` has other rows than the target step whose context it had used.
    """

    kind: str  # "target", "draft" or "cache"
    call: int
    requests: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    padded: int
    draft: int = 0
    step: int = 0
    drafts: tuple[int, ...] | None = None
    probed: bool = True
    recounted: bool = False

    @cached_property
    def real(self) -> int:
        """Rows that belong to a request."""
        return sum(self.counts)

    @cached_property
    def keys(self) -> int:
        """The most keys that a row sees; 0 where there is no row."""
        return max((start + count for start, count in zip(self.starts, self.counts, strict=True)), default=0)

    def row(self, index: int) -> Row:
        """(request, position) of packed row ``index`` < ``real``."""
        return self.rows[index]

    @cached_property
    def rows(self) -> list[Row]:
        """(request, position) of all real rows."""
        firsts = zip(self.requests, self.starts, self.counts, strict=True)
        return [(request, start + i) for request, start, count in firsts for i in range(count)]

    @cached_property
    def last_rows(self) -> list[Row]:
        """(request, position) of each request's last row."""
        ends = zip(self.requests, self.starts, self.counts, strict=True)
        return [(request, start + count - 1) for request, start, count in ends]

    @cached_property
    def samples(self) -> list[int]:
        """Rows of each request that are sampled: its last one, and one before each draft that is verified."""
        return [1 + n for n in self.drafts or (0,) * len(self.counts)]

    @cached_property
    def sampled_rows(self) -> list[Row]:
        """(request, position) of the rows that are sampled."""
        ends = zip(self.last_rows, self.samples, strict=True)
        return [(request, last - back) for (request, last), n in ends for back in reversed(range(n))]

    def units(self, unit: str) -> list[Row]:
        """What a probe has one entry for: every ``row``, every ``sample``, or every ``request`` (its last row)."""
        return {"row": self.rows, "sample": self.sampled_rows, "request": self.last_rows}[unit]

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
class GraphPadding:
    """How a step is padded: to ``pad_to`` rows, or to the smallest of ``sizes`` that holds it; else not at all.

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
            return None if later_draft or rows > self.pad_to else self.pad_to
        return min((size for size in self.sizes if size >= rows), default=None)


def phases_of(steps: Sequence[Step], padding: GraphPadding) -> list[tuple[Phase, ...]]:
    """The forwards of a run, for each data-parallel rank: per step the target, then the draft steps.

    Draft step 0 has the target's rows without rejected drafts; each later one has one row of each request that still
    drafts, one position further. Of a step whose accepted drafts are not known yet the target alone.
    """
    by_rank: list[list[Phase]] = [[] for _ in steps[0].parts]
    drafted = 0
    for number, step in enumerate(steps):
        forwards = [_forward("target", number, number, step, step.parts, padding)]
        for draft in range(step.draft_steps if step.is_settled else 0):
            forwards.append(_forward("draft", drafted, number, step, step.draft_parts(draft), padding, draft))
            drafted += 1
        for phases, here in zip(by_rank, zip(*forwards, strict=True), strict=True):
            phases.extend(here)
    return [tuple(phases) for phases in by_rank]


def _forward(
    kind: str,
    call: int,
    number: int,
    step: Step,
    parts: Sequence[Sequence[Part]],
    padding: GraphPadding,
    draft: int = 0,
) -> list[Phase]:
    """One forward on every data-parallel rank."""
    padded = padding.padded([sum(part.rows for part in here) for here in parts], later_draft=draft > 0)
    verifies = kind == "target" and step.verifies
    return [
        Phase(
            kind,
            call,
            requests=tuple(part.request for part in here),
            starts=tuple(part.start for part in here),
            counts=tuple(part.rows for part in here),
            padded=rows,
            draft=draft,
            step=number,
            drafts=tuple(part.drafts or 0 for part in here) if verifies else None,
            probed=step.probed,
            recounted=kind == "draft" and draft == 0 and step.verifies,
        )
        for here, rows in zip(parts, padded, strict=True)
    ]


def layer_of(name: str) -> int | None:
    """The decoder layer a probe, cache or module name belongs to, or None outside the layers."""
    match = re.match(r"model\.layers\.(\d+)(\.|$)", name)
    return int(match[1]) if match else None


def module_of(parameter: str) -> str:
    """The module of a layer, or of the model, that a parameter is in: ``model.layers.3.mlp``, ``model.norm``."""
    match = re.match(r"(model\.layers\.\d+\.\w+|.*)\.", parameter)
    return match[1] if match else ""
