"""Probes at which the reference has one value for all rows: a comparison there says nothing about the candidate.

A probe is looked at until two of its rows differ, in most runs for two rows of its first forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spcheck.families.deepseek.rows import ids_probe
from spcheck.plan.phases import Phase
from spcheck.plan.place import Place
from spcheck.subjects.protocol import Tap
from spcheck.worker.align import owned_rows
from spcheck.worker.script import Script

_ENOUGH = 2  # different tokens, or histories
_BLOCK = 2**19  # bytes of the rows that are compared at once: they stay in a core's cache


@dataclass
class _Alike:
    """A probe whose rows on this rank were all equal so far. ``first`` is one of them, [..., width].

    ``tokens`` are those that the rows were fed, ``histories`` fingerprints of all tokens up to them; two of each at
    most.
    """

    first: Tensor
    rows: int = 0
    tokens: set[int] = field(default_factory=set)
    histories: set[str] = field(default_factory=set)


class Sameness:
    """Looks at the reference's values on the rank that owns the rows, forward by forward."""

    def __init__(self, script: Script, place: Place) -> None:
        self._script = script
        self._place = place
        self._varied: set[str] = set()
        self._alike: dict[str, _Alike] = {}

    def look(self, phase: Phase, values: Mapping[str, Tensor], tap_of: Callable[[str], Tap]) -> None:
        """Goes on with the values [rows, ...] of one forward. What was chosen, and caches, are exempt."""
        if phase.kind == "cache":
            return
        for probe, value in values.items():
            if probe in self._varied or not len(value):
                continue
            tap = tap_of(probe)
            if tap.choice:
                continue
            if not self._goes_on(probe, tap, value):
                self._varied.add(probe)
                self._alike.pop(probe, None)
                continue
            self._add_rows(self._alike[probe], len(value), tap, phase, values)

    def report(self) -> dict[str, Any]:
        """Plain data: the probes with two rows that differ, and what is known of the others."""
        alike = {
            probe: {
                "rows": known.rows,
                "width": known.first.numel(),
                "zero": not bool(known.first.any()),
                "digest": _digest(known.first),
                "tokens": sorted(known.tokens),
                "histories": sorted(known.histories),
            }
            for probe, known in self._alike.items()
        }
        return {"varied": sorted(self._varied), "alike": alike}

    def _goes_on(self, probe: str, tap: Tap, value: Tensor) -> bool:
        """Whether all rows equal each other and the earlier ones."""
        first = _comparable(value[0], tap)
        if len(value) > 1 and not torch.equal(first, _comparable(value[-1], tap)):
            return False
        known = self._alike.get(probe)
        if known is None:
            known = _Alike(first.clone())
        wide = max(first.shape[-1], known.first.shape[-1])
        if not torch.equal(_padded(first, wide), _padded(known.first, wide)):
            return False
        if len(value) > 2 and not _all_equal(_comparable(value, tap), first):
            return False
        self._alike[probe] = known
        return True

    def _add_rows(self, known: _Alike, count: int, tap: Tap, phase: Phase, values: Mapping[str, Tensor]) -> None:
        known.rows += count
        fed = values.get(ids_probe(phase.kind, phase.draft, self._script.plan))
        if tap.per_row and fed is not None and len(known.tokens) < _ENOUGH:
            known.tokens |= set(sorted(set(fed.flatten().tolist()))[:_ENOUGH])
        for request, position in owned_rows(tap.unit, phase, self._place):
            if len(known.histories) >= _ENOUGH:
                return
            known.histories.add(self._history(phase, request, position))

    def _history(self, phase: Phase, request: int, position: int) -> str:
        """A fingerprint of the tokens up to a row; of one token alone the same one, however often it stands there."""
        tokens = self._script.fed(phase, self._place.dp_rank, request)[: position + 1]
        if len(set(tokens)) == 1:
            tokens = tokens[:1]
        return blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


def _comparable(value: Tensor, tap: Tap) -> Tensor:
    """Where a row has no score there stands -inf, which is no value: 0 in its place."""
    return value.masked_fill(value == -math.inf, 0.0) if tap.fill == -math.inf else value


def _all_equal(value: Tensor, row: Tensor) -> bool:
    """Whether every row of [rows, ...] equals ``row``; a few rows at a time, at about twice the cost of reading."""
    step = max(_BLOCK // (row.numel() * row.element_size()), 1)
    blocks = (value[at : at + step] for at in range(0, len(value), step))
    return all(_block_equal(block, row) for block in blocks)


def _block_equal(block: Tensor, row: Tensor) -> bool:
    """numpy's comparison is a vector loop, torch's is not; it has no bfloat16, whose bits tell but for -0."""
    if block.is_cpu and block.dtype in (torch.float32, torch.float64):
        return bool((block.numpy() == row.numpy()).all())
    if block.is_cpu and block.dtype == torch.bfloat16:
        bits, wanted = block.view(torch.int16), row.view(torch.int16)
        if bool((bits.numpy() == wanted.numpy()).all()):
            return True
    return bool((block == row).all())


def _padded(row: Tensor, width: int) -> Tensor:
    """Rows of keys are as wide as their forward has keys."""
    return row if row.shape[-1] == width else F.pad(row, (0, width - row.shape[-1]))


def _digest(row: Tensor) -> str:
    """A fingerprint of a row without the empty columns at its end: equal rows have equal ones."""
    columns = row.reshape(-1, row.shape[-1])
    used = columns.any(dim=0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    plain = columns[:, :width].double() + 0.0
    return blake2b(plain.contiguous().numpy(force=True).tobytes(), digest_size=8).hexdigest()
