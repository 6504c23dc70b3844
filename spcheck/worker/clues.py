"""What the wrong rows of a probe have in common, measured on the rank that owns them: numbers and names, no opinion.

Only the first probes of a forward that are over their bound are looked at, and of these some rows: a healthy run costs
nothing. :mod:`spcheck.judge.clues` puts the result into words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from reference.config import ModelConfig
from spcheck.plan.phases import Row
from spcheck.subjects.protocol import CHOICES
from spcheck.worker.bits import narrower_type
from spcheck.worker.norm_clues import other_eps
from spcheck.worker.router_clues import scores_without
from spcheck.worker.turns import turned

Clues = dict[str, Any]

MOST_ROWS = 64
"""Of more wrong rows so many are looked at, evenly spread."""

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Two values of that type are the same if they differ by this share; narrower types tell nothing."""
_FIT = 1e-3  # of a difference: what an explanation may leave
_FEW = 3


@dataclass(frozen=True)
class Look:
    """The wrong rows of one probe. ``expected`` and ``actual`` are [rows, width] with the same thing in each column.

    ``at`` is (request, position) of these rows, ``others`` are the reference's values [rows, ...] of other probes in
    the same rows, in execution order. ``blocks``: over so many ranks channels are divided.
    """

    probe: str
    kind: str
    expected: Tensor
    actual: Tensor
    at: Sequence[Row]
    others: Mapping[str, Tensor]
    config: ModelConfig
    blocks: int

    @cached_property
    def close(self) -> float:
        """The share of itself by which a value of this type may differ and be the same; 0 where it cannot be told."""
        return _CLOSE.get(self.expected.dtype, 0.0) if self.expected.is_floating_point() else _CLOSE[torch.float64]

    @cached_property
    def e(self) -> Tensor:
        """Expected, in float64."""
        return self.expected.double()

    @cached_property
    def a(self) -> Tensor:
        """Actual, in float64."""
        return self.actual.double()

    @cached_property
    def finite(self) -> bool:
        """Whether both are finite in the same places: those that are not are zero in the difference."""
        return torch.equal(self.e.isfinite(), self.a.isfinite())

    @cached_property
    def known(self) -> tuple[Tensor, Tensor]:
        """Both with zero where they are not finite."""
        return self.e.nan_to_num(0.0, 0.0, 0.0), self.a.nan_to_num(0.0, 0.0, 0.0)

    @cached_property
    def gap(self) -> Tensor:
        """Actual minus expected."""
        e, a = self.known
        return a - e

    @cached_property
    def apart(self) -> Tensor:
        """Elements that are not the same, [rows, width] bool."""
        e, _ = self.known
        scale = e.abs().amax(dim=1, keepdim=True)
        return (self.gap.abs() > self.close * scale) | (self.e.isfinite() != self.a.isfinite())


