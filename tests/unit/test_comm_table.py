"""One table of collectives, run on threads and on gloo processes, against sums and copies written out here."""

import itertools
import multiprocessing
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from spcheck.comm.errors import CollectiveFailed, CollectiveMismatch
from spcheck.comm.loopback import run_loopback
from spcheck.comm.process import open_world

SIZES = (1, 2, 3, 4)
SUMS = ("all_reduce", "reduce_scatter", "reduce_scatterv")
MOVES = ("all_gather", "all_gatherv", "all_to_all", "broadcast")
SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
MOVE_DTYPES = (*SUM_DTYPES, torch.bool, torch.float8_e4m3fn)
ROWS = {"even": (2, 2, 2, 2), "uneven": (1, 0, 3, 2), "empty": (0, 0, 0, 0)}


@dataclass(frozen=True)
class Case:
    kind: str
    size: int
    dtype: torch.dtype
    rows: str
    inner: tuple[int, ...]
    strided: bool

    @property
    def counts(self):
        each = {"even": 2, "uneven": 3, "empty": 0}[self.rows]
        return ROWS[self.rows][: self.size] if self.kind.endswith("v") else (each,) * self.size

    @property
    def traffic(self):
        """Rows from i to j."""
        modulus = {"even": 1, "uneven": 3, "empty": 1}[self.rows]
        base = 2 if self.rows == "even" else 0
        return [[base + (2 * i + j) % modulus for j in range(self.size)] for i in range(self.size)]

    def argument(self, rank):
        rows = {
            "all_to_all": sum(self.traffic[rank]),
            "all_gatherv": self.counts[rank],
            "reduce_scatterv": sum(self.counts),
            "reduce_scatter": sum(self.counts),
        }.get(self.kind, self.counts[0])
        generator = torch.Generator().manual_seed(rank + 10 * len(repr(self)))
        shape = (rows, *self.inner)
        if self.strided:
            shape = shape[::-1]
        x = torch.randint(0, 8, shape, generator=generator).to(self.dtype)
        return x.permute(*reversed(range(x.dim()))) if self.strided else x

    def call(self, communicator, x):
        method = getattr(communicator, self.kind)
        if self.kind == "all_to_all":
            rank = communicator.rank
            return method(x, self.traffic[rank], [row[rank] for row in self.traffic])
        if self.kind == "broadcast":
            return method(x, self.size - 1)
        return method(x, list(self.counts)) if self.kind.endswith("v") else method(x)

    def expected(self, rank):
        xs = [self.argument(other) for other in range(self.size)]
        if self.kind in SUMS:
            total = sum(x.double() for x in xs).to(self.dtype)
            first = sum(self.counts[:rank])
            return total if self.kind == "all_reduce" else total[first : first + self.counts[rank]]
        if self.kind == "broadcast":
            return xs[-1]
        if self.kind == "all_to_all":
            starts = [sum(self.traffic[other][:rank]) for other in range(self.size)]
            xs = [x[start : start + self.traffic[i][rank]] for i, (x, start) in enumerate(zip(xs, starts, strict=True))]
        rows = [row for x in xs for row in x.double().tolist()]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), *self.inner).to(self.dtype)


def _cases():
    for kinds, dtypes in ((SUMS, SUM_DTYPES), (MOVES, MOVE_DTYPES)):
        for kind, size, dtype, rows in itertools.product(kinds, SIZES, dtypes, ROWS):
            yield Case(kind, size, dtype, rows, (3,), strided=False)
            if dtype == torch.float32:  # what the rows look like and their dtype do not interact
                yield Case(kind, size, dtype, rows, (2, 3), strided=True)
                yield Case(kind, size, dtype, rows, (), strided=False)


CASES = tuple(_cases())


def perform(world):
    """Every case on this rank: {index: (argument after the call, result)}."""
    groups = {size: world.group(f"first{size}", range(size)) for size in SIZES}
    done = {}
    for index, case in enumerate(CASES):
        communicator = groups[case.size]
        if communicator is not None:
            x = case.argument(communicator.rank)
            done[index] = (x, case.call(communicator, x))
            if index % 20 == 0:
                communicator.barrier()
    return done


def _same(actual, expected):
    same_form = actual.dtype == expected.dtype and actual.shape == expected.shape and actual.is_contiguous()
    return same_form and torch.equal(actual.double(), expected.double())


