"""Which experts rows chose, as counts; and of routed padding whether each row goes where its own gate chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spcheck.plan.dispatch import experts_per_rank
from spcheck.plan.plan import Plan
from spcheck.subjects.protocol import Tap
from spcheck.worker.capture import Piece

GATE_CHOICE = ".mlp.gate.choose.out"


def count_experts(ids: Tensor, plan: Plan) -> tuple[list[int], list[int]]:
    """Ids [rows, K], -1 for none -> rows that chose each expert, and rows that some expert of each rank must see."""
    experts, ranks = plan.config.n_routed_experts, plan.case.ranks
    known = ids[(ids >= 0) & (ids < experts)].flatten().long()
    counts = torch.bincount(known, minlength=experts)
    # A pair of plain subjects may have more ranks than experts, and nobody reads this.
    blocks = ids.long() // max(experts_per_rank(plan.case, plan.config), 1)
    return counts.tolist(), [int((blocks == rank).any(dim=1).sum()) for rank in range(ranks)]


def padded_choices(
    plan: Plan, taps: Mapping[str, Tap], pieces: Sequence[Piece], real_rows: Callable[[Tap], int]
) -> Iterator[dict[str, Any]]:
    """What the gates of one forward chose on this rank for rows that are no token, an entry for each layer of experts.

    ``real_rows`` says how many of a tap's local rows are tokens; the others stand behind them. ``counts`` and
    ``to_rank`` are those of :func:`count_experts`. ``sent`` names the first padded row that was sent to other experts
    than it chose, and ``chosen`` the first whose choice is not the best of its own scores; None where there is none.
    """
    values = {piece.probe: piece.value for piece in pieces}
    for probe, ids in values.items():
        if not probe.endswith(GATE_CHOICE):
            continue
        layer = probe.removesuffix(GATE_CHOICE)
        real = real_rows(taps[probe])
        chosen = ids[real:]
        if not len(chosen):
            continue
        sent, scores = values.get(f"{layer}.mlp.experts.ids"), values.get(f"{layer}.mlp.gate.choose.in")
        counts, to_rank = count_experts(chosen, plan)
        yield {
            "layer": layer,
            "counts": counts,
            "to_rank": to_rank,
            "sent": None if sent is None else _first_other(chosen, sent[real:]),
            "chosen": None if scores is None else _first_other(_best(scores[real:], chosen), chosen),
        }


def _best(scores: Tensor, chosen: Tensor) -> Tensor:
    """Ids [rows, K] of the best scores [rows, E]; as they were chosen where a score is not a number, or none fits."""
    if len(scores) != len(chosen) or scores.shape[1] < chosen.shape[1]:
        return chosen
    best = scores.argsort(dim=1, descending=True, stable=True)[:, : chosen.shape[1]]
    return torch.where(scores.isnan().any(dim=1, keepdim=True), chosen.long(), best)


def _first_other(wanted: Tensor, found: Tensor) -> dict[str, Any] | None:
    """The first row of ids [rows, K] that is another set in ``found``; another shape differs in its first row."""
    row = 0
    if wanted.shape == found.shape:
        differs = (wanted.long().sort(dim=1).values != found.long().sort(dim=1).values).any(dim=1).nonzero()
        if not len(differs):
            return None
        row = int(differs[0])
    return {"row": row, "wanted": wanted[row].tolist(), "found": found[row : row + 1].flatten().tolist()}
