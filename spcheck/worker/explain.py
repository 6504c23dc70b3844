"""What a rank sends of the rows that are wrong: clues, and sketches of what stands there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spcheck.plan.phases import Row
from spcheck.plan.plan import Plan
from spcheck.subjects.protocol import Tap
from spcheck.worker.clues import MOST_ROWS, Clues, Look, find_clues
from spcheck.worker.digests import row_sketches
from spcheck.worker.measure import Difference

LOOKED_AT = 3
"""Of the probes of a forward that are over their bound the first ones; what is wrong later follows from them."""

MOST_SKETCHES = 512
"""Rows of a probe whose sketches are sent."""

_HEADS = ("lm_head.out", ".shared_head.head.out")


class Explainer:
    """Looks at wrong rows of one probe after the other."""

    def __init__(self, plan: Plan, candidate: Mapping[str, Tap]) -> None:
        self._plan = plan
        self._candidate = candidate

    def __call__(
        self,
        probe: str,
        tap: Tap,
        expected: Tensor,
        actual: Tensor,
        difference: Difference,
        at: Sequence[Row],
        values: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """``clues`` and ``sketches`` of the wrong rows; nothing where these are not known.

        ``expected`` and ``actual`` are [rows, width] with the same thing in each column, ``at`` are (request, position)
        of all rows, ``values`` the reference's values of the forward.
        """
        wrong = [row for first, last in difference.wrong or () for row in range(first, last + 1)]
        if not wrong or len(expected) != len(actual) or wrong[-1] >= len(at):
            return {}
        out: dict[str, Any] = {"clues": self._clues(probe, tap, expected, actual, wrong, at, values)}
        if has_sketches(tap, expected):
            out["sketches"] = row_sketches(actual[torch.tensor(wrong[:MOST_SKETCHES])]).tolist()
        return out

    def _clues(
        self,
        probe: str,
        tap: Tap,
        expected: Tensor,
        actual: Tensor,
        wrong: Sequence[int],
        at: Sequence[Row],
        values: Mapping[str, Tensor],
    ) -> Clues:
        step = -(-len(wrong) // MOST_ROWS)
        rows = torch.tensor(wrong[::step])
        width = max(expected.shape[1], actual.shape[1])
        e, a = (
            F.pad(x[rows], (0, width - x.shape[1]), value=-1 if tap.choice else tap.fill) for x in (expected, actual)
        )
        alike = {p: x[rows] for p, x in values.items() if x.ndim == 2 and len(x) == len(expected)}
        is_divided = probe.endswith(_HEADS) or tap.kind == "logits" or self._is_divided(probe)
        blocks = self._plan.candidate.tp if is_divided else 1
        return find_clues(
            Look(probe, tap.family, e, a, [at[i] for i in rows.tolist()], alike, self._plan.config, blocks)
        )

    def _is_divided(self, probe: str) -> bool:
        """Whether each rank of the candidate holds a part of the channels."""
        tap = self._candidate.get(probe)
        return tap is not None and tap.placement == "Shard(1)" and tap.kind == "value"


def has_sketches(tap: Tap, value: Tensor) -> bool:
    """Whether rows of a probe [rows, width] can be told from each other by what they hold."""
    return tap.kind in ("value", "logits", "token") or (tap.kind == "set" and value.shape[-1] == 1)
