"""What one rank can check of its own arguments, the same for every backend."""

from collections.abc import Sequence

from torch import Tensor

from spcheck.comm.errors import CollectiveArgumentError


def rows(kind: str, x: Tensor) -> int:
    """The rows of `x`; raises CollectiveArgumentError for a scalar."""
    if x.dim() == 0:
        raise CollectiveArgumentError(f"{kind} needs rows, and got a scalar")
    return x.shape[0]


def even_sizes(kind: str, x: Tensor, size: int) -> list[int]:
    """The rows of each of `size` equal blocks of `x`; raises CollectiveArgumentError where it does not divide."""
    block, rest = divmod(rows(kind, x), size)
    if rest:
        raise CollectiveArgumentError(f"{kind}: {x.shape[0]} rows do not divide over {size} ranks")
    return [block] * size


def check_sizes(kind: str, sizes: Sequence[int], size: int) -> None:
    """One row count per rank, none below zero, else CollectiveArgumentError."""
    if len(sizes) != size or any(count < 0 for count in sizes):
        raise CollectiveArgumentError(f"{kind}: {list(sizes)} is not one row count for each of {size} ranks")


def check_rows(kind: str, x: Tensor, expected: int) -> None:
    """`x` has `expected` rows, else CollectiveArgumentError."""
    if rows(kind, x) != expected:
        raise CollectiveArgumentError(f"{kind}: the sizes say {expected} rows, the tensor {tuple(x.shape)} has others")


def check_all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], rank: int) -> None:
    """`send` and `receive` fit `x`, each other and a group in which this is `rank`, else CollectiveArgumentError."""
    check_rows("all_to_all", x, sum(send))
    if send[rank] != receive[rank]:
        raise CollectiveArgumentError(f"all_to_all: rank {rank} sends itself {send[rank]} rows, not {receive[rank]}")


def check_source(source: int, size: int) -> None:
    """`source` is a rank of the group, else CollectiveArgumentError."""
    if not 0 <= source < size:
        raise CollectiveArgumentError(f"broadcast: source {source} is no rank of a group of {size}")


def check_group(name: str, ranks: Sequence[int], world_size: int) -> None:
    """`ranks` are ascending ranks of the world, at least one, else CollectiveArgumentError.

    Ascending because torch.distributed sorts them, which would silently give the ranks other places in the group.
    """
    inside = all(0 <= rank < world_size for rank in ranks)
    if not ranks or not inside or sorted(set(ranks)) != list(ranks):
        raise CollectiveArgumentError(f"group {name!r}: {list(ranks)} are not ascending ranks of {world_size}")
