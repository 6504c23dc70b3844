"""From one report per rank to one result per probe: plain data in, plain data out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

RankReport = dict[str, Any]

_NOWHERE: dict[str, Any] = {"dp": None, "request": None, "position": None}


@dataclass
class ChoiceCounts:
    """Rows of a top-k choice: chosen alike, or otherwise within or beyond what the scores' own error explains.

    ``margin`` is the least distance between the last chosen score and the best one left out, in the reference.
    ``flip_margin`` and ``score_error`` are those of the widest flip.
    """

    compared: int = 0
    agreeing: int = 0
    within: int = 0
    beyond: int = 0
    margin: float | None = None
    flip_margin: float | None = None
    score_error: float | None = None


@dataclass
class ProbeResult:
    """One probe in one forward, over all ranks that own rows of it.

    ``worst`` and ``first`` say where: DP rank, request, position, rank, and ``worst`` the own row and channel.
    ``ranks_over`` are the ranks with a row over the bound. ``histogram`` counts the unequal rows by the binary exponent
    of their error: x holds those from 2**(x - 1) to below 2**x, 1024 the infinite ones too. ``ratio`` is a factor that
    explains the rows of all ranks. By rank, of those that sent them: ``wrong`` are runs of own rows over the bound,
    None where these are not known; ``clues`` what they have in common; ``sketches`` what stands in them; ``miscounts``
    rows that experts computed and choices, where these are not as many. ``marks`` are what the reference has in all
    rows.
    """

    probe: str
    phase: str
    call: int
    kind: str
    rows: int = 0
    unequal_rows: int = 0
    rows_over: int = 0
    bound: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    worst: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    ranks_over: list[int] = field(default_factory=list)
    wrong: dict[int, list[list[int]] | None] = field(default_factory=dict)
    clues: dict[int, dict[str, Any]] = field(default_factory=dict)
    sketches: dict[int, list[list[float]]] = field(default_factory=dict)
    miscounts: dict[int, list[int]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    ratio: float | None = None
    note: str = ""
    reference_nan: bool = False
    choices: ChoiceCounts | None = None
    straddle: dict[str, Any] | None = None
    flip: dict[str, Any] | None = None
    histogram: dict[int, int] = field(default_factory=dict)
    unpaired: str | None = None
    replica: dict[str, Any] | None = None
    reference_replica: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        """Whether this probe's value is wrong: a row over the bound, or a replica that differs."""
        return self.rows_over > 0 or self.replica is not None

    @property
    def bitwise_equal(self) -> bool:
        """Whether every compared row was equal."""
        return self.unequal_rows == 0

    @property
    def median_rel(self) -> float:
        """At least half of the rows have an error of at most this."""
        return self.quantile(Fraction(1, 2))

    @property
    def p99_rel(self) -> float:
        """At least 99% of the rows have an error of at most this."""
        return self.quantile(Fraction(99, 100))

    def quantile(self, share: Fraction) -> float:
        """The upper edge of the bin at which this share of the rows is reached; 0 while equal rows reach it."""
        reached = self.rows - sum(self.histogram.values())
        if reached >= share * self.rows:
            return 0.0
        for exponent, rows in sorted(self.histogram.items()):
            reached += rows
            if reached >= share * self.rows:
                return math.ldexp(1.0, exponent) if exponent < sys.float_info.max_exp else math.inf
        raise AssertionError("the bins hold every unequal row")


def merge_probes(reports: Sequence[RankReport]) -> list[ProbeResult]:
    """One result per (probe, phase, call), in execution order (the order of the rank that saw most)."""
    results: dict[tuple[str, str, int], ProbeResult] = {}
    for report in sorted(reports, key=lambda r: -len(r.get("probes", []))):
        for row in report.get("probes", []):
            key = row["probe"], row["phase"], row["call"]
            result = results.setdefault(key, ProbeResult(row["probe"], row["phase"], row["call"], row["kind"]))
            _add(result, row, report["rank"])
    _add_marks(list(results.values()), reports)
    return list(results.values())


