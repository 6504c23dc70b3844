"""What a wrong piece of a parameter is instead: nothing loaded, rounded on the way, or another piece."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from spcheck.families.deepseek.holdings import holdings
from spcheck.families.deepseek.pieces import Holding, Piece
from spcheck.plan.phases import module_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan
from spcheck.worker.expected import Expected, differing, same

_MOST_TRIED = 512
_NARROWER = (torch.float32, torch.bfloat16, torch.float16)


class Lookalikes:
    """Compares a wrong piece with what else the checkpoint has for this side; it reads only when it is asked."""

    def __init__(self, plan: Plan, side: SidePlan, rank: int, expected: Expected) -> None:
        self._plan, self._side, self._rank = plan, side, rank
        self._expected = expected

    def hint(self, holding: Holding, piece: Piece, found: Tensor) -> str:
        """A few words on what ``found`` is in the place of ``piece``; empty where nothing tells."""
        found = found.cpu()
        wanted = self._expected.piece(piece, found.dtype)
        if not found.any() and wanted.any():
            return "all of it is zero: not loaded?"
        for kind in _NARROWER:
            if kind.itemsize < found.dtype.itemsize and same(found, wanted.to(kind).to(found.dtype)):
                return f"it was rounded to {str(kind).removeprefix('torch.')} on the way"
        if 2 * int(differing(found, wanted).sum()) < found.numel():
            return ""
        for rank, other in islice(self._candidates(holding, piece), _MOST_TRIED):
            if same(found, self._expected.piece(other, found.dtype)):
                return _described(piece, other, rank)
        return ""

    def _candidates(self, holding: Holding, piece: Piece) -> Iterator[tuple[int, Piece]]:
        """Pieces of the same shape: of this parameter on any rank, then of its module and its like in other layers."""
        ranks = range(self._plan.case.ranks)
        tables = [(rank, holdings(self._plan, self._side, rank)) for rank in ranks]
        module, last = module_of(holding.name), holding.name.split(".")[-2:]
        for same_name in (True, False):
            for rank, table in tables:
                for other in table:
                    is_near = module_of(other.name) == module or other.name.split(".")[-2:] == last
                    if (other.name == holding.name) != same_name or not is_near:
                        continue
                    yield from ((rank, p) for p in other.pieces if p.tensor and p.shape == piece.shape and p != piece)


def _described(piece: Piece, other: Piece, rank: int) -> str:
    if other.tensor == piece.tensor:
        return f"what stands there is rank {rank}'s part of {other.tensor}"
    return f"what stands there is {other.tensor}"
