import pytest
import torch

from spcheck.comm.errors import WorldFailed
from spcheck.comm.loopback import run_loopback
from spcheck.comm.recorded import CollectiveRecord, Recorded


def test_every_call_is_recorded_with_its_argument():
    def main(world):
        log, module = [], ["layers.0"]
        tp = Recorded(world.group("tp", (0, 1)), log, lambda: module[-1])
        ep = Recorded(world.group("ep", (0, 1)), log, lambda: module[-1])
        x = torch.ones(4, 2, dtype=torch.bfloat16)
        results = [tp.all_reduce(x), tp.all_gather(x), ep.reduce_scatter(x)]
        module.append("layers.1.mlp")
        results += [
            ep.all_gatherv(torch.arange(world.rank), [0, 1]),
            ep.reduce_scatterv(x, [3, 1]),
            tp.all_to_all(x, [4, 0], [4, 0]) if world.rank == 0 else tp.all_to_all(x, [0, 4], [0, 4]),
            tp.broadcast(torch.tensor(True), 0),
        ]
        tp.barrier()
        return log, [list(result.shape) for result in results], (ep.rank, ep.size, ep.group)

    (log, shapes, _), (other, _, about) = run_loopback(2, main)
    assert log == [
        CollectiveRecord(0, "all_reduce", "tp", (4, 2), "bfloat16", 16, "layers.0"),
        CollectiveRecord(1, "all_gather", "tp", (4, 2), "bfloat16", 16, "layers.0"),
        CollectiveRecord(2, "reduce_scatter", "ep", (4, 2), "bfloat16", 16, "layers.0"),
        CollectiveRecord(3, "all_gatherv", "ep", (0,), "int64", 0, "layers.1.mlp", (0, 1)),
        CollectiveRecord(4, "reduce_scatterv", "ep", (4, 2), "bfloat16", 16, "layers.1.mlp", (3, 1)),
        CollectiveRecord(5, "all_to_all", "tp", (4, 2), "bfloat16", 16, "layers.1.mlp", (4, 0), (4, 0)),
        CollectiveRecord(6, "broadcast", "tp", (), "bool", 1, "layers.1.mlp", (0,)),
        CollectiveRecord(7, "barrier", "tp", (), "", 0, "layers.1.mlp"),
    ]
    assert other[3] == CollectiveRecord(3, "all_gatherv", "ep", (1,), "int64", 8, "layers.1.mlp", (0, 1))
    assert shapes == [[4, 2], [8, 2], [2, 2], [1], [3, 2], [4, 2], []]
    assert about == (1, 2, "ep")


def test_a_call_that_never_returns_is_recorded():
    logs = [[], []]

    def main(world):
        tp = Recorded(world.group("tp", (0, 1)), logs[world.rank], lambda: "")
        if world.rank == 0:
            tp.all_reduce(torch.ones(1))

    with pytest.raises(WorldFailed):
        run_loopback(2, main)
    assert [[record.kind for record in log] for log in logs] == [["all_reduce"], []]
