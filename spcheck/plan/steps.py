"""The steps of a run: cached prefixes, a step before, the case's own step, and the steps that generate. No torch.

How many rows a generating step has depends on how many drafts the reference accepted in the one before: the steps of a
case are a function of that history, and grow with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spcheck.case import Case, Requests

PREFILL_ROWS = 512
"""Cached tokens of a request that one step prefills: memory then grows with the context, not with its square."""

Accepted = tuple[tuple[int, ...], ...]
"""Per data-parallel rank, the drafts accepted of each request of a step."""


@dataclass(frozen=True)
class Part:
    """The ``rows`` of one request in one forward, from position ``start`` on.

    The last ``drafts`` of them are drafted tokens to be verified; None where nothing is verified. ``goes_on``: the
    token behind them is the prompt's, and not the model's own.
    """

    request: int
    start: int
    rows: int
    drafts: int | None = None
    goes_on: bool = False

    @property
    def end(self) -> int:
        """The position behind the rows."""
        return self.start + self.rows


@dataclass(frozen=True)
class Step:
    """One target step and its drafts.

    ``parts`` are those of each data-parallel rank; ``draft_steps`` forwards follow, on every rank; a request drafts at
    positions below ``limit``. ``accepted`` is None until it is known. ``name`` is empty for the case's own step. A step
    that is not ``probed`` is not compared.
    """

    name: str
    parts: tuple[tuple[Part, ...], ...]
    draft_steps: int
    limit: int
    probed: bool = True
    accepted: Accepted | None = None

    @cached_property
    def verifies(self) -> bool:
        """Whether drafts are verified on any data-parallel rank."""
        return any(part.drafts is not None for here in self.parts for part in here)

    @property
    def is_settled(self) -> bool:
        """Whether it is known how many rows its draft steps have."""
        return self.accepted is not None or not self.verifies

    @cached_property
    def kept(self) -> tuple[tuple[Part, ...], ...]:
        """The parts without their rejected drafts."""
        accepted = self.accepted or tuple(tuple(part.drafts or 0 for part in here) for here in self.parts)
        return tuple(
            tuple(replace(p, rows=p.rows - (p.drafts or 0) + n, drafts=None) for p, n in zip(here, counts, strict=True))
            for here, counts in zip(self.parts, accepted, strict=True)
        )

    def draft_parts(self, draft: int) -> tuple[tuple[Part, ...], ...]:
        """The rows of a draft step: all that are kept, and later one of each request that is below the limit."""
        if draft == 0:
            return self.kept
        rows = [[Part(p.request, p.end + draft - 1, 1) for p in here] for here in self.kept]
        return tuple(tuple(part for part in here if part.start < self.limit) for here in rows)


def steps_of(
    case: Case, limit: int, previous: Requests | None, accepted: Sequence[Accepted] = ()
) -> tuple[tuple[Step, ...], int]:
    """The steps in order as far as they are known, and the place of the case's own among them.

    Own requests have the first numbers, those of the ``previous`` step the next ones. ``limit`` is the model's number
    of positions, ``accepted`` the history of the generating steps.
    """
    steps = [*_prefixes(case, limit), *_previous(case, limit, previous)]
    own = tuple(
        tuple(_prompt_part(case, d, i, held) for i, held in enumerate(cached))
        for d, cached in enumerate(case.cached_tokens)
    )
    steps.append(Step("", own, case.mtp_steps, limit))
    own_place = len(steps) - 1
    for number in range(1, case.generate + 1):
        step = steps[-1]
        parts = tuple(tuple(_next_parts(case, step, d)) for d in range(case.dp)) if step.is_settled else ()
        if not any(parts):
            break
        known = accepted[number - 1] if number <= len(accepted) else None
        steps.append(Step(f"generated step {number}", parts, case.mtp_steps, limit, accepted=known))
    return tuple(steps), own_place


def _prefixes(case: Case, limit: int) -> Iterator[Step]:
    """The cached tokens of all requests, in steps that are not compared; their drafts fill the MTP caches."""
    longest = max(n for cached in case.cached_tokens for n in cached)
    for start in range(0, longest, PREFILL_ROWS):
        parts = tuple(
            tuple(Part(i, start, min(n - start, PREFILL_ROWS), goes_on=True) for i, n in enumerate(cached) if n > start)
            for cached in case.cached_tokens
        )
        number = f" {1 + start // PREFILL_ROWS}" if longest > PREFILL_ROWS else ""
        yield Step(f"cached prefix{number}", parts, case.mtp_steps, limit, probed=False)


def _previous(case: Case, limit: int, previous: Requests | None) -> Iterator[Step]:
    if previous is None:
        return
    parts = tuple(
        tuple(Part(len(own) + i, 0, n) for i, n in enumerate(here))
        for own, here in zip(case.requests, previous, strict=True)
    )
    yield Step("previous step", parts, case.mtp_steps, limit)


def _prompt_part(case: Case, dp_rank: int, request: int, start: int) -> Part:
    """The new tokens of a prompt from a position on, or as many of them as one step takes."""
    end = case.cached_tokens[dp_rank][request] + case.requests[dp_rank][request]
    rows = min(end - start, case.prefill_chunk or end)
    return Part(request, start, rows, goes_on=start + rows < end)


def _next_parts(case: Case, step: Step, dp_rank: int) -> list[Part]:
    """What follows of each request: the rest of its prompt, or the sampled token and the drafts that have a position.

    What was drafted behind a part of a prompt is dropped. Behind a step that drafts every part verifies, if nothing.
    """
    made = Counter(p.request for draft in range(step.draft_steps) for p in step.draft_parts(draft)[dp_rank])
    parts = []
    for part in (part for part in step.kept[dp_rank] if part.end < step.limit):
        drafts = 0 if part.goes_on else min(made[part.request], step.limit - 1 - part.end)
        prompt = _prompt_part(case, dp_rank, part.request, part.end)
        follows = prompt if part.goes_on else Part(part.request, part.end, 1 + drafts)
        parts.append(replace(follows, drafts=drafts if step.draft_steps else None))
    return parts
