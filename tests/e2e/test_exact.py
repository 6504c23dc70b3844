"""Exact arithmetic on the real pair: every snap is needed, the guard names what breaks it, straddles are told."""

import dataclasses
import math
import re

import pytest
import torch

import optimized.subject
import spcheck.worker.compare
import spcheck.worker.side
import spcheck.worker.snap
import spcheck.worker.weights
from optimized.attention import Softmax
from spcheck.case import Case
from spcheck.families.deepseek.exact import STEP_BOUND, points
from spcheck.judge.contracts.exactness import norms_by_dp_rank, reference_norms
from spcheck.judge.verdict import conclude
from spcheck.launch.ranks import run_threads
from spcheck.launch.threads import ThreadHost
from spcheck.plan.grid import GRIDS
from spcheck.plan.plan import make_plan
from spcheck.run import run_once
from spcheck.worker.snap import Snapper, snap
from tests.conftest import compare_case

CASES = [
    {"tp": 2, "requests": ((17,),), "mtp_steps": 2},
    {"tp": 3, "requests": ((5, 1, 11),), "mtp_steps": 2, "scheme": "tp"},
    {"tp": 2, "requests": ((33,),), "mtp_steps": 2, "reference_world": 1},
]
CONFIG = make_plan(Case(**CASES[0])).config
POINTS = points(CONFIG, fused_eh_norm=False)
UNSEEN_BEHIND = "post_attention_layernorm.out"  # what is computed from it has no probe before it is snapped itself


def kind_of(probe):
    """A probe's name without its layer."""
    return re.sub(r"^model\.layers\.\d+\.", "", probe)


KINDS = sorted({kind_of(p.probe) for p in POINTS})


def compared(case, **more):
    return compare_case(Case(backend="loopback", **case, **more))


def outcomes(**more):
    for case in CASES:
        yield compared(case, **more).verdict.outcome


def moved(x, bits):
    """Every element an ulp further from zero, as another kernel might compute it.

    Exact sums may lie in the middle between two grid points: the few that an ulp takes to the next point stay.
    """
    further = x.nextafter(2 * x)
    return torch.where(snap(further, bits) == snap(x, bits), further, x)


def move_candidate(monkeypatch, wanted):
    """Moves the candidate's values at some points by an ulp, before anything sees them."""
    plain = spcheck.worker.side.build

    def build(side, *args):
        built = plain(side, *args)
        for point in [] if side.is_reference else wanted:
            move_at(built.engine.get_submodule(point.module), point)
        return built

    monkeypatch.setattr(spcheck.worker.side, "build", build)


def move_at(module, point):
    def off(values):
        return tuple(moved(x, point.bits(GRIDS["A"])) if i in point.indices else x for i, x in enumerate(values))

    def after(_module, _args, output):
        return off(output) if isinstance(output, tuple) else off((output,))[0]

    if point.side == "in":
        module.register_forward_pre_hook(lambda _module, args: off(args), prepend=True)
    else:
        module.register_forward_hook(after, prepend=True)


def leave_unsnapped(kind, monkeypatch):
    """Values of one kind go on as they are, and are compared as they are."""
    plain = Snapper._snapped

    def careless(self, point, x, bits):
        rounded = plain(self, point, x, bits)
        return x if kind_of(point.probe) == kind else rounded

    def point_of(probe):
        return None if kind_of(probe) == kind else spcheck.families.deepseek.exact.point_of(probe)

    monkeypatch.setattr(Snapper, "_snapped", careless)
    monkeypatch.setattr(spcheck.worker.compare, "point_of", point_of)


def twins_compared():
    """The reference against itself: the same bits on every machine, whatever is snapped. No command asks for this."""
    plan = make_plan(Case(backend="loopback", **CASES[0]))
    plan = dataclasses.replace(plan, candidate=dataclasses.replace(plan.reference, role="candidate"))
    return run_once(plan, ThreadHost())


