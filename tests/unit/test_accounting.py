"""What a dataflow costs, against numbers counted by hand."""

import pytest

from spcheck.case import Case
from spcheck.judge.contracts.accounting import account
from spcheck.plan.plan import make_plan
from spcheck.report.accounting import accounting_lines
from tests.conftest import compare_case

# Both presets: hidden, vocabulary, widths of a dense MLP and an expert, experts; float64 has 8 bytes.
D, V, F, FE, E, B = 96, 250, 144, 48, 24, 8
K, K_ALTERNATING = 10, 4  # choices
TABLE = V // 2 * D  # one half of the vocabulary
MLP_WEIGHTS, EXPERT = 3 * D * F, 3 * D * FE
ROUTER = E * D + E
# Latents of 36 and 32 + 8 with their norms; 6 of 12 heads: queries of 18 + 8, keys and values of 18 + 10, output of 10.
LATENTS = D * 36 + 36 + D * (32 + 8) + 32
HEADS = 6 * (36 * (18 + 8) + 32 * (18 + 10) + 10 * D)
INDEXER = 16 * 24 * 36 + 24 * D + 2 * 24 + 16 * D
ATTENTION = LATENTS + HEADS + INDEXER


def sides(**options):
    return account(make_plan(Case(**{"tp": 2, "mtp_steps": 1, **options})))


def step(side):
    """(place, kind, group) -> (count, bytes) of the target step on the fullest data-parallel rank."""
    forward = next(f for f in side.forwards if (f.name, f.dp_rank) == ("target step", side.dp_rank))
    return {(t.place, t.kind, t.group): (t.count, t.bytes) for t in forward.traffic}


def every(layers, calls):
    return {(f"layer {i}", *call): figures for i in layers for call, figures in calls.items()}


def held(side, part):
    activation = side.activations[part]
    return activation.name, activation.shape, activation.bytes


PARTS = [
    "vocabulary",
    "attention",
    "dense MLP",
    "shared experts",
    "routed experts",
    "router",
    "norms",
    "MTP",
    "adapters",
]


def parameters(side):
    assert list(side.parameters) == PARTS
    assert side.parameter_bytes == sum(side.parameters.values())
    return [size / B for size in side.parameters.values()]


def test_full_sp_by_hand():
    """17 rows, m = 9; every layer gathers and scatters, the 3 MoE layers dispatch 2 x 9 rows."""
    side = sides(requests=((17,),))["candidate"]
    attention = {("all_gather", "tp"): (1, 9 * D * B), ("reduce_scatter", "tp"): (1, 18 * D * B)}
    dispatch = {("all_gatherv", "ep"): (3, 9 * (D + K + K) * B), ("reduce_scatterv", "ep"): (1, 18 * D * B)}
    assert step(side) == {
        ("embedding", "all_reduce", "tp"): (1, 17 * D * B),
        **every(["0 dense", "1 dense"], attention),
        **every(["2 moe", "3 moe", "4 moe"], attention | dispatch),
        ("exit", "all_gather", "tp"): (1, 9 * D * B),
        ("logits", "all_gather", "tp"): (1, 125 * 17 * B),
    }
    assert side.collectives == 1 + 5 * 2 + 3 * 4 + 1 + 1
    rows = 17 + 5 * (9 + 18) + 3 * (9 + 18) + 9
    assert side.bytes_per_token == pytest.approx((rows * D + 3 * 9 * (K + K) + 125 * 17) * B / 17)
    # Two tables and two of the MTP layer; 5 layers and the MTP layer, 4 of them with experts; 12 experts on a rank.
    norms = (2 * 6 + 1 + 3) * D
    wanted = [4 * TABLE, 6 * ATTENTION, 2 * MLP_WEIGHTS, 4 * EXPERT, 4 * 12 * EXPERT, 4 * ROUTER, norms, D * 2 * D, 0]
    assert parameters(side) == wanted
    assert held(side, "attention") == ("model.layers.0.self_attn.indexer.q_rope.out", (17, 16 * 24), 17 * 384 * B)
    assert held(side, "residual stream, norms")[1:] == ((9, D), 9 * D * B)
    # The experts see 9 rows of each rank, and give a row for each of them and each of its 10 choices.
    assert held(side, "MLP, experts") == ("model.layers.2.mlp.experts summands", (18 * K, D), 18 * K * D * B)
    assert side.largest_activation == side.activations["MLP, experts"]


def test_tp_by_hand():
    """17 rows everywhere: two sums for each layer, half of every MLP."""
    both = sides(requests=((17,),), scheme="tp")
    for side in both.values():
        assert step(side) == {
            ("embedding", "all_reduce", "tp"): (1, 17 * D * B),
            **every(["0 dense", "1 dense", "2 moe", "3 moe", "4 moe"], {("all_reduce", "tp"): (2, 2 * 17 * D * B)}),
            ("logits", "all_gather", "tp"): (1, 125 * 17 * B),
        }
        assert side.collectives == 12
        assert side.bytes_per_step == 17 * (11 * D + 125) * B
        assert side.bytes_per_token == (11 * D + 125) * B
        assert parameters(side)[2:5] == [2 * MLP_WEIGHTS / 2, 4 * EXPERT / 2, 4 * 12 * EXPERT]
        assert held(side, "residual stream, norms")[1:] == ((17, D), 17 * D * B)
        rows = 17 if side.name == "reference" else 17 * K  # one expert at a time, or all of them together
        assert held(side, "MLP, experts")[1:] == ((rows, D), rows * D * B)
        assert held(side, "entry, exit, logits") == ("lm_head.out", (17, V), 17 * V * B)