def find_clues(look: Look) -> Clues:
    """Everything that holds for all of the rows; names are those of :data:`_FINDERS`."""
    if not len(look.expected) or not look.close:
        return {}
    if look.kind in CHOICES:  # numbers of things, which have no size
        ids = _ids(look)
        return {} if ids is None else {"ids": ids}
    found = {name: find(look) for name, find in _FINDERS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _not_a_number(look: Look) -> bool | None:
    return True if bool(look.a.isnan().any()) and not bool(look.e.isnan().any()) else None


def _zero(look: Look) -> bool | None:
    return True if not bool(look.a.any()) and bool(look.e.any(dim=1).all()) else None


def _from_zero(look: Look) -> bool | None:
    """Something where the reference has nothing but zeros."""
    return True if not bool(look.e.any()) else None


def _cast(look: Look) -> str | None:
    if not look.finite or look.kind not in ("value", "scores", "logits"):
        return None
    return narrower_type(look.expected, look.actual, look.apart)


def _row_factors(look: Look) -> list[float] | None:
    """Least and largest, where each row is scaled by a factor of its own."""
    e, _ = look.known
    if not look.finite or e.shape[0] < 2:
        return None
    factors, fits = _factors(e, look.gap, dim=1)
    if not fits or float((factors - factors.mean()).abs().amax()) <= _FIT * float((factors - 1).abs().amax()):
        return None
    return [float(factors.min()), float(factors.max())]


def _channel_factors(look: Look) -> bool | None:
    """Whether each channel is scaled by a factor of its own, the same in all rows."""
    e, _ = look.known
    if not look.finite or look.kind != "value" or e.shape[0] < _FEW:
        return None
    factors, fits = _factors(e, look.gap, dim=0)
    return True if fits and float(factors.std()) > _FIT * float((factors - 1).abs().amax()) else None


def _factors(e: Tensor, gap: Tensor, dim: int) -> tuple[Tensor, bool]:
    """The best factor of each row (``dim`` 1) or channel (0), and whether they explain all of the difference."""
    enough = bool((e.count_nonzero(dim=dim) >= _FEW).all())
    excess = (gap * e).sum(dim=dim) / e.square().sum(dim=dim).clamp(min=torch.finfo(e.dtype).tiny)
    rest = gap - excess.unsqueeze(dim) * e
    fits = rest.norm(dim=dim) <= _FIT * gap.norm(dim=dim)
    return 1 + excess, enough and bool(fits.all())


def _part(look: Look) -> list[Any] | None:
    """Another probe and a factor: so much of its value is too much, or too little where negative."""
    if not look.finite or look.kind != "value" or look.e.shape[1] < _FEW:
        return None
    e, _ = look.known
    whole = float(look.gap.norm())
    for probe, value in _alike(look):
        power = float(value.square().sum())
        if power == 0.0 or _parallel(value, e):
            continue
        factor = float((look.gap * value).sum()) / power
        if float((look.gap - factor * value).norm()) <= max(_FIT * look.close**0.5, 1e-6) * whole:
            return [probe, float(f"{factor:.6g}")]
    return None


def _parallel(value: Tensor, e: Tensor) -> bool:
    """Whether one is the other times a number: then it is no part but the whole."""
    factor = float((value * e).sum()) / float(e.square().sum()) if bool(e.any()) else 0.0
    return float((value - factor * e).norm()) <= _FIT * float(value.norm())


def _equals(look: Look) -> str | None:
    """Another probe whose value stands here."""
    if look.kind not in ("value", "scores") or look.e.shape[1] < _FEW:
        return None
    known = look.a.isfinite()
    if int(known.sum()) < _FEW:
        return None
    for probe, value in _alike(look):
        gap = (look.a - value).masked_fill(~known, 0.0)
        if float(gap.norm()) <= look.close * float(value.norm()):
            return probe
    return None


def _alike(look: Look) -> list[tuple[str, Tensor]]:
    """Finite values of other probes of the same shape: those that ran last before this one come first."""
    probes = list(look.others)
    here = probes.index(look.probe) if look.probe in probes else len(probes)
    order = [*reversed(probes[:here]), *probes[here + 1 :]]
    alike = [p for p in order if look.others[p].shape == look.e.shape and look.others[p].is_floating_point()]
    return [(p, look.others[p].double()) for p in alike if bool(look.others[p].isfinite().all())]


def _order(look: Look) -> str | None:
    """``halves`` that are swapped, or another order of the channels."""
    e, a = look.e, look.a
    width = e.shape[1]
    if look.kind != "value" or width < _FEW or not look.finite or not bool(look.apart.any()):
        return None
    scale = look.close * float(e.abs().amax())
    if width % 2 == 0 and float((a - e.roll(width // 2, dims=1)).abs().amax()) <= scale:
        return "halves"
    same = float((a.sort(dim=1).values - e.sort(dim=1).values).abs().amax()) <= scale
    return "order" if same else None


def _channels(look: Look) -> list[int] | None:
    """(block, the block whose values it holds or -1), where only one rank's part of the channels is wrong."""
    blocks, width = look.blocks, look.e.shape[1]
    size = -(-width // blocks)
    if blocks < 2 or width < 2 * blocks or look.kind not in ("value", "logits"):
        return None
    columns = look.apart.any(dim=0).nonzero().flatten()
    if not len(columns) or 2 * len(columns) < min(size, width - (blocks - 1) * size):
        return None
    block = int(columns[0]) // size
    if int(columns[-1]) // size != block:
        return None
    return [block, _source(look, block, size)]


def _source(look: Look, block: int, size: int) -> int:
    """The block of the reference whose values a block holds, -1 where there is none."""
    mine = look.a[:, block * size : (block + 1) * size]
    scale = look.close * float(look.known[0].abs().amax())
    for other in range(look.blocks):
        theirs = look.e[:, other * size : (other + 1) * size]
        if other != block and theirs.shape == mine.shape and float((theirs - mine).abs().amax()) <= scale:
            return other
    return -1


def _mask(look: Look) -> list[int] | None:
    """Elements that are -inf in the candidate alone, and in the reference alone."""
    lost = int(((look.a == -math.inf) & (look.e > -math.inf)).sum())
    gained = int(((look.e == -math.inf) & (look.a > -math.inf)).sum())
    return [lost, gained] if lost or gained else None


def _keys(look: Look) -> list[Any] | None:
    """Which scores are wrong where most are right: ``["newest", n]`` of each row, or keys ``["from", first, last]``."""
    if not look.probe.endswith(".indexer.choose.in"):
        return None
    columns = [row.nonzero().flatten().tolist() for row in look.apart]
    visible = int((look.e.isfinite() | look.a.isfinite()).sum())
    if 2 * sum(map(len, columns)) > visible:
        return None
    ages = {tuple(position - key for key in keys) for keys, (_, position) in zip(columns, look.at, strict=True)}
    oldest = max((age for row in ages for age in row), default=0)
    if len(ages) == 1 and set(*ages) == set(range(oldest + 1)):
        return ["newest", oldest + 1]
    wrong = sorted({key for keys in columns for key in keys})
    return ["from", wrong[0], wrong[-1]] if wrong and wrong[-1] - wrong[0] == len(wrong) - 1 else None


def _ids(look: Look) -> list[Any] | None:
    """An id that cannot be: below 0 where a token must stand, or a key behind the row's own position."""
    single = look.actual.shape[1] == 1
    if single and bool((look.actual < 0).any()):
        return ["none", int(look.actual.min())]
    if look.probe.endswith(".indexer.choose.out"):
        for row, (_, position) in zip(look.actual.tolist(), look.at, strict=True):
            if max(row) > position:
                return ["later", int(max(row)), position]
    return None


_FINDERS: dict[str, Callable[[Look], Any]] = {
    "nan": _not_a_number,
    "zero": _zero,
    "from_zero": _from_zero,
    "mask": _mask,
    "turned": lambda look: turned(look.probe, look.e, look.a, look.at, look.config, look.close),
    "cast": _cast,
    "eps": lambda look: other_eps(look.probe, look.gap, look.others, look.config) if look.finite else None,
    "row_factors": _row_factors,
    "channel_factors": _channel_factors,
    "scores_without": lambda look: scores_without(look.probe, look.e, look.a, look.others, look.config),
    "part": _part,
    "equals": _equals,
    "order": _order,
    "channels": _channels,
    "keys": _keys,
}
"""Clue -> how it is found. A clue is plain data, the same on every rank that sees the same cause."""
