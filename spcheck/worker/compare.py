"""Two aligned forwards of the pair, measured probe by probe on the rank that owns the rows: numbers, no opinion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spcheck.comm.interface import World
from spcheck.families.deepseek.bounds import bound_of
from spcheck.families.deepseek.exact import SHORT_SUM, point_of
from spcheck.families.deepseek.rows import may_be_silent
from spcheck.plan.phases import Phase
from spcheck.subjects.protocol import Tap
from spcheck.worker.align import Aligned, ReplicaFault, owned_rows
from spcheck.worker.capture import TapError
from spcheck.worker.choices import Choices, measure_choices
from spcheck.worker.expert_rows import GATE_CHOICE, count_experts
from spcheck.worker.explain import LOOKED_AT, Explainer
from spcheck.worker.measure import Difference, Pair, measure_all, measure_sets
from spcheck.worker.replay import is_choice, scores_of
from spcheck.worker.sameness import Sameness
from spcheck.worker.script import Script
from spcheck.worker.snap import snap

Values = dict[str, Tensor]
Row = dict[str, Any]
_Found = tuple[Difference, int | None, Row]
"""What was measured, the first row that straddles, and what else there is to say."""

_HEADS = ".head_weights.out"
_LOGITS = ("lm_head.out", ".shared_head.head.out", "sampler.in")
_FEW = 32  # logits: all of a row may cancel, as scores may, and those of as many heads

_CACHE = Tap("", "out", 0, "Replicate", "value")


class Comparer:
    """Measures what is complete on this rank and appends numbers to the report."""

    def __init__(
        self, script: Script, world: World, reference: Mapping[str, Tap], candidate: Mapping[str, Tap], report: Row
    ) -> None:
        self._plan = plan = script.plan
        self._numerics = plan.case.numerics
        self._place = plan.place(world.rank)
        self._taps = _agreed(reference, candidate)
        self._explain = Explainer(plan, candidate)
        self._report = report
        self._sameness = Sameness(script, self._place)

    def __call__(self, phase: Phase, expected: Aligned, actual: Aligned) -> None:
        """Compares every probe of one forward, in the candidate's execution order; the unpaired ones come last.

        A rank whose data-parallel rank is idle has nothing to compare: its dummy rows are padding.
        """
        if not phase.real:
            return
        self._sameness.look(phase, expected.values, self._tap)
        paired = [probe for probe in actual.order if probe in expected.values]
        known = set(paired)
        alone = [
            probe
            for probe in (*expected.order, *actual.order)
            if probe not in known and not may_be_silent(probe, self._plan.config, phase)
        ]
        measured = self._measured(phase, paired, expected.values, actual.values)
        for probe in [*paired, *alone]:
            tap = self._tap(probe)
            row: Row = {"probe": probe, "phase": phase.kind, "call": phase.call, "kind": tap.family}
            row |= measured.get(probe) or {"unpaired": "reference" if probe in expected.values else "candidate"}
            row |= self._faults(tap, phase, expected.replica_faults.get(probe), actual.replica_faults.get(probe))
            row |= {"miscount": list(actual.miscounts[probe])} if probe in actual.miscounts else {}
            self._report["probes"].append(row)
            if probe.endswith(GATE_CHOICE) and probe in expected.values:
                counts = count_experts(expected.values[probe], self._plan)
                self._report["expert_rows"].append([probe, phase.call, *counts])

    def finish(self) -> None:
        """Reports what is known once all forwards were compared."""
        self._report["sameness"] = self._sameness.report()

    def _measured(self, phase: Phase, probes: Sequence[str], expected: Values, actual: Values) -> dict[str, Row]:
        """Probe -> what was measured, and where."""
        found = {p: self._chosen(p, expected, actual) for p in probes if self._tap(p).choice}
        pairs = {p: self._pair(p, expected, actual) for p in probes if p not in found}
        for (probe, compared), difference in zip(pairs.items(), measure_all(list(pairs.values())), strict=True):
            found[probe] = self._after_snap(probe, difference, compared)
        rows = {unit: owned_rows(unit, phase, self._place) for unit in {self._tap(probe).unit for probe in found}}
        wrong = [probe for probe in probes if found[probe][0].rows_over][:LOOKED_AT]
        clues: dict[str, Row] = {}
        for probe in wrong:
            pair, unit = pairs.get(probe), self._tap(probe).unit
            both = (expected[probe], actual[probe]) if pair is None else (pair.expected, pair.actual)
            clues[probe] = self._explain(probe, self._tap(probe), *both, found[probe][0], rows[unit], expected)
        return {
            probe: {
                "difference": vars(d),
                "bound": pairs[probe].bound if probe in pairs else 0.0,
                **self._located(d, straddle, more, rows[self._tap(probe).unit]),
                **more,
                **clues.get(probe, {}),
            }
            for probe, (d, straddle, more) in found.items()
        }

    def _pair(self, probe: str, expected: Values, actual: Values) -> Pair:
        """Both sides with the same thing in each column, and the bound."""
        # A replayed choice stands in the reference's order in both.
        ids = expected if self._plan.replays_choices else actual
        e, a = _paired_columns(self._tap(probe), expected[probe], actual[probe], expected, ids)
        bound = bound_of(self._numerics, probe)
        if self._numerics == "exact":
            return Pair(e, a, bound * _conditioning(probe, expected), one_scale=bound > 0)
        few = probe.endswith(_HEADS) or (probe.endswith(_LOGITS) and e.shape[-1] < _FEW)
        one_scale = few or (self._tap(probe).fill < -1 and self._plan.replays_choices)
        return Pair(e, a, bound, one_scale=one_scale, scale=_score_scale(probe, expected))

    def _tap(self, probe: str) -> Tap:
        return self._taps.get(probe) or _CACHE

    def _after_snap(self, probe: str, before: Difference, pair: Pair) -> _Found:
        """Exact numerics: the rows that stay unequal after the snap, and the first that is so for rounding alone."""
        point = point_of(probe)
        if point is None or self._plan.grid is None or not before.unequal_rows or before.rows_over:
            return before, None, {}
        bits = point.bits(self._plan.grid)
        apart = (snap(pair.expected, bits) != snap(pair.actual, bits)) & pair.expected.isfinite()
        unequal = apart.any(dim=1).nonzero().flatten()
        straddle = int(unequal[0]) if len(unequal) else None
        return replace(before, unequal_rows=len(unequal)), straddle, {}

    def _chosen(self, probe: str, expected: Values, actual: Values) -> _Found:
        """A choice as a set; and where its scores are probed too, by its margin."""
        e, a = expected[probe], actual[probe]
        difference = measure_sets(e, a)
        scores = scores_of(probe)
        if not is_choice(probe, self._taps) or scores not in expected or scores not in actual or not len(e):
            return difference, None, {}
        if any(len(x) != len(e) for x in (a, expected[scores], actual[scores])):
            return difference, None, {}  # rows are missing on one side: a finding of its own
        choices = measure_choices(e, a, expected[scores], actual[scores])
        if self._plan.replays_choices and difference.rows_over:
            difference = _beyond_only(difference, choices)
        return difference, None, {"choices": vars(choices)}

    def _located(self, difference: Difference, straddle: int | None, more: Row, owned: list[tuple[int, int]]) -> Row:
        """Local rows of a difference as (request, position); a misshapen value has no such row."""
        out: Row = {}
        flip = more.get("choices", {}).get("first_flip")
        places = {"worst": difference.worst_row, "first": difference.first_over, "straddle": straddle, "flip": flip}
        for name, row in places.items():
            if row is not None and row < len(owned):
                out[name] = self._at(*owned[row])
        return out

    def _faults(self, tap: Tap, phase: Phase, expected: ReplicaFault | None, actual: ReplicaFault | None) -> Row:
        """Replicas that differ: on which rank, the first row, and the row whose value it holds, if there is one."""
        out: Row = {}
        for name, fault in (("reference_replica", expected), ("replica", actual)):
            if fault is not None:
                rank, row, source = fault
                units = phase.units(tap.unit)
                out[name] = {"rank": rank, **self._at(*units[row])}
                if source is not None:
                    out[name]["source"] = list(units[source])
        return out

    def _at(self, request: int, position: int) -> Row:
        return {"dp": self._place.dp_rank, "request": request, "position": position}


def _conditioning(probe: str, values: Values) -> float:
    """How much larger than a step's bound the error of a correct step can be, for its own inputs.

    The error of a long sum grows with its terms: the rigorous n 2^-53 is eight times this. The LayerNorm of the index
    key centres its input, which cancels: its error grows with max|x| / std of the input.
    """
    point = point_of(probe)
    if point is not None and point.sums:
        return max(values[probe].shape[-1] / SHORT_SUM, 1.0)
    x = values.get(probe.replace(".k_rope.out", ".k_norm.in"))
    if x is None or not probe.endswith(".indexer.k_rope.out") or not len(x):
        return 1.0
    spread = x.std(dim=1, correction=0).clamp(min=torch.finfo(x.dtype).tiny)
    return max(float((x.abs().amax(dim=1) / spread).max()), 1.0)


def _score_scale(probe: str, values: Values) -> Tensor | None:
    """[rows]: what the rounding of an index score is relative to, since its terms are of either sign and may cancel.

    Sum over heads of |g| |q|, times the largest |k|; None where that was not probed.
    """
    prefix = probe.removesuffix("choose.in")
    parts = [values.get(f"{prefix}{name}.out") for name in ("head_weights", "q_rope", "k_rope")]
    g, q, k = parts
    if not probe.endswith(".indexer.choose.in") or g is None or q is None or k is None or not len(k):
        return None
    heads = torch.linalg.vector_norm(q.double().view(*g.shape, -1), dim=-1)
    scale: Tensor = (g.double().abs() * heads).sum(dim=1) * torch.linalg.vector_norm(k.double(), dim=-1).max()
    return scale


def _beyond_only(difference: Difference, choices: Choices) -> Difference:
    """Where choices are replayed a flip that the scores' error explains is no difference."""
    if not choices.beyond:
        return replace(difference, rows_over=0, wrong=[], first_over=None, max_rel=0.0, max_abs=0.0, note="")
    # Which rows these are is not told.
    return replace(difference, rows_over=choices.beyond, first_over=choices.first_beyond, wrong=None)