def test_moe_sp_by_hand():
    """7 rows, m = 4; layers 2 and 4 have experts, so that 3 and 5 are entered by a packed gather of two states."""
    options = {"requests": ((7,),), "model": "dsv32-alternating", "scheme": "moe-sp"}
    side = sides(**options)["candidate"]
    sums = {("all_reduce", "tp"): (2, 2 * 7 * D * B)}
    moe = {
        ("reduce_scatter", "tp"): (1, 8 * D * B),
        ("all_gatherv", "ep"): (3, 4 * (D + 2 * K_ALTERNATING) * B),
        ("reduce_scatterv", "ep"): (1, 8 * D * B),
    }
    border = {("all_gather", "tp"): (1, 4 * 2 * D * B)}
    assert step(side) == {
        ("embedding", "all_reduce", "tp"): (1, 7 * D * B),
        **every(["0 dense", "1 dense"], sums),
        **every(["2 moe", "4 moe"], moe),
        **every(["3 dense", "5 dense"], border | sums),
        ("logits", "all_gather", "tp"): (1, 125 * 7 * B),
    }
    assert side.collectives == 1 + 4 * 2 + 2 * 5 + 2 + 1
    rows = 9 * 7 + 2 * (8 + 4 + 8 + 8)
    assert side.bytes_per_token == pytest.approx((rows * D + 2 * 4 * 2 * K_ALTERNATING + 125 * 7) * B / 7)
    # Dense MLPs are divided, the shared experts of 2 layers and the MTP layer are not.
    norms = (2 * 7 + 1 + 3) * D
    wanted = [
        4 * TABLE,
        7 * ATTENTION,
        4 * MLP_WEIGHTS / 2,
        3 * EXPERT,
        3 * 12 * EXPERT,
        3 * ROUTER,
        norms,
        D * 2 * D,
        0,
    ]
    assert parameters(side) == wanted
    assert held(side, "MLP, experts")[1:] == ((8 * K_ALTERNATING, D), 8 * K_ALTERNATING * D * B)
    assert held(side, "residual stream, norms")[1:] == ((7, D), 7 * D * B)


def test_full_sp_with_uneven_rows_by_hand():
    """6 and 11 rows: shards of 3 and 6, so that the experts see 2 x 3 + 2 x 6 = 18 rows; 6 experts on each rank."""
    both = sides(requests=((5, 1), (11,)))
    side = both["candidate"]
    attention = {("all_gather", "tp"): (1, 6 * D * B), ("reduce_scatter", "tp"): (1, 12 * D * B)}
    dispatch = {("all_gatherv", "ep"): (3, 6 * (D + K + K) * B), ("reduce_scatterv", "ep"): (1, 18 * D * B)}
    assert side.dp_rank == 1
    assert step(side) == {
        ("row counts", "all_reduce", "dp_cpu"): (1, 3 * 2 * 8),
        ("embedding", "all_reduce", "tp"): (1, 11 * D * B),
        **every(["0 dense", "1 dense"], attention),
        **every(["2 moe", "3 moe", "4 moe"], attention | dispatch),
        ("exit", "all_gather", "tp"): (1, 6 * D * B),
        ("logits", "all_gather", "tp"): (1, 125 * 11 * B),
    }
    assert side.collectives == 26
    first = 6 + (6 + 5 * (3 + 6) + 3 * (3 + 18) + 3) * D + 3 * 3 * (K + K) + 125 * 6
    second = 6 + (11 + 5 * (6 + 12) + 3 * (6 + 18) + 6) * D + 3 * 6 * (K + K) + 125 * 11
    assert side.bytes_per_token == pytest.approx((first + second) * B / 17)
    assert parameters(side)[2:5] == [2 * MLP_WEIGHTS, 4 * EXPERT, 4 * 6 * EXPERT]
    assert held(side, "MLP, experts")[1:] == ((18 * K, D), 18 * K * D * B)
    # The reference goes request by request, and divides every expert over the two ranks that hold the model.
    assert both["reference"].bytes_per_token == (11 * D + 125) * B
    assert parameters(both["reference"])[4] == 4 * E * EXPERT / 2


