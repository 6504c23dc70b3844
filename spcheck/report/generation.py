"""What a run generated, as lines of plain text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from spcheck.judge.generation import Generation, Speech, Turn
from spcheck.plan.plan import Plan

_WIDTH = 80


def generation_lines(generation: Generation | None) -> Iterator[str]:
    """How many tokens, and how many drafts were accepted at each place; nothing for a case that generates nothing."""
    if generation is None:
        return
    turns = generation.turns
    requests = len({(turn.dp, turn.request) for turn in turns})
    of = f"of {requests} request{'s' if requests > 1 else ''}"
    steps = f"{generation.steps} step{'s' if generation.steps != 1 else ''}"
    tokens = f"{generation.tokens} token{'s' if generation.tokens != 1 else ''}"
    yield f"generated    {tokens} {of}, {steps} after the first; {_state(turns)}"
    if generation.ended:
        yield f"             {generation.asked} steps were asked for, and no request has a position left"
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
    text = f"drafts       {accepted} accepted of {verified}, by position {', '.join(f'{a}/{n}' for a, n in places)}"
    yield from textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 13)
    if accepted:
        yield f"             mean accepted length {generation.mean_accepted_length:.2f}, the model's own token counted"
    else:
        yield "             no step went on with an accepted draft (see README on small vocabularies)"


def turn_lines(generation: Generation | None, plan: Plan) -> Iterator[str]:
    """Every request of every step, one line each: what ``--verbose`` adds."""
    if generation is None:
        return
    yield "tokens of each step (sampled behind a rejected draft) | accepted drafts | drafted then"
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
    behind = speech.sampled[len(speech.emitted) :]  # a rejected draft: said where the sides differ
    rejected = f" ({' '.join(map(str, behind))})" if behind and not turn.alike else ""
    drafted = " ".join(map(str, speech.drafted)) or "-"
    return f"{' '.join(map(str, speech.emitted))}{rejected} | {accepted} | {drafted}"


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