def _agreed(reference: Mapping[str, Tap], candidate: Mapping[str, Tap]) -> dict[str, Tap]:
    """Probe -> tap. A candidate must not decide how it is compared: both have to say the same kind.

    Raises:
        TapError: they do not.
    """
    for probe in reference.keys() & candidate.keys():
        if reference[probe].family != candidate[probe].family:
            kinds = f"{reference[probe].kind!r} in the reference and {candidate[probe].kind!r} in the candidate"
            raise TapError(f"probe {probe} is of kind {kinds}")
    return {**candidate, **reference}


def _paired_columns(tap: Tap, e: Tensor, a: Tensor, e_ids: Values, a_ids: Values) -> tuple[Tensor, Tensor]:
    """Both sides [rows, width] with the same thing in each column; by id where a tap says so."""
    if tap.ids:
        width = max(e.shape[-1], a.shape[-1])
        e, a = _by_id(e, e_ids.get(tap.ids), width, tap.fill), _by_id(a, a_ids.get(tap.ids), width, tap.fill)
    elif tap.kind in ("scores", "keys") and e.shape[-1] != a.shape[-1]:
        width = max(e.shape[-1], a.shape[-1])
        e, a = (F.pad(x, (0, width - x.shape[-1]), value=tap.fill) for x in (e, a))
    return (e.flatten(1), a.flatten(1)) if e.ndim > 2 or a.ndim > 2 else (e, a)


def _by_id(values: Tensor, ids: Tensor | None, width: int, fill: float) -> Tensor:
    """Values [rows, (heads,) k] in the order of their ids [rows, k], with as many empty places as make up the width.

    As they are where the ids do not fit.
    """
    if ids is None or (ids.shape[0], ids.shape[-1]) != (values.shape[0], values.shape[-1]):
        return values
    values, ids = (
        F.pad(values, (0, width - ids.shape[-1]), value=fill),
        F.pad(ids, (0, width - ids.shape[-1]), value=-1),
    )
    order = ids.long().argsort(dim=1)
    return values.gather(-1, order if values.ndim == 2 else order.unsqueeze(1).expand_as(values))
