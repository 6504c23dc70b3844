import subprocess
import sys

import pytest
import torch
from test_optimized_helpers import on_ranks

from optimized.batch import AdapterRows
from optimized.forward_context import (
    DPMetadata,
    ForwardContext,
    coordinate_batch_across_dp,
    get_forward_context,
    narrowed_padding_mask,
    set_forward_context,
)
from optimized.parallel_config import ParallelConfig, resolve_scheme


@pytest.mark.parametrize(
    ("requested", "settings", "scheme", "reason"),
    [
        ("auto", {}, "full-sp", "expert parallel on, tp 2 > 1, backend allgather_reducescatter"),
        ("auto", {"data_parallel_size": 2}, "full-sp", "expert parallel on, tp 2 > 1, backend allgather_reducescatter"),
        ("moe-sp", {"all2all_backend": "naive"}, "moe-sp", "expert parallel on, tp 2 > 1, backend naive"),
        ("full-sp", {"all2all_backend": "all_to_all"}, "full-sp", "expert parallel on, tp 2 > 1, backend all_to_all"),
        ("tp", {}, "tp", "tp was requested"),
        ("auto", {"tensor_parallel_size": 1}, "tp", "tp is 1"),
        ("auto", {"tensor_parallel_size": 1, "data_parallel_size": 2}, "tp", "tp is 1"),
        ("auto", {"pipeline_parallel_size": 2}, "tp", "pipeline parallel size 2 > 1"),
        ("auto", {"lora": True}, "tp", "LoRA adapters present"),
        ("auto", {"enable_expert_parallel": False}, "tp", "expert parallel off"),
        (
            "auto",
            {"all2all_backend": "pplx"},
            "tp",
            "backend pplx is not one of allgather_reducescatter, naive, all_to_all",
        ),
    ],
)
def test_resolution_and_its_reason(requested, settings, scheme, reason):
    assert resolve_scheme(requested, ParallelConfig(**({"tensor_parallel_size": 2} | settings))) == (scheme, reason)


@pytest.mark.parametrize("scheme", ["moe-sp", "full-sp"])
@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({"tensor_parallel_size": 1}, "tp is 1"),
        ({"pipeline_parallel_size": 2}, "pipeline parallel size 2 > 1"),
        ({"lora": True}, "LoRA adapters present"),
        ({"enable_expert_parallel": False}, "expert parallel off"),
    ],
)
def test_forcing_what_cannot_be_is_an_error_of_one_sentence(scheme, settings, obstacle):
    with pytest.raises(ValueError, match=f"^{scheme} cannot be: {obstacle}$"):
        resolve_scheme(scheme, ParallelConfig(**({"tensor_parallel_size": 2} | settings)))


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="unknown scheme"):
        resolve_scheme("sp", ParallelConfig(2))


def test_no_data_parallelism_is_needed():
    assert ParallelConfig(2, data_parallel_size=1).use_sequence_parallel_moe
    assert not ParallelConfig(2, enable_expert_parallel=False).use_sequence_parallel_moe


def test_the_configuration_imports_no_torch():
    code = "import sys, optimized.parallel_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_local_sizes_are_rounded_up_per_dp_rank():
    sizes = DPMetadata(torch.tensor([3, 8, 1])).sp_local_sizes(2)
    assert sizes == [2, 2, 4, 4, 1, 1]


@pytest.mark.parametrize(("has_moe", "sp", "there"), [(True, True, True), (True, False, False), (False, True, False)])
def test_metadata_exists_where_rows_are_dispatched(has_moe, sp, there):
    made = DPMetadata.make(5, ParallelConfig(2), has_moe=has_moe, use_sequence_parallel=sp)
    assert (made is not None) == there
    if made is not None:
        assert made.num_tokens_across_dp.tolist() == [5]


