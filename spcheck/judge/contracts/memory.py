"""The memory contract: bytes of parameters in every module of a rank, and bytes of a row of every probed value.

How many rows a value has is the row contract's, so that the two hold the whole size of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from spcheck.families.deepseek.activations import row_widths
from spcheck.families.deepseek.parameters import parameters
from spcheck.judge.contracts.check import Breach, Checked, Reports, first_of_each_place
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan


def check_memory(plan: Plan, reports: Reports) -> Checked:
    """Both subjects on every rank. A module or value that is not there at all is another contract's."""
    checked, breaches = 0, []
    for subject, side in plan.sides:
        held = parameter_bytes(plan, side)
        widths = {probe: width.bytes for probe, width in row_widths(plan, side).items()}
        for report in reports:
            log = report.get(subject, {})
            rank, seen, rows = report["rank"], log.get("parameters", {}), log.get("row_bytes", {})
            checked += len(seen) + len(rows)
            for module, found, wanted in _unequal(held if seen else {}, seen):
                message = f"{module}: {found} bytes of parameters on rank {rank}, {_wanted(wanted, side)}"
                breaches.append(Breach("memory", message, subject, module, None, rank))
            for probe, found in ((probe, size) for probe, sizes in rows.items() for size in sizes):
                if found != widths.get(probe, 0):
                    message = f"{probe}: rows of {found} bytes on rank {rank}, {_wanted(widths.get(probe, 0), side)}"
                    breaches.append(Breach("memory", message, subject, probe, None, rank))
    return Checked(checked, first_of_each_place(breaches))


def parameter_bytes(plan: Plan, side: SidePlan) -> Mapping[str, int]:
    """Module -> bytes of its parameters on one rank."""
    held: Counter[str] = Counter()
    for weights in parameters(plan, side):
        held[weights.module] += weights.bytes
    return held


def _unequal(wanted: Mapping[str, int], seen: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for name in {**wanted, **seen}:
        found, expected = seen.get(name, 0), wanted.get(name, 0)
        if found != expected:
            yield name, found, expected


def _wanted(size: int, side: SidePlan) -> str:
    return f"{size} expected under {side.scheme}"