def unequal_kinds(comparison):
    return {kind_of(r.probe) for r in comparison.results if r.unequal_rows}


@pytest.mark.parametrize("kind", KINDS)
def test_every_snap_is_needed(kind, monkeypatch):
    """It absorbs an ulp. Without it the ulp goes on; that the guard sees some of these too does not count."""
    wanted = [p for p in POINTS if kind_of(p.probe) == kind]
    move_candidate(monkeypatch, wanted)
    exact_sum = {kind} if wanted[0].linear else set()  # no kernel may change it: that is told, and goes no further
    comparison = compared(CASES[0])
    assert unequal_kinds(comparison) == exact_sum
    assert comparison.verdict.outcome == ("DIVERGED" if exact_sum else "EQUAL")

    leave_unsnapped(kind, monkeypatch)
    unequal = unequal_kinds(twins_compared())
    assert kind in unequal
    assert len(unequal) > 1 or kind == UNSEEN_BEHIND


def test_twins_are_equal_without_any_snap(monkeypatch):
    """So the ulp is all that differs between them above."""
    monkeypatch.setattr(Snapper, "_snapped", lambda self, point, x, bits: x)
    monkeypatch.setattr(spcheck.worker.compare, "point_of", lambda probe: None)
    comparison = twins_compared()
    assert comparison.bitwise_equal == comparison.compared > 200
    assert comparison.verdict.outcome == "INCONCLUSIVE", "nothing is on a grid"


def test_steps_that_all_round_otherwise_are_equal_and_their_error_is_told(monkeypatch):
    steps = [p for p in POINTS if not p.linear]
    move_candidate(monkeypatch, steps)
    comparison = compared(CASES[0])
    assert comparison.verdict.outcome == "EQUAL", comparison.verdict.findings
    probes = {p.probe for p in steps}
    errors = {r.probe: r.max_rel for r in comparison.results if r.probe in probes}
    assert errors.keys() == probes
    assert all(0 < error < STEP_BOUND for error in errors.values())


@pytest.mark.parametrize("rounded", [True, False])
def test_the_snap_of_weights_is_needed(rounded, monkeypatch):
    """The candidate's are an ulp off before it."""
    plain = optimized.subject.build

    def build(setup):
        setup.weights.stored = OneUlpOff(setup.weights.stored)
        return plain(setup)

    monkeypatch.setattr(optimized.subject, "build", build)
    if not rounded:
        monkeypatch.setattr(spcheck.worker.weights, "Snapped", Unsnapped)
    comparison = compared(CASES[0])
    assert (comparison.bitwise_equal == comparison.compared) == rounded
    assert (comparison.verdict.outcome == "EQUAL") == rounded


class OneUlpOff:
    """A reader of other values than the one it reads from."""

    def __init__(self, stored):
        self._stored = stored

    def __getattr__(self, name):
        return getattr(self._stored, name)

    def tensor(self, name):
        return moved(self._stored.tensor(name).double(), GRIDS["A"].weight)


class Unsnapped(spcheck.worker.weights.Snapped):
    def rounded(self, stored):
        return stored.double()