def coordinate(counts, padded, verifying=()):
    """What every DP rank is told, in one collective; ``verifying`` are the ranks that verify drafts."""

    def main(world):
        calls, group = [], world.group("dp_cpu", range(world.size))
        reduce = group.all_reduce
        group.all_reduce = lambda x: (calls.append((x.dtype, tuple(x.shape), x.device.type)), reduce(x))[1]
        graph_padded = padded[world.rank]
        flags = {"graph_padded": graph_padded, "verifies_drafts": world.rank in verifying}
        agreed = coordinate_batch_across_dp(counts[world.rank], group, **flags)
        assert calls == [(torch.int64, (3, world.size), "cpu")]
        return agreed.num_tokens_across_dp.tolist(), agreed.verifies_drafts

    return on_ranks(len(counts), main)


def test_dp_ranks_tell_each_other_their_rows():
    assert coordinate([3, 1, 8], [False] * 3) == [([3, 1, 8], False)] * 3


@pytest.mark.parametrize("who", range(3))
def test_one_graph_pads_all_to_the_most(who):
    assert coordinate([3, 1, 8], [rank == who for rank in range(3)]) == [([8, 8, 8], False)] * 3


@pytest.mark.parametrize("who", range(3))
def test_one_that_verifies_is_known_to_all(who):
    assert coordinate([3, 1, 8], [False] * 3, {who}) == [([3, 1, 8], True)] * 3


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("agreed", [None, torch.tensor([4, 7])])
def test_metadata_takes_what_was_agreed_or_agrees_itself(sp, agreed):
    def main(world):
        parallel, group = ParallelConfig(2, 2, world.rank), world.group("dp_cpu", range(2))
        made = DPMetadata.make(4 + 3 * world.rank, parallel, agreed, group, has_moe=True, use_sequence_parallel=sp)
        return made.num_tokens_across_dp.tolist(), made.dp_rank

    assert on_ranks(2, main) == [([4, 7], 0), ([4, 7], 1)]


def test_agreed_counts_are_those_of_the_own_rows():
    parallel = ParallelConfig(2, 2, data_parallel_rank=1)
    with pytest.raises(ValueError, match="DP rank 1 announced 7 rows and has 4"):
        DPMetadata.make(4, parallel, torch.tensor([4, 7]), has_moe=True, use_sequence_parallel=True)


def test_full_rows_are_announced_per_dp_rank():
    assert DPMetadata(torch.tensor([3, 8, 1])).sp_local_sizes(1) == [3, 8, 1]


def test_the_own_entry_is_the_number_of_rows():
    with pytest.raises(ValueError, match="announced 3 rows and has 4"), set_forward_context(4, None, _rows(3)):
        pass


def test_the_adapters_are_those_of_the_rows():
    rows = AdapterRows(torch.tensor([1, -1, 0, 1]))
    assert [(i, found.tolist()) for i, found in rows.groups] == [(0, [2]), (1, [0, 3])]
    with set_forward_context(4, adapter_rows=rows) as context:
        assert context.adapter_rows is rows
    with pytest.raises(ValueError, match="for 4 of 3 rows"), set_forward_context(3, adapter_rows=rows):
        pass


def test_the_context_ends_with_its_block():
    assert get_forward_context() == ForwardContext()
    with set_forward_context(3, None, _rows(3)) as outer:
        with set_forward_context(4, None, _rows(4)) as inner:
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    assert get_forward_context() == ForwardContext()


def test_the_context_ends_with_an_error_too():
    with pytest.raises(KeyError), set_forward_context(3):
        raise KeyError
    assert get_forward_context() == ForwardContext()


def test_a_narrowed_mask_is_put_back():
    full, shard = torch.zeros(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    with set_forward_context(3, full, _rows(3)) as outer:
        for _ in range(2):
            assert get_forward_context().is_padding is full
            with narrowed_padding_mask(shard) as inner:
                assert inner is outer
                assert get_forward_context().is_padding is shard
        assert get_forward_context().is_padding is full
        with pytest.raises(KeyError), narrowed_padding_mask(shard):
            raise KeyError
        assert outer.is_padding is full


def test_a_mask_can_be_narrowed_where_no_context_exists():
    shard = torch.ones(2, dtype=torch.bool)
    with narrowed_padding_mask(shard):
        assert get_forward_context().is_padding is shard
    assert get_forward_context().is_padding is None


def _rows(n):
    return DPMetadata(torch.tensor([n]))
