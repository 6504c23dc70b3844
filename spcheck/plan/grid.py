"""The binary grids of exact arithmetic. No torch."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 53
"""Bits of an integer that a float64 holds exactly."""

SMALL_HIDDEN = 1024
"""Up to this hidden size grid A leaves the guard at least a bit of room, even with weights four times as large."""


@dataclass(frozen=True)
class Grid:
    """Bits behind the binary point, for each kind of value that is snapped."""

    name: str
    activation: int
    weight: int
    probability: int
    routing: int
    index: int
    head_weight: int


GRIDS = {
    "A": Grid("A", activation=14, weight=12, probability=20, routing=12, index=10, head_weight=14),
    "B": Grid("B", activation=12, weight=10, probability=18, routing=10, index=8, head_weight=12),
}
