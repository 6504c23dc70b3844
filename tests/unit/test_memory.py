"""Engines hold what the table says; one that holds more or less is a breach."""

from unittest import mock

import pytest
from torch import nn

import optimized.decoder
import optimized.engine
from optimized.linear import ParallelLMHead
from optimized.mlp import MLP
from spcheck.case import Case
from tests.conftest import compare_case

HELD = [
    {"requests": ((5, 1),), "aux_layers": (0, 3), "mtp_steps": 2},
    {"requests": ((4,),), "model": "dsv32-alternating", "scheme": "moe-sp"},
    {"requests": ((3,), ()), "all2all_backend": "naive"},
    {"requests": ((3,), (5,)), "expert_parallel": False},
    {"requests": ((4, 2),), "lora_rank": 4, "lora_adapters": 2},
    {"requests": ((4,),), "numerics": "bfloat16"},
    {"requests": ((4,),), "reference_world": 1, "overrides": (("fused_eh_norm", True),)},
    {"requests": ((4,),), "overrides": (("model_type", "deepseek_v3"),)},
]


@pytest.mark.parametrize("options", HELD, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_engines_hold_and_send_what_the_table_says(options):
    comparison = compare_case(Case(**{"tp": 2, **options}))
    assert comparison.memory.checked > 400
    assert comparison.memory.breaches == ()
    for side in comparison.accounting.values():
        assert side.seen_bytes_per_token == pytest.approx(side.bytes_per_token)
        traffic = [t for f in side.forwards for t in f.traffic]
        assert all((t.seen_count, t.seen_bytes) == (t.count, t.bytes) for t in traffic)


class HeadWithCopy(ParallelLMHead):
    """A head whose table is held twice."""

    def __init__(self, *words):
        super().__init__(*words)
        self.copy = nn.Parameter(self.weight.clone(), requires_grad=False)


def test_a_table_held_twice_is_a_breach():
    with mock.patch.object(optimized.engine, "ParallelLMHead", HeadWithCopy):
        comparison = compare_case(Case(requests=((3,),), tp=2))
    assert comparison.bitwise_equal == comparison.compared, "nothing else is wrong"
    (finding,) = comparison.verdict.findings
    table = 125 * 96 * 8
    message = f"lm_head: {2 * table} bytes of parameters on rank 0, {table} expected under full-sp"
    assert (finding.kind, finding.outcome, finding.message) == ("memory", "DIVERGED", message)


def test_a_table_shared_by_two_modules_counts_once():
    class SharingHead(ParallelLMHead):
        """A head with a second name for its table."""

        def __init__(self, *words):
            super().__init__(*words)
            self.again = nn.Parameter(self.weight.data, requires_grad=False)

    with mock.patch.object(optimized.engine, "ParallelLMHead", SharingHead):
        assert compare_case(Case(requests=((3,),), tp=2)).memory.breaches == ()


def test_a_dense_mlp_left_divided_is_a_breach():
    def divided(loader, tp, *, is_sequence_parallel):
        return MLP(loader, tp, is_sequence_parallel=False)

    with mock.patch.object(optimized.decoder, "MLP", divided):
        comparison = compare_case(Case(requests=((3,),), tp=2))
    whole = 3 * 96 * 144 * 8
    messages = [b.message for b in comparison.memory.breaches]
    assert f"model.layers.1.mlp: {whole // 2} bytes of parameters on rank 0, {whole} expected under full-sp" in messages
    assert (
        f"model.layers.1.mlp.act_fn.out: rows of {72 * 8} bytes on rank 0, {144 * 8} expected under full-sp" in messages
    )
