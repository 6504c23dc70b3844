"""What a case did not exercise, as lines of plain text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from spcheck.judge.exercised import Missed, NotExercised
from spcheck.plan.phases import layer_of
from spcheck.plan.plan import Plan

_WIDTH = 80


def exercised_lines(missed: NotExercised | None, plan: Plan) -> Iterator[str]:
    """One line, wrapped where it is long; none where everything was exercised, or a run broke off."""
    parts = [] if missed is None else list(_parts(missed, plan))
    if parts:
        label = "not exercised "
        text = label + "; ".join(parts)
        yield from textwrap.wrap(text, _WIDTH, subsequent_indent=" " * len(label), break_on_hyphens=False)


def _parts(missed: NotExercised, plan: Plan) -> Iterator[str]:
    topk = plan.config.index_topk
    if missed.padded_rows.count:
        yield "no row is padded"
    if slots := missed.expert_slots.count:
        yield f"{slots} of {missed.expert_slots.of} expert slots without a row"
    if missed.sparse_choice.count:
        yield f"top-k never left a key out{_in_layers(missed.sparse_choice)} (index_topk {topk})"
    if missed.top_k_skip.count:
        yield f"top-k never skipped{_in_layers(missed.top_k_skip)} (each forward has more than {topk} keys)"
    if drafts := missed.drafts_accepted.names:
        which = "drafts" if missed.drafts_accepted.all else ", ".join(drafts)
        yield f"{which} never accepted"
    if layers := missed.mtp_layers.names:
        yield f"MTP {_numbered('layer', layers)} never used"
    if settings := missed.settings.names:
        yield f"no effect: {', '.join(settings)}"


def _in_layers(missed: Missed) -> str:
    return "" if missed.all else f" in {_numbered('layer', missed.names)}"


def _numbered(word: str, names: tuple[str, ...]) -> str:
    """``layers 5, 6``."""
    return f"{word}{'s' if len(names) > 1 else ''} {', '.join(str(layer_of(name)) for name in names)}"


def exercised_json(missed: NotExercised | None) -> dict[str, Any] | None:
    """By name and count; None for a run that broke off."""
    if missed is None:
        return None
    found = {field.name: getattr(missed, field.name) for field in fields(missed)}
    return {name: {"count": m.count, "of": m.of, "names": list(m.names)} for name, m in found.items()}