def test_naive_with_an_idle_rank_by_hand():
    """3 rows and a dummy: shards of 2 and 1, 6 rows at the experts, each tensor broadcast by each of 4 ranks."""
    both = sides(requests=((3,), ()), all2all_backend="naive")
    side = both["candidate"]
    attention = {("all_gather", "tp"): (1, 2 * D * B), ("reduce_scatter", "tp"): (1, 4 * D * B)}
    dispatch = {("broadcast", "ep"): (3 * 4, 6 * (D + K + K) * B), ("all_reduce", "ep"): (1, 6 * D * B)}
    figures = step(side)
    assert {key: figures[key] for key in every(["3 moe"], attention | dispatch)} == every(
        ["3 moe"], attention | dispatch
    )
    assert side.collectives == 1 + 1 + 5 * 2 + 3 * 13 + 1 + 1
    busy = 6 + (3 + 5 * (2 + 4) + 3 * (6 + 6) + 2) * D + 3 * 6 * (K + K) + 125 * 3
    idle = 6 + (1 + 5 * (1 + 2) + 3 * (6 + 6) + 1) * D + 3 * 6 * (K + K) + 125
    assert side.bytes_per_token == pytest.approx((busy + idle) * B / 3)
    assert parameters(side)[4] == 4 * 6 * EXPERT
    assert held(side, "MLP, experts")[1:] == ((6 * K, D), 6 * K * D * B)
    assert [len(f.traffic) for f in both["reference"].forwards if f.dp_rank == 1] == [0, 0], "it has nothing to do"


def test_experts_in_channels_by_hand():
    """Without expert parallelism 3 + 5 rows meet over the data-parallel ranks; 48 / 4 channels of every expert."""
    side = sides(requests=((3,), (5,)), expert_parallel=False)["candidate"]
    sums = {("all_reduce", "tp"): (2, 2 * 5 * D * B)}
    dispatch = {("all_gatherv", "dp"): (3, 5 * (D + K + K) * B), ("reduce_scatterv", "dp"): (1, 8 * D * B)}
    assert step(side) == {
        ("row counts", "all_reduce", "dp_cpu"): (1, 3 * 2 * 8),
        ("embedding", "all_reduce", "tp"): (1, 5 * D * B),
        **every(["0 dense", "1 dense"], sums),
        **every(["2 moe", "3 moe", "4 moe"], sums | dispatch),
        ("logits", "all_gather", "tp"): (1, 125 * 5 * B),
    }
    assert side.collectives == 25
    rows = 11 * (3 + 5) + 3 * (3 + 5 + 8 + 8)
    assert side.bytes_per_token == pytest.approx((2 * 6 + rows * D + 3 * 8 * (K + K) + 125 * 8) * B / 8)
    assert parameters(side)[2:5] == [2 * MLP_WEIGHTS / 2, 4 * EXPERT / 2, 4 * E * 3 * D * 12]
    assert held(side, "MLP, experts")[1:] == ((8 * K, D), 8 * K * D * B)


def test_adapters_by_hand():
    """2 adapters of rank 4: A takes a projection's inputs, B gives its outputs; heads and channels are halved."""
    attention = (D + 36) + (36 + 6 * 26) + (D + 40) + (6 * 10 + D)
    mlps = 2 * 3 * (D + F // 2) + 3 * 3 * (D + FE // 2)
    for side in sides(requests=((4, 2),), lora_rank=4, lora_adapters=2).values():
        assert parameters(side)[-1] == 2 * 4 * (5 * attention + mlps)


def test_bytes_follow_the_type_and_the_router_stays_wide():
    side = sides(requests=((4,),), numerics="bfloat16")["candidate"]
    assert side.parameters["router"] == 4 * ROUTER * 4
    assert side.parameters["dense MLP"] == 2 * MLP_WEIGHTS * 2


def test_all_to_all_says_the_most_and_what_was_seen():
    """4 shards of 2, 2, 3 and 3 rows: a row goes to 4 ranks at most, and 10 rows come at most."""
    comparison = compare_case(Case(requests=((3,), (5,)), tp=2, all2all_backend="all_to_all"))
    side = comparison.accounting["candidate"]
    forward = next(f for f in side.forwards if (f.name, f.dp_rank) == ("target step", 1))
    calls = [t for t in forward.traffic if t.kind == "all_to_all"]
    assert {(t.count, t.bytes, t.at_most) for t in calls} == {(5, (4 + 3 * 4 * (D + K + K) + 10 * D) * B, True)}
    assert all(t.seen_count == 5 and 0 < t.seen_bytes < t.bytes for t in calls)
    assert side.seen_bytes_per_token < side.bytes_per_token
    assert side.activations["MLP, experts"].at_most


def test_a_call_beyond_the_table_is_shown():
    """The target step has 25 calls; the rank made 27."""
    plan = make_plan(Case(requests=((3,),), tp=2, mtp_steps=0))
    calls = [{"kind": "all_reduce", "group": "tp", "bytes": 8}] * 27
    both = account(plan, [{"rank": 0, "candidate": {"collectives": {"target 0": calls}}}])
    side = both["candidate"]
    (beyond,) = [t for t in side.forwards[0].traffic if t.place == "beyond the table"]
    assert (beyond.count, beyond.bytes, beyond.seen_count, beyond.seen_bytes) == (0, 0, 2, 16)
    assert side.seen_bytes_per_token is None, "rank 1 logged nothing"
    lines = list(accounting_lines(plan, both))
    assert any(
        line.split() == ["beyond", "the", "table", "all_reduce", "tp", "0", "0", "B", "16", "B"] for line in lines
    )
    assert max(map(len, lines)) <= 80
