"""What ran: the first lines of a report."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape as escape_markup

from spcheck.judge.notes import batch_text, notes, weights_text
from spcheck.judge.verdict import Comparison
from spcheck.plan.plan import Plan
from spcheck.report.printable import printable

_CHANGES_A_LINE = 3


def escape(text: str) -> str:
    """Text from a name, a path or an error for rich: neither markup nor anything a terminal would obey."""
    return escape_markup(printable(text))


def head_lines(c: Comparison) -> Iterator[str]:
    """Lines with rich markup."""
    case = c.plan.case
    world = f"tp {case.tp}" + (f"  dp {case.dp}" if case.dp > 1 else "")
    backend = c.environment.get("backend", case.backend)
    what = [case.model, world, f"tokens {case.requests_text}", _numerics(c), f"mtp steps {case.mtp_steps}"]
    what += [f"weights {case.weights}"] if case.weights != "plain" else []
    what += [f"generate {case.generate}"] if case.generate else []
    yield escape("  ".join([*what, backend]))
    yield from map(escape, _model_lines(c.plan))
    if not (c.plan.reference.plain and c.plan.reference.tp == case.tp):
        yield escape(_reference(c))
    yield f"scheme {c.plan.scheme}: {escape(c.plan.reason)}"
    yield batch_text(c.plan)
    yield from (f"[yellow]note[/]  {escape(note)}" for note in notes(c.plan))
    if "code" in c.environment:
        yield escape(f"reference and candidate from {c.environment['code']}")
    yield ""


def _model_lines(plan: Plan) -> Iterator[str]:
    """Of a config of one's own, that its weights are not; and what ``--scale`` made of it, some keys a line."""
    if plan.model.named and plan.folder is None:
        yield f"{weights_text(plan)}: no checkpoint was read"
    changes = list(map(str, plan.model.scaled))
    for first in range(0, len(changes), _CHANGES_A_LINE):
        yield f"scaled: {', '.join(changes[first : first + _CHANGES_A_LINE])}"


def _reference(c: Comparison) -> str:
    side = c.plan.reference
    if side.tp < c.plan.case.tp:
        return f"reference {side.name}, on one rank" + (" of each DP rank" if c.plan.case.dp > 1 else "")
    return f"reference {side.name}: {side.reason}"


def _numerics(c: Comparison) -> str:
    grid = c.plan.grid
    return f"exact (grid {grid.name})" if grid else c.plan.case.numerics
