"""What a run feeds both subjects: the ids of every step, and the plan as far as it is known.

The reference runs first and writes it, forward by forward; the candidate is fed the same, whatever it samples itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from spcheck.plan.phases import Phase
from spcheck.plan.plan import Plan
from spcheck.plan.steps import Part
from spcheck.subjects.protocol import Chunk
from spcheck.worker.capture import TapError


class Script:
    """The tokens of all requests of all data-parallel ranks. ``plan`` grows with what the reference accepts."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self._texts = [token_ids(plan, dp_rank) for dp_rank in range(plan.case.dp)]
        self._drafts: dict[tuple[int, int, int], list[int]] = {}  # (step, dp rank, request) -> tokens drafted there

    @property
    def generates(self) -> bool:
        """Whether the reference's tokens say what comes next."""
        return self.plan.case.generate > 0

    def chunks(self, phase: Phase, dp_rank: int, requests: Collection[int]) -> list[Chunk]:
        """What some requests of a target forward are fed."""
        parts = [part for part in self.plan.steps[phase.step].parts[dp_rank] if part.request in requests]
        return [self._chunk(phase.step, dp_rank, part) for part in parts]

    def fed(self, phase: Phase, dp_rank: int, request: int) -> list[int]:
        """The tokens of a request up to its last row in a forward; without those that its draft steps add."""
        step = self.plan.steps[phase.step]
        parts = step.parts if phase.kind == "target" else step.kept
        part = next(part for part in parts[dp_rank] if part.request == request)
        drafts = self._verifying(phase.step, dp_rank, part)
        return self._texts[dp_rank][request][: part.end - len(drafts)] + drafts

    def hear(self, phases: Sequence[Phase], sampled: Sequence[Sequence[int]]) -> None:
        """Goes on with what the reference sampled in one forward on each data-parallel rank, row by row.

        Raises:
            TapError: it is not one token for each row that is sampled.
        """
        step, kind = phases[0].step, phases[0].kind
        if not self.generates or step < self.plan.own_step:
            return
        for phase, tokens in zip(phases, sampled, strict=True):
            if len(tokens) != len(phase.sampled_rows):
                name, rows = self.plan.forward_name(kind, phase.call), len(phase.sampled_rows)
                raise TapError(f"the reference sampled {len(tokens)} tokens in the {name}, and {rows} rows are sampled")
        if kind == "draft":
            for dp_rank, (phase, tokens) in enumerate(zip(phases, sampled, strict=True)):
                for request, token in zip(phase.requests, tokens, strict=True):
                    self._drafts.setdefault((step, dp_rank, request), []).append(token)
            return
        verifies = self.plan.steps[step].verifies
        accepted = tuple(self._verified(step, d, iter(tokens)) for d, tokens in enumerate(sampled))
        if verifies:
            self.plan = self.plan.going_on(accepted)

    def _verified(self, step: int, dp_rank: int, sampled: Iterator[int]) -> tuple[int, ...]:
        """Appends to each request what is now certain; how many of its drafts that are."""
        counts = []
        for part in self.plan.steps[step].parts[dp_rank]:
            drafts = self._verifying(step, dp_rank, part)
            rows = list(islice(sampled, 1 + len(drafts)))
            count = next((i for i, draft in enumerate(drafts) if draft != rows[i]), len(drafts))
            if not part.goes_on:  # else the prompt says what comes next
                self._texts[dp_rank][part.request] += [*drafts[:count], rows[count]]
            counts.append(count)
        return tuple(counts)

    def _chunk(self, step: int, dp_rank: int, part: Part) -> Chunk:
        text, drafts = self._texts[dp_rank][part.request], self._verifying(step, dp_rank, part)
        ids = text[part.start : part.end - len(drafts)] + drafts
        following = text[part.end] if part.goes_on else None
        return Chunk(part.request, part.start, torch.tensor(ids, device=self._device), part.drafts, following)

    def _verifying(self, step: int, dp_rank: int, part: Part) -> list[int]:
        return self._drafts.get((step - 1, dp_rank, part.request), [])[: part.drafts or 0]


def token_ids(plan: Plan, dp_rank: int = 0) -> list[list[int]]:
    """The prompt of each request of a data-parallel rank; a longer request starts with the tokens of a shorter one.

    One in four is the first or last of a rank's part of the vocabulary, where an index is most easily off by one.
    """
    vocab, tp = plan.config.vocab_size, plan.case.tp
    part = -(-vocab // tp)
    edges = sorted({min(token, vocab - 1) for rank in range(tp) for token in (rank * part, (rank + 1) * part - 1)})
    seed = [plan.case.seed, dp_rank] if dp_rank else [plan.case.seed]
    counts = plan.prompts(dp_rank)
    return [_tokens(np.random.default_rng([*seed, i]), n, vocab, edges) for i, n in enumerate(counts)]


def _tokens(random: np.random.Generator, count: int, vocab: int, edges: list[int]) -> list[int]:
    drawn = [(random.integers(0, vocab), random.random() < 0.25, random.choice(edges)) for _ in range(count)]
    return [int(edge if at_edge else token) for token, at_edge, edge in drawn]
