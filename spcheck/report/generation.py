"""What a run generated, as lines of plain text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from spcheck.generation import Generation, Speech, Turn
from spcheck.plan import Plan


def generation_lines(generation: Generation | None) -> Iterator[str]:
    """How many tokens, and how many drafts were accepted at each place; nothing for a case that generates nothing."""
    if generation is None:
        return
    turns = generation.turns
    requests = len({(turn.dp, turn.request) for turn in turns})
    of = f"of {requests} request{'s' if requests > 1 else ''}"
    steps = f"{generation.steps} step{'s' if generation.steps != 1 else ''}"
    yield f"generated    {generation.tokens} tokens {of}, {steps} after the first; {_state(turns)}"
    yield from _drafts(generation)


def _state(turns: Sequence[Turn]) -> str:
    compared = [turn for turn in turns if turn.reference and turn.candidate]
    differing = sum(not turn.alike for turn in compared)
    words = [f"{differing} of {len(turns)} turns DIFFER"] if differing else []
    if len(compared) < len(turns):  # the run broke off
        words.append(f"{len(turns) - len(compared)} of {len(turns)} turns not reached by both")
    return ", ".join(words) or "both sides alike"


def _drafts(generation: Generation) -> Iterator[str]:
    places = generation.accepted
    if not places:
        return
    accepted, verified = (sum(counts) for counts in zip(*places, strict=True))
    each = ", ".join(f"{a}/{n}" for a, n in places)
    yield f"drafts       {accepted} accepted of {verified}, by position {each}"
    if accepted:
        yield f"             mean accepted length {generation.mean_accepted_length:.2f}, the model's own token counted"
    else:
        yield "             no step went on with an accepted draft; --set vocab_size=2 makes them likely"


def turn_lines(generation: Generation | None, plan: Plan) -> Iterator[str]:
    """Every request of every step, one line each: what ``--verbose`` adds."""
    if generation is None:
        return
    yield "tokens of each step | accepted drafts | drafted then"
    for turn in generation.turns:
        yield f"{_where(turn, plan):<22} {_words(turn.reference, turn)}"
        if not turn.alike:
            yield f"{'':<13}candidate {_words(turn.candidate, turn)}"
    yield ""


def _where(turn: Turn, plan: Plan) -> str:
    dp_rank = f"d{turn.dp} " if plan.case.dp > 1 else ""
    return f"step {turn.step}  {dp_rank}r{turn.request} t{turn.position}"


def _words(speech: Speech | None, turn: Turn) -> str:
    if speech is None:
        return "-"
    accepted = f"{speech.accepted} of {len(turn.drafts)}" if speech.accepted is not None else "-"
    drafted = " ".join(map(str, speech.drafted)) or "-"
    return f"{' '.join(map(str, speech.emitted))} | {accepted} | {drafted}"


def generation_json(generation: Generation | None) -> dict[str, Any] | None:
    """Everything, turn by turn."""
    if generation is None:
        return None
    return {
        "steps": generation.steps,
        "tokens": generation.tokens,
        "accepted_by_position": [{"accepted": a, "verified": n} for a, n in generation.accepted],
        "mean_accepted_length": generation.mean_accepted_length,
        "turns": [{**asdict(turn), "alike": turn.alike} for turn in generation.turns],
    }
