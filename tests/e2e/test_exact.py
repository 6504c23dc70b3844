"""Exact arithmetic on the real pair: every snap is needed, the guard names what breaks it, straddles are told."""

import dataclasses
import math

import pytest
import torch

import spcheck.worker.compare
import spcheck.worker.snap
import spcheck.worker.weights
from optimized.attention import Softmax
from spcheck.case import Case
from spcheck.contracts.exactness import norms_by_dp_rank, reference_norms
from spcheck.exact import GRIDS, points
from spcheck.launch.ranks import run_threads
from spcheck.plan import make_plan
from spcheck.verdict import conclude
from tests.conftest import compare_case

CASES = [
    {"tp": 2, "requests": ((17,),), "mtp_steps": 2},
    {"tp": 3, "requests": ((5, 1, 11),), "mtp_steps": 2, "scheme": "tp"},
    {"tp": 2, "requests": ((33,),), "mtp_steps": 2, "reference_world": 1},
    {
        "tp": 2,
        "requests": ((300,),),
        "mtp_steps": 0,
    },  # index scores are summed in another order only where they are many
]
CONFIG = make_plan(Case(**CASES[0])).config
KINDS = sorted({p.probe.split(".", 3)[-1] for p in points(CONFIG, fused_eh_norm=False)})


def compared(case, **more):
    return compare_case(Case(backend="loopback", **case, **more))


def outcomes(**more):
    for case in CASES:
        yield compared(case, **more).verdict.outcome


@pytest.mark.parametrize("kind", KINDS)
def test_every_snap_is_needed(kind, monkeypatch):
    """Without it some value is no longer equal in some case; that the guard sees some of these too does not count."""
    plain = spcheck.worker.snap.Snapper._snapped

    def careless(self, point, x, bits):
        rounded = plain(self, point, x, bits)
        return x if point.probe.endswith(kind) else rounded

    def point_of(probe):
        return None if probe.endswith(kind) else spcheck.exact.point_of(probe)

    monkeypatch.setattr(spcheck.worker.snap.Snapper, "_snapped", careless)
    monkeypatch.setattr(spcheck.worker.compare, "point_of", point_of)
    assert any(c.bitwise_equal < c.compared for c in map(compared, CASES))


def test_the_snap_of_weights_is_needed(monkeypatch):
    class Unsnapped(spcheck.worker.weights.Snapped):
        def tensor(self, name):
            return self._stored.tensor(name).double()

    monkeypatch.setattr(spcheck.worker.weights, "Snapped", Unsnapped)
    assert "EQUAL" not in outcomes()


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
