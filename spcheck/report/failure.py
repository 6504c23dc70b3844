"""A failed run as lines of plain text: where the ranks parted, what each did last, and the stack of the first."""

from __future__ import annotations

from collections.abc import Iterable

from spcheck.comm.divergence import Divergence
from spcheck.judge.failure import Failure, RankState, call_text, call_texts

_STACK_LINES = 15
# Frames that say nothing to the author of a subject: three between any two modules, those below its collective, and
# spcheck's own.
_MACHINERY = (
    *("torch/nn/modules/module.py", "torch/distributed/", "torch/utils/_contextlib.py", "<frozen "),
    *("spcheck/comm/", "spcheck/launch/", "spcheck/worker/"),
)


def failure_lines(failure: Failure | None) -> Iterable[str]:
    """Nothing for a run that came to its end."""
    if failure is None:
        return
    if failure.divergence is not None:
        yield from _divergence(failure.divergence)
    yield ""
    for state in failure.ranks:
        yield from _rank(state)
    for state in failure.shown:
        yield ""
        yield from _stack(state)


def _divergence(divergence: Divergence) -> Iterable[str]:
    """A table of two columns, one row per rank, below the last collective on which they agreed."""
    yield ""
    yield f"{'collective':<12}{'what each rank calls'}"
    if divergence.before is not None:
        yield f"{f'{divergence.number}, all':<12}{call_text(divergence.before)}"
    for rank, text in call_texts(divergence.calls).items():
        yield f"{f'{divergence.number + 1}, rank {rank}':<12}{text}"


def _rank(state: RankState) -> Iterable[str]:
    yield f"{f'rank {state.rank}':<9}{state.state}"
    step = f"{state.subject}, {state.step}" if state.subject else state.step
    for name, value in (
        ("step", step),
        ("module", state.module),
        ("last probe", state.last_probe),
        ("collective", state.last_collective),
    ):
        if value:
            yield f"  {name:<11}{value}"


def _stack(state: RankState) -> Iterable[str]:
    """The last frames that say something, whole ones, without the lines that only underline."""
    title, *lines = state.stack.rstrip().splitlines()
    lines = [line for line in lines if line.strip(" ^~")]
    frames = [frame for frame in _frames(lines) if not any(part in frame[0] for part in _MACHINERY)]
    shown: list[str] = []
    while frames and len(shown) + len(frames[-1]) <= _STACK_LINES:
        shown[:0] = frames.pop()
    yield f"rank {state.rank}, {title}"
    if frames:
        yield "  ... the whole is in --json"
    yield from shown


def _frames(lines: Iterable[str]) -> list[list[str]]:
    """The lines of each frame together, and those of the error behind the last one by themselves."""
    frames: list[list[str]] = []
    for line in lines:
        if line.startswith("  File ") or not line.startswith("  ") or not frames:
            frames.append([])
        frames[-1].append(line)
    return frames
