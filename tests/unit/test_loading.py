"""What a rank says of its parameters, and what becomes of it."""

from unittest import mock

import pytest
import torch
from torch import nn

import optimized.attention
import optimized.decoder
import optimized.engine
import optimized.moe
import spcheck.worker.weights
from optimized.mlp import MLP
from optimized.router import Gate
from reference.checkpoint import RandomWeights
from spcheck.case import Case
from spcheck.families.deepseek.holdings import holdings
from spcheck.judge.contracts.loading import check_parameters
from spcheck.plan.plan import make_plan
from spcheck.worker.built import EnginePool
from spcheck.worker.expected import differing, same
from spcheck.worker.loading import TURNS
from spcheck.worker.slots import Slot
from tests.conftest import compare_case

SMALL = Case(tp=2, requests=((3,),), mtp_steps=0)


def test_all_parameters_of_both_sides_are_compared():
    comparison = compare_case(SMALL)
    tables = [holdings(comparison.plan, side, rank) for _, side in comparison.plan.sides for rank in range(2)]
    assert comparison.parameters.checked == sum(map(len, tables))
    assert comparison.parameters.breaches == ()


class FineBias(RandomWeights):
    """Weights whose correction bias is stored in float64, with digits that float32 does not have."""

    def tensor(self, name):
        stored = super().tensor(name)
        return stored.double() + 2.0**-40 if name.endswith("e_score_correction_bias") else stored


class NarrowGate(Gate):
    """A router that loads its bias by way of float32."""

    def __init__(self, *words):
        super().__init__(*words)
        bias = self.e_score_correction_bias
        bias.data = bias.data.float().double()


def test_a_bias_that_was_rounded_on_the_way_is_found():
    case = Case(tp=2, requests=((3,),), mtp_steps=0, numerics="float64")
    with mock.patch.object(spcheck.worker.weights, "_random_weights", lambda config, seed, _: FineBias(config, seed)):
        assert compare_case(case).parameters.breaches == ()
        with mock.patch.object(optimized.moe, "Gate", NarrowGate):
            verdict = compare_case(case).verdict
    assert verdict.outcome == "DIVERGED"
    message = verdict.findings[0].message
    assert message.startswith("model.layers.2.mlp.gate.e_score_correction_bias differs from the checkpoint on rank 0: ")
    assert " elements differ; it was rounded to float32 on the way; on rank 1 too (and " in message


def test_a_plain_tensor_beside_the_parameters_is_no_fault():
    class Keeping(MLP):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            self.kept = self.gate_up_proj.weight.detach().clone()

    with mock.patch.object(optimized.decoder, "MLP", Keeping):
        assert compare_case(SMALL).verdict.outcome == "EQUAL"


def test_parameters_that_are_missing_and_unknown_are_named():
    class Norm(optimized.attention.RMSNorm):
        def __init__(self, weight, eps):
            super().__init__(weight, eps)
            self.gain = nn.Parameter(self.weight, requires_grad=False)
            del self.weight
            object.__setattr__(self, "weight", self.gain)

    with mock.patch.object(optimized.attention, "RMSNorm", Norm):
        comparison = compare_case(SMALL)
    names = {b.probe: b.message for b in comparison.parameters.breaches}
    name = "model.layers.0.self_attn.q_a_layernorm"
    gone = f"{name}.weight differs from the checkpoint on rank 0: it is not there; on rank 1 too"
    assert names[f"{name}.weight"] == gone
    said = f"{name}.gain differs from the checkpoint on rank 0: no tensor of it belongs there"
    assert names[f"{name}.gain"] == said
    assert comparison.memory.breaches == ()
    assert comparison.verdict.outcome == "DIVERGED"
    assert comparison.bitwise_equal == comparison.compared


