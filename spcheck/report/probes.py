"""Every probe of every forward, one line each: what ``--verbose`` adds to the report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from spcheck.families.deepseek.bounds import BOUNDS
from spcheck.families.deepseek.exact import STEP_BOUND
from spcheck.judge.merge import ProbeResult
from spcheck.judge.verdict import Comparison
from spcheck.subjects.protocol import CHOICES

_HEAD = f"{'':<8} {'rows':>4} {'equal':>5} {'error':>7}  probe"
_TAKEN = _HEAD.index("probe")


def probe_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """All probes in execution order, under a heading for each forward.

    The name stands last and is never cut, since half a name fits two probes: a long one gets the next line.
    """
    bound = _bound(comparison.plan.case.numerics)
    for (phase, call), results in groupby(comparison.results, key=lambda r: (r.phase, r.call)):
        yield f"{comparison.plan.forward_name(phase, call)}, {bound}"
        yield _HEAD
        for result in results:
            fits = len(result.probe) <= width - _TAKEN
            yield from [f"{_figures(result)}  {result.probe}"] if fits else [_figures(result), f"  {result.probe}"]
        yield ""


def _bound(numerics: str) -> str:
    if numerics == "exact":
        return f"exact (a step that rounds: {STEP_BOUND:.0e} of the largest)"
    return f"bound {BOUNDS[numerics]:.0e} of a row's largest element"


def _figures(r: ProbeResult) -> str:
    """State, rows compared, rows equal in every bit, and the largest error of a row."""
    error = f"{r.max_rel:.1e}" if r.max_rel else "0"
    if r.kind in CHOICES and r.unequal_rows:
        error = "choice"
    return f"{_state(r):<8} {r.rows:>4} {r.rows - r.unequal_rows:>5} {error:>7}"


def _state(r: ProbeResult) -> str:
    if r.unpaired or not r.rows:
        return "-"  # one side only, which is a finding, or no row to compare
    return "DIFFERS" if r.over else "straddle" if r.straddle else "ok"
