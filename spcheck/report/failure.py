"""A failed run as lines of plain text: where the ranks parted, what each of them did last, and the first one's stack."""

from __future__ import annotations

from collections.abc import Iterable

from spcheck.contracts.divergence import Divergence
from spcheck.failure import Failure, RankState, call_text

_STACK_LINES = 15


def failure_lines(failure: Failure | None) -> Iterable[str]:
    """Nothing for a run that came to its end."""
    if failure is None:
        return
    if failure.divergence is not None:
        yield from _divergence(failure.divergence)
    yield ""
    for state in failure.ranks:
        yield from _rank(state)
    if failure.stack:
        yield ""
        yield from _stack(failure)


def _divergence(divergence: Divergence) -> Iterable[str]:
    """A table of two columns, one row per rank, below the last collective on which they agreed."""
    yield ""
    yield f"{'collective':<12}{'what each rank calls'}"
    if divergence.before is not None:
        yield f"{f'{divergence.number}, all':<12}{call_text(divergence.before)}"
    for rank, call in divergence.calls.items():
        yield f"{f'{divergence.number + 1}, rank {rank}':<12}{call_text(call)}"


def _rank(state: RankState) -> Iterable[str]:
    yield f"{f'rank {state.rank}':<9}{state.state}"
    for name, value in (
        ("in", state.where),
        ("probe", state.last_probe),
        ("collective", state.last_collective),
    ):
        if value:
            yield f"  {'last ' * (name != 'in') + name:<17}{value}"


def _stack(failure: Failure) -> Iterable[str]:
    lines = failure.stack.rstrip().splitlines()
    left_out = len(lines) - _STACK_LINES
    yield f"rank {failure.first}, {lines[0]}"
    if left_out > 1:
        yield f"  ... {left_out - 1} lines more in --json"
    yield from lines[max(left_out, 1) :]
