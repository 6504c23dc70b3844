"""Which collectives a step issues, in order, counted by hand: 3 rows, tp 2, so shards of 2."""

import pytest
from test_optimized_helpers import ALTERNATING, PRESET, build, on_ranks, tiny, token_ids

N, M, D, K, V = 3, 2, 96, 10, 125
K_ALTERNATING = 4

REDUCE = ("tp", "all_reduce", (N, D))
SCATTER = ("tp", "reduce_scatter", (2 * M, D))
LOGITS = ("tp", "all_gather", (V, N))


def gather(states):
    return ("tp", "all_gather", (M, states * D))


def exchange(group, m, total, k=K):
    """Dispatch and combine by gather."""
    sizes = [("all_gatherv", (m, D)), ("all_gatherv", (m, k)), ("all_gatherv", (m, k)), ("reduce_scatterv", (total, D))]
    return [(group, *call) for call in sizes]


MOE = exchange("ep", M, 2 * M)


def calls_of(preset, scheme, aux_layers=(), **overrides):
    """Collectives of a target step and of draft step 0."""
    config = tiny(preset, **overrides)

    def main(world):
        calls = []
        engine = build(world, config, scheme=scheme, aux_layers=aux_layers, calls=calls)
        engine.start([N])
        engine.step([(0, 0, token_ids(config, N))])
        target, calls[:] = list(calls), []
        engine.draft([0], 0)
        return target, calls

    first, second = on_ranks(2, main)
    assert first == second
    return first


def test_tp_reduces_twice_a_layer():
    target, draft = calls_of(PRESET, "tp", (3,))
    assert target == [REDUCE] + [REDUCE] * 5 + [REDUCE] + [REDUCE] * 5 + [LOGITS]
    assert draft == [REDUCE] * 3 + [LOGITS]


def test_full_sp_gathers_and_scatters_once_a_layer():
    target, draft = calls_of(PRESET, "full-sp", (3, 4))
    dense = [gather(1), SCATTER]
    assert target == [REDUCE, *dense, *dense, *[*dense, *MOE] * 3, gather(3), LOGITS]
    assert draft == [REDUCE, *dense, *MOE, gather(1), LOGITS]


@pytest.mark.parametrize("aux_layers", [(), (2, 3, 4)])
def test_moe_sp_leaves_its_shards_once(aux_layers):
    """Layers 2, 3, 4 have experts. The state at layer 2 costs a reduction; those at 3 and 4 ride along at the exit."""
    target, draft = calls_of(PRESET, "moe-sp", aux_layers)
    dense = [REDUCE] * 3  # the norm behind attention in layer 0, both norms of layer 1
    aux, riding = [REDUCE][: len(aux_layers)], len(aux_layers[1:])
    entry, inner = [*aux, REDUCE, SCATTER, *MOE], [gather(1), SCATTER, *MOE]
    assert target == [REDUCE, *dense, *entry, *inner, *inner, gather(2 + riding), LOGITS]
    assert draft == [REDUCE, SCATTER, *MOE, gather(2), LOGITS]


@pytest.mark.parametrize("aux_layers", [(), (3, 5)])
def test_moe_sp_crosses_the_border_both_ways(aux_layers):
    """Layers 2 and 4 have experts. A state behind a border is complete and costs nothing."""
    target, _ = calls_of(ALTERNATING, "moe-sp", aux_layers)
    there_and_back = [REDUCE, SCATTER, *exchange("ep", M, 2 * M, K_ALTERNATING), gather(2)]
    behind_attention, before_attention, at_exit = REDUCE, REDUCE, REDUCE
    first, second = [behind_attention], [before_attention, behind_attention]
    behind_border = [*there_and_back, behind_attention]
    assert target == [REDUCE, *first, *second, *behind_border, *behind_border, at_exit, LOGITS]


@pytest.mark.parametrize("scheme", ["tp", "moe-sp", "full-sp"])
def test_data_parallel_ranks_agree_once_a_step_and_dispatch_in_their_group(scheme):
    """DP ranks of 3 and 1 rows, tp 2: full rows go over the DP group, shards of 2, 2, 1, 1 rows over the world."""
    config, rows = tiny(), (N, 1)

    def main(world):
        calls, n = [], rows[world.rank // 2]
        engine = build(world, config, scheme=scheme, dp=2, calls=calls)
        engine.start([n + 1])
        engine.step([(0, 0, token_ids(config, n))])
        for step in range(2):
            engine.draft([0], step)
        return calls

    for rank, calls in enumerate(on_ranks(4, main)):
        n = rows[rank // 2]
        assert [call for call in calls if call[0] == "dp_cpu"] == [("dp_cpu", "all_reduce", (3, 2))] * 2
        assert calls[0][0] == "dp_cpu"
        whole = exchange("dp", n, 4) if scheme == "tp" else exchange("ep", -(-n // 2), 6)
        single = exchange("dp", 1, 2) if scheme == "tp" else exchange("ep", 1, 4)
        # Three MoE layers and the MTP layer, then the MTP layer again with one row a request.
        assert [call for call in calls if call[0] in ("dp", "ep")] == whole * 4 + single
