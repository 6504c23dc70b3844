"""The array of cases that decode comes to what it is for: asked of what its cases did, not of the axes."""

from itertools import pairwise

from spcheck.case import Case
from spcheck.worker.built import EnginePool
from tests.conftest import compare_case
from tests.matrix.decoding import DECODING


def accepted(comparison):
    """(Accepted, verified) drafts of each request in each step, as the candidate counted them."""
    return [(turn.candidate.accepted, len(turn.drafts)) for turn in comparison.generation.turns if turn.drafts]


def drafting(comparison):
    """(Before, here) for each draft step behind the first: requests of each DP rank in it and in the one before."""
    forwards = list(zip(*comparison.plan.phases, strict=True))
    later = [(before, here) for before, here in pairwise(forwards) if here[0].draft > 0]
    return [tuple([len(phase.requests) for phase in phases] for phases in both) for both in later]


def choices(comparison, side):
    """(Layer, its call) wherever both sides were seen to choose keys, or to score them for it."""
    probes = [(r.probe.rpartition(f".indexer.choose.{side}"), r) for r in comparison.results if r.rows]
    return {(layer, r.call) for (layer, found, _), r in probes if found}


def ended(comparison):
    """(Before, here) for each generating step: requests of all DP ranks in it and in the one before."""
    steps = comparison.plan.steps[comparison.plan.own_step :]
    return list(pairwise(sum(map(len, step.parts)) for step in steps))


REACHED = {
    "no draft accepted": lambda c: any(n == 0 for n, _ in accepted(c)),
    "some drafts accepted": lambda c: any(0 < n < drafts for n, drafts in accepted(c)),
    "all of several drafts accepted": lambda c: any(n == drafts > 1 for n, drafts in accepted(c)),
    "an idle rank beside one that drafts": lambda c: any(0 in before and any(here) for before, here in drafting(c)),
    "a rank that stops drafting beside one that goes on": lambda c: any(
        any(here) and any(a and not b for a, b in zip(before, here, strict=True)) for before, here in drafting(c)
    ),
    "a request that stops drafting beside its neighbour": lambda c: any(
        0 < b < a for before, here in drafting(c) for a, b in zip(before, here, strict=True)
    ),
    "fewer rows than tp in a draft step": lambda c: any(
        0 < n < c.plan.case.tp for _, here in drafting(c) for n in here
    ),
    "a request that ends before others": lambda c: any(0 < b < a for a, b in ended(c)),
    "keys chosen by their scores": lambda c: bool(choices(c, "in")),
    "all keys chosen without scores": lambda c: bool(choices(c, "out") - choices(c, "in")),
}


def test_decoding_cases_reach_what_they_are_for():
    """Cheap cases first, until each was reached."""
    missing = dict(REACHED)
    for row in DECODING.read():
        if missing and row["generate"] and row["mtp_steps"] > 1:
            comparison = compare_case(Case(**DECODING.case_of(row)), EnginePool())
            missing = {name: reached for name, reached in missing.items() if not reached(comparison)}
    assert not missing
