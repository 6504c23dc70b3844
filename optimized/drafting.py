"""What drafting goes on from: the rows of a target step, then the last rows of the draft step before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from optimized.batch import Chunk, NewRows
from optimized.forward_context import ForwardContext


@dataclass(frozen=True)
class TargetStep:
    """The last target step. Draft step 0 has its rows, but for those of rejected drafts.

    It runs in the same forward context where no DP rank verified drafts, so that every rank has the same rows again.
    """

    chunks: Sequence[Chunk]
    ids: Tensor  # [real rows]
    hidden: Tensor  # [n, D], after the final norm
    sampled: Tensor  # [S], of each chunk the rows before its drafts and the last one
    accepted: Sequence[int]  # drafts of each chunk that hold
    num_tokens: int  # n, padding included
    context: ForwardContext

    def check(self, requests: Sequence[int]) -> None:
        """Raises ValueError where these are not the step's requests."""
        own = [chunk.request for chunk in self.chunks]
        if list(requests) != own:
            raise ValueError(f"draft step 0 is of the requests of the target step, {own}, not {list(requests)}")

    @property
    def kept(self) -> list[NewRows]:
        """The rows of each chunk without its rejected drafts."""
        pairs = zip(self.chunks, self.accepted, strict=True)
        return [NewRows(c.request, c.start, c.ids.shape[0] - c.num_drafts + accepted) for c, accepted in pairs]

    @property
    def kept_rows(self) -> Tensor:
        """Which of the step's rows these are, [r]."""
        firsts = _firsts(chunk.ids.shape[0] for chunk in self.chunks)
        kept = zip(firsts, self.kept, strict=True)
        return self.ids.new_tensor([row for first, rows in kept for row in range(first, first + rows.count)])

    @property
    def following(self) -> Tensor:
        """The token behind each chunk's kept rows [requests]: the one that is known, else the one sampled there."""
        firsts = _firsts(chunk.num_drafts + 1 for chunk in self.chunks)
        rows = [first + accepted for first, accepted in zip(firsts, self.accepted, strict=True)]
        known = self.ids.new_tensor([-1 if chunk.following is None else chunk.following for chunk in self.chunks])
        return known.where(known >= 0, self.sampled[rows])


@dataclass(frozen=True)
class Drafted:
    """The last rows of a draft step, one per request: what the next one goes on from."""

    step: int
    requests: Sequence[int]
    hidden: Tensor  # [requests, D], after shared_head.norm
    tokens: Tensor  # [requests]
    positions: Sequence[int]  # of the rows to come

    def of(self, requests: Sequence[int]) -> Drafted:
        """The rows of some of the requests, in this order.

        Raises:
            ValueError: the step did not draft for one of them.
        """
        if strangers := [r for r in requests if r not in self.requests]:
            raise ValueError(f"draft step {self.step} was not for request {strangers[0]}")
        rows = [self.requests.index(r) for r in requests]
        positions = [self.positions[row] for row in rows]
        return Drafted(self.step, requests, self.hidden[rows], self.tokens[rows], positions)


def _firsts(counts: Iterable[int]) -> list[int]:
    """Where each of several parts begins that lie one after the other."""
    return [0, *accumulate(counts)][:-1]
