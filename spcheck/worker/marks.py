"""What the reference holds in the rows of the probes that are wrong first: told once a run is over, and only then.

Wrong rows may hold the value of another rank's row, or of another forward's. So each rank says which of its probes is
wrong first, and all of them send sketches of the reference's rows there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spcheck.comm.interface import World
from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan
from spcheck.subjects.protocol import Tap
from spcheck.worker.align import Aligned
from spcheck.worker.digests import row_sketches
from spcheck.worker.explain import MOST_SKETCHES, has_sketches

Mark = dict[str, Any]

_MOST_FORWARDS = 16
_FED_BY = {"model.embed_tokens.in": (), ".embed_tokens.in": (".shared_head.sampler.out", "sampler.out")}
"""End of a probe's name -> the ends of those of the forward before whose values it takes."""


def marks(
    world: World,
    plan: Plan,
    expected: Sequence[tuple[Phase, Aligned]],
    taps: Mapping[str, Tap],
    probes: Sequence[Mapping[str, Any]],
) -> list[Mark]:
    """Sketches, and chosen experts, of this rank's rows, for the first wrong probe of every rank.

    ``expected`` are all forwards of the reference, and its caches, ``probes`` is what was measured here.
    """
    wanted = _wanted(world, probes)
    out: list[Mark] = []
    for probe, kind, call in sorted(wanted):
        number = next((i for i, (phase, _) in enumerate(expected) if (phase.kind, phase.call) == (kind, call)), 0)
        tap = taps.get(probe, Tap(probe, "out", 0, "Replicate", "value"))
        for phase, aligned in _forwards(expected, kind, call):
            value = aligned.values.get(probe)
            if value is not None and has_sketches(tap, value):
                out.append(_mark(probe, phase, value))
        for name, value in _feeding(probe, expected[max(number - 1, 0)][1]):
            out.append(_mark(name, expected[max(number - 1, 0)][0], value))
        out += _experts(probe, *expected[number])
    return out


def _wanted(world: World, probes: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, int]]:
    """(Probe, kind, call) of the first one that is wrong on any rank."""
    wrong = [row for row in probes if row.get("difference", {}).get("rows_over")]
    mine = {f"{r['probe']} {r['phase']} {r['call']}": torch.zeros(1) for r in wrong[:1]}
    if world.size > 1:
        mine = {name: x for box in world.swap([mine] * world.size) for name, x in box.items()}
    split = [name.rsplit(" ", 2) for name in mine]
    return {(probe, kind, int(call)) for probe, kind, call in split}


def _forwards(expected: Sequence[tuple[Phase, Aligned]], kind: str, call: int) -> list[tuple[Phase, Aligned]]:
    """The one with that number, and others of its kind near it."""
    alike = [(phase, aligned) for phase, aligned in expected if phase.kind == kind]
    return sorted(alike, key=lambda both: abs(both[0].call - call))[:_MOST_FORWARDS]


def _feeding(probe: str, before: Aligned) -> list[tuple[str, Tensor]]:
    ends = next((ends for end, ends in _FED_BY.items() if probe.endswith(end)), ())
    return [(name, value) for name, value in before.values.items() if ends and name.endswith(ends)]


def _mark(probe: str, phase: Phase, value: Tensor) -> Mark:
    sketches = row_sketches(value[:MOST_SKETCHES]).tolist()
    return {"probe": probe, "phase": phase.kind, "call": phase.call, "sketches": sketches}


def _experts(probe: str, phase: Phase, aligned: Aligned) -> list[Mark]:
    """The experts that rows of a layer chose, where the wrong probe is behind that choice."""
    mlp, found, _ = probe.partition(".mlp.")
    ids = aligned.values.get(f"{mlp}.mlp.gate.choose.out")
    if not found or ids is None:
        return []
    return [{"probe": probe, "phase": phase.kind, "call": phase.call, "experts": ids[:MOST_SKETCHES].long().tolist()}]
