"""With data parallelism every DP rank computes its own requests, whatever the others have: rank by rank as alone."""

import pytest
import torch
from test_optimized_agreement import check_rank, run
from test_optimized_helpers import ALTERNATING, F64, Seen, build, close, on_ranks, tiny, token_ids

from optimized.batch import NewRows

NAN = float("nan")
BACKENDS = ["allgather_reducescatter", "naive", "all_to_all"]
ROWS = {1: ((3, 2),), 2: ((5, 1), (2,)), 3: ((1,), (), (4, 3))}


def check_dp(config, by_dp, tp, steps=2, aux_layers=(), **options):
    """``by_dp`` are the requests of each DP rank; () is idle."""
    dp = len(by_dp)

    def main(world):
        return run(world, config, by_dp[world.rank // tp], steps, dp=dp, aux_layers=aux_layers, **options)

    for rank, result in enumerate(on_ranks(dp * tp, main)):
        check_rank(result, config, by_dp[rank // tp], steps, aux_layers)


def sized(world_size, **overrides):
    """A model whose experts can be divided over so many ranks."""
    return tiny(n_routed_experts=72, moe_intermediate_size=144, **overrides) if world_size == 9 else tiny(**overrides)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize(
    ("scheme", "tp"),
    [("tp", 1), ("tp", 2), ("tp", 3), ("moe-sp", 2), ("moe-sp", 3), ("full-sp", 2), ("full-sp", 3)],
)
def test_schemes_backends_and_sizes(scheme, tp, dp, backend):
    check_dp(sized(dp * tp), ROWS[dp], tp, scheme=scheme, all2all_backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_without_expert_parallelism_channels_are_divided_over_the_world(dp, tp, backend):
    options = {"scheme": "tp", "expert_parallel": False, "all2all_backend": backend}
    check_dp(sized(dp * tp), ROWS[dp], tp, **options)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("by_dp", [((), (3,)), ((17,), (1,)), ((), (), (2, 1))])
def test_uneven_and_idle_ranks(scheme, by_dp):
    check_dp(tiny(), by_dp, 2, steps=3, scheme=scheme, all2all_backend="all_to_all")


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("padding", "skip"), [({}, False), ({"pad_to": 9}, True), ({"graph_sizes": (1, 4, 8)}, False)])
def test_padding_never_reaches_a_real_row(scheme, backend, padding, skip):
    options = {"scheme": scheme, "all2all_backend": backend, "skip_padding": skip, "content": NAN}
    check_dp(tiny(), ((3, 2), (), (1,)), 2, **options, **padding)


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_auxiliary_states_and_four_draft_steps(scheme):
    config = tiny(num_nextn_predict_layers=2)
    check_dp(config, ((4,), (1, 2)), 2, steps=4, aux_layers=(0, 2, 3, 5), scheme=scheme)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"first_k_dense_replace": 0}, {"num_hidden_layers": 5}, {"moe_layer_freq": 1}, {"first_k_dense_replace": 6}],
    ids=["dense-last", "moe-first", "moe-last", "one-dense", "all-dense"],
)
def test_moe_sp_crosses_every_border(overrides, tp, dp):
    config = tiny(ALTERNATING, **overrides)
    aux_layers = tuple(range(config.num_hidden_layers + 1))
    check_dp(config, ROWS[dp], tp, aux_layers=aux_layers, scheme="moe-sp")


@pytest.mark.parametrize(("graph_sizes", "rows"), [((), [[5], [1]]), ((1, 2, 4), [[5], [5]]), ((8, 16), [[8], [8]])])
def test_all_run_the_most_rows_where_one_runs_a_graph(graph_sizes, rows):
    def main(world):
        engine, seen = build(world, tiny(), scheme="tp", dp=2, graph_sizes=graph_sizes), Seen()
        seen.watch(engine, ["model"])
        engine.start([5] if world.rank == 0 else [])
        engine.step([(0, 0, token_ids(tiny(), 5))] if world.rank == 0 else [])
        return [out[0].shape[0] for out in seen.outputs("model")]

    assert on_ranks(2, main) == rows


def test_a_dense_model_agrees_on_nothing():
    config = tiny(first_k_dense_replace=5, num_nextn_predict_layers=0)

    def main(world):
        engine, seen = build(world, config, scheme="tp", dp=2, graph_sizes=(4,)), Seen()
        engine.setup.dp_cpu.all_reduce = None  # is not called
        seen.watch(engine, ["model"])
        engine.start([])
        engine.step([])
        return [out[0].shape[0] for out in seen.outputs("model")]

    assert on_ranks(2, main) == [[4], [4]]


@pytest.mark.parametrize("scheme", ["tp", "full-sp"])
def test_without_a_context_the_ranks_tell_each_other_their_rows(scheme):
    config, rows = tiny(), (3, 1)

    def run_layer(world, n, **options):
        engine = build(world, config, **options)
        engine.start([n])
        batch = engine.slots.batch([NewRows(0, 0, n)], engine.slots.held[0], n, engine.inputs)
        hidden = torch.randn(n, config.hidden_size, dtype=F64, generator=torch.Generator().manual_seed(n))
        return engine.model.layers[5](token_ids(config, n, n), hidden, batch.positions, batch.attention)

    results = on_ranks(4, lambda world: run_layer(world, rows[world.rank // 2], scheme=scheme, dp=2))
    for rank, out in enumerate(results):
        (expected,) = on_ranks(1, lambda world, n=rows[rank // 2]: run_layer(world, n, scheme="tp"))
        close(out, expected)