def _wrong(per_rank):
    """The cases and ranks with a wrong result or a changed argument."""
    wrong = []
    for rank, done in enumerate(per_rank):
        for index, (x, result) in done.items():
            case = CASES[index]
            if not _same(result, case.expected(rank)) or not torch.equal(x.double(), case.argument(rank).double()):
                wrong.append((rank, case, result, case.expected(rank)))
    return wrong


def test_the_table_is_right_on_threads_and_nothing_aliases():
    per_rank = run_loopback(4, perform)
    assert _wrong(per_rank) == []
    assert [len(done) for done in per_rank] == [sum(case.size > rank for case in CASES) for rank in range(4)]
    for index in range(len(CASES)):
        tensors = [x for done in per_rank for x in done.get(index, ()) if x.numel()]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors), CASES[index]


def _messages(world):
    def message(receiver):
        whole = torch.arange(12.0).view(3, 4) * (1 + world.rank)
        tied = {"part": whole[:, 1], "whole": whole, "again": whole, "bool": torch.tensor([True]), "none": whole[:0]}
        return {} if receiver == 1 else {**tied, "to": torch.tensor(receiver), "bf16": whole.bfloat16()}

    return [message(receiver) for receiver in range(world.size)]


def _swaps(world):
    first = world.swap(_messages(world))
    nothing = world.swap([{}] * world.size)
    world.barrier()
    return first, nothing


def _check_swaps(per_rank, size):
    for rank, (first, nothing) in enumerate(per_rank):
        assert nothing == [{}] * size
        for sender, message in enumerate(first):
            if rank == 1:
                assert message == {}
            else:
                assert int(message["to"]) == rank
                assert torch.equal(message["part"], torch.tensor([1.0, 5.0, 9.0]) * (1 + sender))
                assert message["bf16"].dtype == torch.bfloat16
                assert message["none"].shape == (0, 4)


@pytest.mark.parametrize("size", SIZES)
def test_threads_swap_messages(size):
    _check_swaps(run_loopback(size, _swaps), size)


def _in_process(rank, size, folder, main):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no deprecated name may be in use
        world = open_world("gloo", rank, size, folder, 30.0)
        torch.save(main(world), folder / f"{rank}.pt")
        world.close()


def run_processes(size, folder, main):
    """What `main(world)` returns in each of `size` gloo processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # one import of torch for all processes
    processes = [context.Process(target=_in_process, args=(rank, size, folder, main)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _failures(world):
    seen = {}
    pair = world.group("pair", (0, 1))
    seen["cached"] = pair is world.group("pair", (0, 1))
    seen["other name"] = pair is world.group("other", (0, 1))
    seen["outsider"] = world.group("one", [0]) is None
    try:
        world.group(f"group of {world.rank}", (0, 1))
    except CollectiveMismatch as error:
        seen["disagreed"] = str(error)
    if world.rank != 0:
        return seen
    try:
        pair.all_reduce(torch.ones(2))
    except CollectiveFailed as error:
        seen["lost"] = str(error)
    return seen


def _everything(world):
    return perform(world), _swaps(world), _failures(world)


def test_gloo(tmp_path: Path):
    """All in one launch: it is the launch that takes the time."""
    per_rank = run_processes(4, tmp_path, _everything)
    assert _wrong([done for done, _, _ in per_rank]) == []
    _check_swaps([swaps for _, swaps, _ in per_rank], 4)
    _check_failures(*(failures for _, _, failures in per_rank))


def _check_failures(first, second, third, fourth):
    for outsider in (third, fourth):
        assert [outsider[key] for key in ("cached", "other name", "outsider")] == [True, True, True]
    assert [first[key] for key in ("cached", "other name", "outsider")] == [True, False, False]
    assert second["outsider"]
    assert "rank 0 makes group 'group of 0' [0, 1], but rank 1 makes 'group of 1'" in first["disagreed"]
    assert "all_reduce in group 'pair' [0, 1]" in first["lost"]


def test_nobody_comes(tmp_path: Path):
    before = dict(os.environ)
    try:
        with pytest.raises(CollectiveFailed, match="rank 0 of 2"):
            open_world("gloo", 0, 2, tmp_path, 0.5)
    finally:
        os.environ.clear()
        os.environ.update(before)
