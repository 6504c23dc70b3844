"""The pair on one rank: reference first, then the candidate, measured phase by phase on the rank that owns the rows."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spcheck.comm.interface import World
from spcheck.judge import BOUNDS
from spcheck.phases import Phase
from spcheck.plan import Plan
from spcheck.subject import Tap
from spcheck.worker.align import Aligned, owned_rows
from spcheck.worker.capture import TapError
from spcheck.worker.measure import Difference, measure, measure_sets
from spcheck.worker.side import Side
from spcheck.worker.weights import open_weights

REFERENCE = "reference.subject"
CANDIDATE = "optimized.subject"

Values = dict[str, Tensor]
Taps = Mapping[str, Tap]


def run_rank(world: World, plan: Plan, device: str, report: dict[str, Any]) -> None:
    """Runs the pair on this rank and device; ``report`` fills with plain data as it goes and is whole at the end.

    A failure leaves what was seen up to it in the report, says where, and is raised again.
    """
    report["rank"] = world.rank
    try:
        with torch.inference_mode():
            _run(world, plan, device, report)
    except Exception as error:
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
        raise


def token_ids(plan: Plan) -> list[Tensor]:
    """The new tokens of each request; a longer request with the same seed starts with the same tokens."""
    vocab = plan.config.vocab_size
    streams = [np.random.default_rng([plan.case.seed, i]) for i in range(len(plan.case.requests))]
    return [torch.from_numpy(s.integers(0, vocab, n)) for s, n in zip(streams, plan.case.requests, strict=True)]


def _run(world: World, plan: Plan, device: str, report: dict[str, Any]) -> None:
    weights = open_weights(plan)
    tokens = [ids.to(device) for ids in token_ids(plan)]
    report |= {"probes": [], "expert_rows": []}

    reference = Side(REFERENCE, plan, "reference", weights, world, tokens)
    report["reference"] = reference.log
    expected = [(phase, reference.run(phase)) for phase in plan.phases]
    expected += reference.caches()
    reference.log["silent"] = reference.silent()

    candidate = Side(CANDIDATE, plan, plan.scheme, weights, world, tokens)
    report["candidate"] = candidate.log
    compare = Comparer(plan, world, reference.taps, candidate.taps, report)
    for phase, wanted in expected[: len(plan.phases)]:
        compare(phase, wanted, candidate.run(phase))
    seen_caches = dict(candidate.caches())
    for phase, wanted in expected[len(plan.phases) :]:
        compare(phase, wanted, seen_caches.get(phase, Aligned()))
    candidate.log["silent"] = candidate.silent()


class Comparer:
    """Measures what is complete on this rank and appends numbers to the report."""

    def __init__(self, plan: Plan, world: World, reference: Taps, candidate: Taps, report: dict[str, Any]) -> None:
        self._bound = BOUNDS[plan.case.numerics]
        self._low_precision = plan.case.numerics != "float64"
        self._world = world
        self._experts = plan.config.n_routed_experts
        self._kinds = _kinds(reference, candidate)
        self._report = report

    def __call__(self, phase: Phase, expected: Aligned, actual: Aligned) -> None:
        """Compares every probe of one forward, in the candidate's execution order; the unpaired ones come last."""
        paired = [probe for probe in actual.order if probe in expected.values]
        alone = [probe for probe in (*expected.order, *actual.order) if probe not in paired]
        for probe in [*paired, *alone]:
            kind = self._kinds.get(probe, "value")
            row: dict[str, Any] = {"probe": probe, "phase": phase.kind, "call": phase.call, "kind": kind}
            if probe in expected.values and probe in actual.values:
                row |= self._measured(probe, phase, expected.values, actual.values)
            else:
                row |= {"unpaired": "reference" if probe in expected.values else "candidate"}
            row |= _faults(kind, phase, expected.replica_faults.get(probe), actual.replica_faults.get(probe))
            self._report["probes"].append(row)
            if probe.endswith(".mlp.gate.choose.out") and probe in expected.values:
                self._count_experts(probe, phase, expected.values[probe])

    def _measured(self, probe: str, phase: Phase, expected: Values, actual: Values) -> dict[str, Any]:
        kind = self._kinds.get(probe, "value")
        difference = self._difference(probe, kind, expected, actual)
        owned = owned_rows(kind, phase, self._world.rank, self._world.size)
        return {"difference": vars(difference), **_located(difference, owned)}

    def _difference(self, probe: str, kind: str, expected: Values, actual: Values) -> Difference:
        e, a = expected[probe], actual[probe]
        if kind in ("set", "token"):
            return measure_sets(e, a)
        if kind == "scores":
            width = max(e.shape[1], a.shape[1])
            e, a = (F.pad(x, (0, width - x.shape[1]), value=float("-inf")) for x in (e, a))
        if kind.startswith("by:"):
            ids = kind.removeprefix("by:")
            e, a = _by_id(e, expected.get(ids)), _by_id(a, actual.get(ids))
        return measure(e, a, self._bound, one_scale=kind == "scores" and self._low_precision)

    def _count_experts(self, probe: str, phase: Phase, ids: Tensor) -> None:
        counts = torch.bincount(ids[ids >= 0].flatten().long(), minlength=self._experts)
        self._report["expert_rows"].append([probe, phase.call, counts.tolist()])


def _kinds(reference: Taps, candidate: Taps) -> dict[str, str]:
    """Probe -> kind. A candidate must not decide how it is compared: both have to say the same.

    Raises:
        TapError: they do not.
    """
    for probe in reference.keys() & candidate.keys():
        if reference[probe][4] != candidate[probe][4]:
            kinds = f"{reference[probe][4]!r} in the reference and {candidate[probe][4]!r} in the candidate"
            raise TapError(f"probe {probe} is of kind {kinds}")
    return {probe: tap[4] for probe, tap in {**candidate, **reference}.items()}


def _by_id(values: Tensor, ids: Tensor | None) -> Tensor:
    """The values in the order of their ids; as they are where the ids are missing or of another shape."""
    if ids is None or ids.shape != values.shape:
        return values
    return values.gather(1, ids.long().argsort(dim=1))


def _located(difference: Difference, owned: list[tuple[int, int]]) -> dict[str, Any]:
    """Local rows of a difference as (request, position); a misshapen value has no such row."""
    out: dict[str, Any] = {}
    for name, row in (("worst", difference.worst_row), ("first", difference.first_over)):
        if row is not None and row < len(owned):
            request, position = owned[row]
            out[name] = {"request": request, "position": position}
    return out


def _faults(
    kind: str, phase: Phase, expected: tuple[int, int] | None, actual: tuple[int, int] | None
) -> dict[str, Any]:
    """Replicas that differ: on which rank, and the request and position of the first row."""
    out: dict[str, Any] = {}
    for name, fault in (("reference_replica", expected), ("replica", actual)):
        if fault is not None:
            rank, row = fault
            request, position = phase.last_row(row) if kind == "token" else phase.row(row)
            out[name] = {"rank": rank, "request": request, "position": position}
    return out