def test_a_write_into_a_warm_engine_is_found_in_time_and_ends_its_life():
    pool, cases = EnginePool(limit=4), []
    real = optimized.engine.Engine.state

    def state(engine):
        """At the end of the second case it writes into the head of rank 0."""
        if engine.setup.tp.rank == 0:
            cases.append(engine)
            if len(cases) == 2:
                engine.lm_head.weight[1, 2] += 1
        return real(engine)

    with mock.patch.object(optimized.engine.Engine, "state", state):
        verdicts = [compare_case(SMALL, pool).verdict for _ in range(TURNS + 2)]
    said = "lm_head.weight differs from the checkpoint on rank 0 after the run, and did not before: first at [1, 2], "
    found = [number for number, v in enumerate(verdicts) for f in v.findings if f.message.startswith(said)]
    assert len(found) == 1
    assert {v.outcome for v in verdicts[:1] + verdicts[found[0] + 1 :]} == {"EQUAL"}


def report(rank, *, mark=1, faults=()):
    replicas = {"": {"model.norm": mark}, "tp": {"lm_head": rank % 2}}
    loading = {"checked": 3, "faults": list(faults), "unknown": [], "replicas": replicas}
    return {"rank": rank, "candidate": {"loading": loading}}


def test_ranks_that_read_other_values_are_told():
    plan = make_plan(Case(tp=2, requests=((3,), (3,))))
    assert check_parameters(plan, [report(rank) for rank in range(4)]).breaches == ()
    checked = check_parameters(plan, [report(0), report(1), report(2), report(3, mark=2)])
    (breach,) = checked.breaches
    assert checked.checked == 12
    assert breach.message == (
        "model.norm: parameters on rank 3 differ from those on rank 0, and each is what that rank read from the "
        "checkpoint"
    )


def test_a_fault_is_not_told_again_as_a_replica():
    plan = make_plan(Case(tp=2, requests=((3,),)))
    fault = {"parameter": "model.norm.weight", "what": "shape", "got": [3], "wanted": [4]}
    checked = check_parameters(plan, [report(0), report(1, mark=2, faults=[fault])])
    (breach,) = checked.breaches
    assert breach.message == "model.norm.weight differs from the checkpoint on rank 1: its shape is [3], not [4]"


def test_numbers_that_look_alike_are_told_with_all_digits():
    plan = make_plan(SMALL)
    fault = {"parameter": "model.norm.weight", "what": "values", "index": [1], "of": "model.norm.weight"}
    fault |= {"got": 0.5 + 2.0**-40, "wanted": 0.5, "count": 1, "elements": 4, "hint": ""}
    (breach,) = check_parameters(plan, [report(0, faults=[fault])]).breaches
    assert breach.message.endswith("first at [1], 0.5000000000009095 for 0.5; 1 of 4 elements differ")


def test_two_that_are_not_numbers_are_alike():
    nan, one = torch.tensor([torch.nan, 0.0]), torch.tensor([1.0, -0.0])
    assert same(nan, nan.clone())
    assert differing(nan, one).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_checksum_sees_what_is_written_and_what_is_put_in_its_place(dtype):
    module = nn.Linear(3, 5, bias=False, dtype=dtype)
    slot = Slot(module, "weight")
    first = slot.mark()
    assert slot.mark() == first
    module.weight.data[2, 1] += 1
    second = slot.mark()
    assert second != first
    module.weight = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    assert slot.mark() not in (first, second)
    module.weight = nn.Parameter(torch.zeros(3, 5, device="meta", dtype=dtype))
    assert slot.mark() is None


def test_a_parameter_that_is_wrong_on_several_ranks_names_them():
    class Doubled(optimized.attention.RMSNorm):
        def __init__(self, weight, eps):
            super().__init__(2 * weight, eps)

    with mock.patch.object(optimized.attention, "RMSNorm", Doubled):
        findings = compare_case(SMALL).verdict.findings
    assert findings[0].kind == "parameters"
    assert " differs from the checkpoint on rank 0: " in findings[0].message
    assert "; on rank 1 too" in findings[0].message
