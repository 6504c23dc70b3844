"""Every preset, with every kind of weights, is EQUAL; and each kind shows faults that plain weights hide."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

from fixtures.seams import edited
from optimized import attention, indexer, linear, router
from optimized.loader import Loader
from optimized.norms import RMSNorm
from spcheck.case import Case
from spcheck.plan.model import load_model, preset_names
from tests.conftest import compare_case


def outcome(**options):
    comparison = compare_case(Case(**{"requests": ((17,),), "tp": 2, "backend": "loopback", **options}))
    return comparison.verdict.outcome, comparison.verdict.findings


@pytest.mark.parametrize("model", preset_names())
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_preset_is_equal(model, tp):
    for scheme in ("tp", "moe-sp", "full-sp") if tp > 1 else ("tp",):
        assert outcome(model=model, tp=tp, mtp_steps=3, scheme=scheme) == ("EQUAL", ())


@pytest.mark.parametrize("model", preset_names())
@pytest.mark.parametrize("weights", ["ties", "outliers"])
def test_every_kind_of_weights_is_equal(model, weights):
    for options in ({"requests": ((17,),)}, {"requests": ((5, 1), (11,)), "mtp_steps": 2, "all2all_backend": "naive"}):
        assert equal_on_some_grid(model=model, weights=weights, **options)


def equal_on_some_grid(**options):
    """Grid B is a second run of the command where the guard finds A too fine."""
    first = outcome(grid="A", **options)[0]
    assert first in ("EQUAL", "INCONCLUSIVE")
    return first == "EQUAL" or outcome(grid="B", **options)[0] == "EQUAL"


BACKWARDS = "scores.flip(-1).sort(dim=-1, descending=True, stable=True)"
PLAIN_SORT = "_, {0} = scores.sort(dim=-1, descending=True, stable=True)"
FAULTS = {
    "the highest expert wins a tie": ("ties", lambda: edited(
        router.Best, "forward", PLAIN_SORT.format("ids"), f"ids = scores.shape[-1] - 1 - {BACKWARDS}.indices")),
    "the newest key wins a tie": ("ties", lambda: edited(
        indexer.ChooseKeys, "forward", PLAIN_SORT.format("best"),
        f"best = scores.shape[-1] - 1 - {BACKWARDS}.indices")),
    "the highest token wins a tie": ("ties", lambda: edited(
        linear.GreedySampler, "forward", "logits.argmax(dim=-1)",
        "logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)")),
    "softmax without the maximum": ("outliers", lambda: edited(
        attention.Softmax, "forward", "logits.softmax(dim=-1)",
        "logits.exp() / logits.exp().sum(dim=-1, keepdim=True)")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_plain_weights_hide(fault):
    weights, seam = FAULTS[fault]
    grid = "B" if weights == "outliers" else "A"
    with ExitStack() as stack:
        calls = stack.enter_context(seam())
        assert outcome()[0] == "EQUAL"
        assert outcome(weights=weights, grid=grid)[0] == "DIVERGED"
        assert calls.count > 0


@pytest.mark.parametrize("part", ["weight", "e_score_correction_bias"])
def test_a_router_read_by_way_of_bfloat16_is_seen(part, monkeypatch):
    whole = Loader.full

    def narrow(self, name, dtype=None):
        full = whole(self, name, dtype)
        return full.bfloat16().to(full.dtype) if self.prefix.endswith("mlp.gate.") and name == part else full

    monkeypatch.setattr(Loader, "full", narrow)
    assert outcome()[0] == "DIVERGED"


def test_one_eps_in_the_place_of_another_is_seen(monkeypatch):
    eps = load_model(Case(((17,),), 2)).rms_norm_eps
    monkeypatch.setattr(attention, "RMSNorm", lambda weight, _: RMSNorm(weight, eps))
    assert outcome()[0] == "DIVERGED"


def test_the_command_goes_on_to_grid_b():
    """With outliers q.k does not fit 53 bits on grid A."""
    words = ["--tp", "2", "--tokens", "17", "--weights", "outliers", "--backend", "loopback"]
    command = [sys.executable, "-m", "spcheck", "diff", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "exact (grid B)" in done.stdout.splitlines()[0]
    assert "weights outliers" in done.stdout.splitlines()[0]
    assert "--weights outliers " in done.stdout