def _add_marks(results: Sequence[ProbeResult], reports: Sequence[RankReport]) -> None:
    """The first probe that is wrong gets all of them."""
    first = next((result for result in results if result.rows_over), None)
    if first is not None:
        first.marks = [{**mark, "rank": report["rank"]} for report in reports for mark in report.get("marks", ())]


def _add(result: ProbeResult, row: dict[str, Any], rank: int) -> None:
    result.unpaired = result.unpaired or row.get("unpaired")
    for name in ("replica", "reference_replica"):
        if name in row:
            setattr(result, name, row[name])
    for name in ("straddle", "flip"):
        places = [place for place in (getattr(result, name), row.get(name)) if place]
        setattr(result, name, min(({"rank": rank, **place} for place in places), key=_place, default=None))
    for name in ("clues", "sketches", "miscount"):
        if name in row:
            getattr(result, "miscounts" if name == "miscount" else name)[rank] = row[name]
    if "choices" in row:
        result.choices = _added(result.choices or ChoiceCounts(), row["choices"])
    if "difference" in row:
        _add_difference(result, row, rank)


def _add_difference(result: ProbeResult, row: dict[str, Any], rank: int) -> None:
    d = row["difference"]
    result.rows += d["rows"]
    result.unequal_rows += d["unequal_rows"]
    result.rows_over += d["rows_over"]
    result.bound = max(result.bound, row.get("bound", 0.0))
    for exponent, rows in d.get("histogram", ()):
        result.histogram[exponent] = result.histogram.get(exponent, 0) + rows
    result.max_abs = max(result.max_abs, d["max_abs"])
    result.reference_nan = result.reference_nan or d["reference_nan"]
    if d["worst_row"] is not None and d["max_rel"] >= result.max_rel:
        result.max_rel = d["max_rel"]
        result.worst = {
            **row.get("worst", _NOWHERE),
            "rank": rank,
            "row": d["worst_row"],
            "channel": d["worst_channel"],
            "expected": d["worst_expected"],
            "actual": d["worst_actual"],
        }
    if d["rows_over"]:
        result.ratio = _common(result.ratio, d["ratio"]) if result.ranks_over else d["ratio"]
        result.ranks_over = sorted({*result.ranks_over, rank})
        result.wrong[rank] = d.get("wrong")
        first = {**row.get("first", _NOWHERE), "rank": rank}
        if result.first is None or _place(first) < _place(result.first):
            result.first, result.note = first, d["note"] or result.note


def _common(factor: float | None, other: float | None) -> float | None:
    """One factor for both, or None."""
    if factor is None or other is None or not math.isclose(factor - 1, other - 1, rel_tol=1e-3):
        return None
    return factor


def _added(counts: ChoiceCounts, c: dict[str, Any]) -> ChoiceCounts:
    margins = [m for m in (counts.margin, c["margin"]) if m is not None]
    flips = c["flip_margin"] is not None
    wider = flips and (c["beyond"] > 0, c["flip_margin"]) >= (counts.beyond > 0, counts.flip_margin or 0.0)
    return ChoiceCounts(
        compared=counts.compared + c["compared"],
        agreeing=counts.agreeing + c["agreeing"],
        within=counts.within + c["within"],
        beyond=counts.beyond + c["beyond"],
        margin=min(margins, default=None),
        flip_margin=c["flip_margin"] if wider else counts.flip_margin,
        score_error=c["score_error"] if wider else counts.score_error,
    )


def total_choices(results: Sequence[ProbeResult]) -> ChoiceCounts:
    """All choices of a run."""
    total = ChoiceCounts()
    for result in results:
        if result.choices is not None:
            total = _added(total, vars(result.choices))
    return total


def _place(where: dict[str, Any]) -> tuple[int, ...]:
    missing = -1  # a misshapen value has no row: it comes first
    return tuple(missing if where[k] is None else where[k] for k in ("dp", "request", "position", "rank"))
