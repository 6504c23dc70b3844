"""Values of routed experts: from rows sorted by expert, on the ranks that computed them, to the rows of their tokens.

A rank's experts see dispatched rows: all ranks' rows, block by block in the order of the dispatch group, or (with
all-to-all) of each rank those that chose one of its experts. Real rows come before padding in every block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spcheck.plan.dispatch import expert_rows, experts_of, is_by_choice, is_dispatched
from spcheck.plan.phases import Phase
from spcheck.plan.place import Place
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.subjects.protocol import Tap


@dataclass(frozen=True)
class Dispatch:
    """How the rows of one forward reach the experts of one rank; ``phases`` are those of all data-parallel ranks.

    ``received`` has the rows that came from each rank of the dispatch group, by module, for all-to-all.
    """

    plan: Plan
    side: SidePlan
    place: Place
    phases: Sequence[Phase]
    received: Mapping[str, tuple[int, ...]]

    @property
    def by_choice(self) -> bool:
        """Whether a row travels only to ranks that own one of its experts."""
        return is_by_choice(self.side, self.plan.case)

    def replays(self, tap: Tap) -> bool:
        """Whether the other side goes on with what this one chose at a tap."""
        return self.side.is_reference and self.plan.replays(tap)

    @property
    def ranks(self) -> range:
        """Ranks whose results complete a row: the world, or those of the data-parallel rank."""
        return self.place.peers if self.side.plain else range(self.place.dp * self.place.tp)

    def experts(self, rank: int) -> range | None:
        """Experts that a rank computes; None where each has channels of all of them."""
        return experts_of(self.side, self.plan.case, self.plan.config, rank)

    def outgoing(self, probe: str, value: Tensor, owner: Place) -> Tensor:
        """Of the dispatched rows [R, F, k] those that another rank must have to complete its own rows."""
        if self.by_choice:
            return value[self._block_from(probe, owner)].contiguous()
        rows = self._own(owner)
        start = self._offset(owner.dp_rank) + rows.start
        return value[start : start + len(rows)].contiguous()

    def completed(self, parts: Sequence[Tensor | None], ids: Tensor | None) -> Tensor:
        """Own rows [rows, F, k] from what each rank computed; ``ids`` [rows of this rank's experts' input, k]."""
        placed = [self._placed(part, ids, rank) for rank, part in zip(self.ranks, parts, strict=True)]
        present = [part for part in placed if part is not None]
        return joined(present, "Shard(1)" if self.experts(0) is None else "Partial")

    def _placed(self, part: Tensor | None, ids: Tensor | None, rank: int) -> Tensor | None:
        """Where only chosen rows travelled: each back at its own row, zero where it was not sent."""
        if part is None or not self.by_choice:
            return part
        own = self._own(self.place)
        base = 0 if self.side.sharded else own.start
        out = part.new_zeros(len(own), *part.shape[1:])
        if ids is None:
            return out.fill_(math.nan)
        sent = self._sent(ids, rank)
        real = sent[sent < self._real]
        if len(real) > len(part):
            return out.fill_(math.nan)
        mine = (real >= base) & (real < base + len(own))
        out[real[mine] - base] = part[: len(real)][mine]
        return out

    @property
    def _real(self) -> int:
        """Of this rank's rows at the experts those that are tokens."""
        phase = self.phases[self.place.dp_rank]
        return len(self._own(self.place)) if self.side.sharded else phase.real

    def _sent(self, ids: Tensor, rank: int) -> Tensor:
        """Rows that a rank must be sent, ascending; to a rank out of reach of the dispatch group goes none."""
        experts = self.experts(rank)
        chosen = ids >= 0 if experts is None else (ids >= experts.start) & (ids < experts.stop)
        return chosen.any(dim=1).nonzero().flatten()

    def _block_from(self, probe: str, owner: Place) -> slice:
        """The rows that came from the owner's shard, or without SP from the rank of its DP rank in this column."""
        counts = self.received.get(probe.removesuffix(".act_fn.out"), ())
        source = owner.rank if self.side.sharded else owner.dp_rank
        if source >= len(counts):
            return slice(0, 0)
        return slice(sum(counts[:source]), sum(counts[: source + 1]))

    def _own(self, owner: Place) -> range:
        return self.phases[owner.dp_rank].owned(owner.tp_rank, self.side.tp)

    def _offset(self, dp_rank: int) -> int:
        """The first dispatched row of a data-parallel rank."""
        if not is_dispatched(self.side, self.plan.case):
            return 0
        return sum(expert_rows(self.side, phase) for phase in self.phases[:dp_rank])


def joined(parts: Sequence[Tensor], placement: str) -> Tensor:
    """Pieces of the same rows on several ranks as one value: channels side by side, or summands added in rank order."""
    # A subject whose ranks disagree on the rows broke the token-count contract, and that is reported as such.
    rows = min(len(part) for part in parts)
    cut = [part[:rows] for part in parts]
    if placement == "Shard(1)":
        return torch.cat(cut, dim=1)
    total = cut[0]
    for part in cut[1:]:
        total = total + part
    return total


def by_token(rows: Tensor, ids: Tensor | None, experts: range | None) -> Tensor:
    """Rows [pairs, F] sorted by expert and token row -> [tokens, F, k], zero where another rank computes the pair.

    ``ids`` [tokens, k] are the experts; not a number where the rows are not as many as the ids say.
    """
    if ids is None:
        return rows.new_full((1, rows.shape[1], 1), math.nan)
    flat = ids.flatten()
    places = _own_pairs(flat, experts).nonzero().flatten()
    places = places[flat[places].argsort(stable=True)]
    out = rows.new_zeros(flat.shape[0], rows.shape[1])
    if len(places) == len(rows):
        out[places] = rows
    else:
        out.fill_(math.nan)
    return out.view(*ids.shape, rows.shape[1]).transpose(1, 2)


def miscount(rows: Tensor, ids: Tensor | None, experts: range | None) -> tuple[int, int] | None:
    """Rows that experts computed and pairs of (token, choice) that are theirs, where these are not as many."""
    pairs = len(rows) if ids is None else int(_own_pairs(ids.flatten(), experts).sum())
    return None if pairs == len(rows) else (len(rows), pairs)


def _own_pairs(ids: Tensor, experts: range | None) -> Tensor:
    return ids >= 0 if experts is None else (ids >= experts.start) & (ids < experts.stop)