@pytest.mark.parametrize("module", ["self_attn.kv_b_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_snap_where_none_must_be_breaks_the_pair(module, monkeypatch):
    """kv_b_proj, which the absorbed form never computes, and partial sums."""
    original = points(CONFIG, fused_eh_norm=False)[1]

    def more(config, *, fused_eh_norm):
        extra = [dataclasses.replace(original, module=f"model.layers.{i}.{module}") for i in (0, 1)]
        return [*points(config, fused_eh_norm=fused_eh_norm), *extra]

    class Lenient(spcheck.worker.snap.Snapper):
        """The candidate has no kv_b_proj: only one side is snapped, as a careless table would do."""

        def __init__(self, root, config, grid, *, watch):
            names = dict(root.named_modules())
            wanted = [p for p in more(config, fused_eh_norm=False) if p.module in names]
            monkeypatch.setattr(spcheck.worker.snap, "points", lambda *_, **__: wanted)
            super().__init__(root, config, grid, watch=watch)

    monkeypatch.setattr(spcheck.worker.built, "Snapper", Lenient)
    assert any(outcome == "DIVERGED" for outcome in outcomes())


def test_the_guard_names_the_product_that_does_not_fit(monkeypatch):
    finer = dataclasses.replace(GRIDS["A"], probability=26)
    monkeypatch.setitem(GRIDS, "A", finer)
    comparison = compared(CASES[0])
    assert comparison.verdict.outcome == "INCONCLUSIVE"
    assert comparison.verdict.exit_code == 3
    guard = [f.message for f in comparison.verdict.findings if f.kind == "guard"]
    assert any("self_attn p.v needs up to 5" in message for message in guard)
    assert comparison.wants_coarser_grid
    assert not compared(CASES[0], grid="B").verdict.findings


def test_an_operand_off_the_grid_is_named(monkeypatch):
    plain = spcheck.worker.snap.Snapper._snapped

    def careless(self, point, x, bits):
        return x if point.module == "model.layers.3.self_attn.q_a_layernorm" else plain(self, point, x, bits)

    monkeypatch.setattr(spcheck.worker.snap.Snapper, "_snapped", careless)
    comparison = compared(CASES[0])
    assert comparison.verdict.outcome != "EQUAL"
    assert any(
        "input of model.layers.3.self_attn.q_b_proj is off the grid" in f.message for f in comparison.verdict.findings
    )


def test_a_straddle_is_inconclusive_and_never_equal(monkeypatch):
    """Two results of one step, an ulp apart around the middle between two grid points."""
    middle = 0.5 + 2.0**-21

    def set_best(out, value):
        """The largest probability of the last row's first head."""
        row = out[-1, 0]
        row[row.argmax()] = value
        return out

    monkeypatch.setattr("reference.attention.Softmax.forward", lambda _, z: set_best(torch.softmax(z, dim=-1), middle))
    for ulps, outcome in ((0, "EQUAL"), (1, "INCONCLUSIVE")):
        value = middle * (1 + 2.0**-52 * ulps)
        monkeypatch.setattr(Softmax, "forward", lambda _, z, value=value: set_best(torch.softmax(z, dim=-1), value))
        comparison = compared({"tp": 1, "requests": ((17,),), "mtp_steps": 0})
        assert comparison.verdict.outcome == outcome, comparison.verdict.findings
    assert "straddle" in {f.kind for f in comparison.verdict.findings}


@pytest.mark.parametrize("requests", [((9,), (10,)), ((9,), ())])
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_a_dispatching_reference_is_bounded_like_the_plain_one(requests, expert_parallel):
    """Its experts see rows of all data-parallel ranks: the guard must not take one rank's part for the whole."""
    world = {"requests": requests, "tp": 1, "expert_parallel": expert_parallel, "backend": "loopback"}
    sides = {"candidate": "optimized:tp"}, {"reference": "optimized:tp", "candidate": "reference"}
    plain, swapped = (norms_of(make_plan(Case(**world, **pair))) for pair in sides)
    assert len(plain) > 100
    assert plain.keys() == swapped.keys()
    for name, norm in plain.items():
        # Of channels the largest of each rank's part is known, and these may be of different rows.
        parts = 1 if expert_parallel or not name.endswith(".mlp.experts.act_fn.out") else len(requests)
        assert norm * (1 - 1e-12) <= swapped[name] <= norm * math.sqrt(parts) * (1 + 1e-12), name


def norms_of(plan):
    reports = run_threads(plan)
    assert conclude(plan, reports, {}, None).verdict.outcome == "EQUAL"
    return reference_norms(plan, reports, norms_by_dp_rank(plan, reports))
