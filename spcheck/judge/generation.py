"""What both sides sampled, drafted and accepted in each step of a run that generates, from the logs. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from spcheck.plan.plan import Plan
from spcheck.subjects.protocol import REJECTION_SAMPLER


@dataclass(frozen=True)
class Speech:
    """What one side did with a request in one step.

    ``sampled`` has a token for each row that is sampled: where drafts are verified one before each of them, and one
    behind the last. ``accepted`` counts the drafts that equal what was sampled, None where none were verified, or the
    side did not say. ``drafted`` are the tokens of its draft steps.
    """

    sampled: tuple[int, ...]
    accepted: int | None
    drafted: tuple[int, ...]

    @property
    def emitted(self) -> tuple[int, ...]:
        """The tokens that are certain now: accepted drafts, and the model's own behind them."""
        return self.sampled[: (self.accepted or 0) + 1]


@dataclass(frozen=True)
class Turn:
    """One request in one step: ``step`` 0 is the case's own, ``position`` that of the first token it samples.

    Both sides verified the same ``drafts``, the reference's. A side is None where it did not come to the step.
    """

    step: int
    dp: int
    request: int
    position: int
    drafts: tuple[int, ...]
    reference: Speech | None
    candidate: Speech | None

    @property
    def alike(self) -> bool:
        """Whether both sides said the same."""
        return self.reference == self.candidate


@dataclass(frozen=True)
class Generation:
    """All turns in order. ``asked``: steps behind the case's own that it wants; ``ended``: nobody can go on before."""

    turns: tuple[Turn, ...]
    asked: int
    ended: bool = False

    @property
    def steps(self) -> int:
        """Steps behind the case's own that the reference came to."""
        return max((turn.step for turn in self.turns if turn.reference), default=0)

    @property
    def tokens(self) -> int:
        """Tokens that the reference emitted."""
        return sum(len(turn.reference.emitted) for turn in self.turns if turn.reference)

    @property
    def accepted(self) -> list[tuple[int, int]]:
        """For each place among the drafts how many of them the reference accepted, and how many it verified."""
        turns = [turn for turn in self.turns if turn.reference and turn.reference.accepted is not None]
        places = range(max((len(turn.drafts) for turn in turns), default=0))
        counts = [(len(turn.drafts), turn.reference.accepted or 0) for turn in turns if turn.reference]
        return [(sum(a > place for _, a in counts), sum(n > place for n, _ in counts)) for place in places]

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens of a turn that verified drafts: the accepted ones and the model's own; None where there is none."""
        lengths = [len(turn.reference.emitted) for turn in self.turns if turn.drafts and turn.reference]
        return sum(lengths) / len(lengths) if lengths else None


def generation_of(plan: Plan, reports: Sequence[dict[str, Any]]) -> Generation | None:
    """What a run generated; None where the case asks for nothing."""
    if not plan.case.generate:
        return None
    steps = range(plan.own_step, len(plan.steps))
    turns = tuple(turn for step in steps for turn in _turns(plan, reports, step))
    ended = plan.steps[-1].is_settled and len(steps) <= plan.case.generate
    return Generation(turns, plan.case.generate, ended)


def _turns(plan: Plan, reports: Sequence[dict[str, Any]], step: int) -> Iterator[Turn]:
    logs = {report["rank"]: report for report in reports}
    for dp_rank in range(plan.case.dp):
        report = logs.get(dp_rank * plan.case.tp, {})
        reference, candidate = (_speeches(plan, dp_rank, step, report.get(name, {})) for name, _ in plan.sides)
        before = _speeches(plan, dp_rank, step - 1, report.get("reference", {})) if step > plan.own_step else {}
        for part in (part for part in plan.steps[step].parts[dp_rank] if not part.goes_on):
            drafted = before[part.request].drafted if part.request in before else ()
            first = part.end - (part.drafts or 0)  # the position of the first token that is sampled
            turn = step - plan.own_step, dp_rank, part.request, first, drafted[: part.drafts or 0]
            yield Turn(*turn, reference.get(part.request), candidate.get(part.request))


def _speeches(plan: Plan, dp_rank: int, step: int, log: dict[str, Any]) -> dict[int, Speech]:
    """Request -> what a side said in one step."""
    said = {(probe, call): tokens for probe, call, tokens in log.get("tokens", ())}
    target, *drafts = [phase for phase in plan.phases[dp_rank] if phase.step == step]
    tokens = iter(said.get(("sampler.out", target.call), ()))
    counts = iter(said.get((REJECTION_SAMPLER, target.call), ()))
    sampled = {r: tuple(islice(tokens, n)) for r, n in zip(target.requests, target.samples, strict=True)}
    accepted = {r: next(counts, None) for r in target.requests}
    drafted: dict[int, list[int]] = {}
    for phase in drafts:
        found = said.get((f"model.layers.{plan.mtp_layer(phase.draft)}.shared_head.sampler.out", phase.call), [])
        for request, token in zip(phase.requests, found, strict=False):
            drafted.setdefault(request, []).append(token)
    return {r: Speech(sampled[r], accepted[r], tuple(drafted.get(r, ()))) for r in target.requests if sampled[r]}
