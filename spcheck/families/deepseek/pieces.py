"""Blocks of checkpoint tensors, and how they fill a parameter. No torch.

A span is (first, one behind the last) along one axis. A checkpoint tensor has one axis or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

Span = tuple[int, int]

ZEROS = ""
"""The name that a piece has in the place of a tensor's where a parameter must hold zeros."""


@dataclass(frozen=True)
class Block:
    """A block of one checkpoint tensor: a span of each of its axes."""

    tensor: str
    spans: tuple[Span, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(stop - start for start, stop in self.spans)

    def rows(self, start: int, stop: int) -> Block:
        """The rows from ``start`` to ``stop`` of this block."""
        first = self.spans[0][0]
        return replace(self, spans=((first + start, first + stop), *self.spans[1:]))


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint tensor and where it stands: a span of each axis of the parameter.

    A ``transposed`` block stands there with its axes exchanged.
    """

    tensor: str
    source: tuple[Span, ...]
    target: tuple[Span, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis of the parameter."""
        return tuple(stop - start for start, stop in self.target)


@dataclass(frozen=True)
class Holding:
    """What one parameter of one rank must hold: the pieces tile it.

    ``divided`` names the ranks over which it is cut: "" (every rank has all of it), "tp" or "world". A ``wide``
    parameter keeps the type of statistics, which is never below float32.
    """

    name: str
    pieces: tuple[Piece, ...]
    divided: str = ""
    wide: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        axes = zip(*(piece.target for piece in self.pieces), strict=True)
        return tuple(max(stop for _, stop in spans) for spans in axes)


def whole(tensor: str, *shape: int) -> Block:
    """All of a tensor."""
    return Block(tensor, tuple((0, length) for length in shape))


def cut(block: Block, axis: int, rank: int, ranks: int) -> Block:
    """The part of rank ``rank`` when ``axis`` is divided into equal parts for ``ranks`` ranks."""
    start, stop = block.spans[axis]
    step = (stop - start) // ranks
    spans = list(block.spans)
    spans[axis] = (start + rank * step, start + (rank + 1) * step)
    return replace(block, spans=tuple(spans))


def stacked(blocks: Iterable[Block]) -> tuple[Piece, ...]:
    """Blocks one below the other."""
    pieces, row = [], 0
    for block in blocks:
        count, *others = block.shape
        target = ((row, row + count), *((0, length) for length in others))
        pieces.append(Piece(block.tensor, block.spans, target))
        row += count
    return tuple(pieces)


def packed(matrices: Sequence[Sequence[Block]]) -> tuple[Piece, ...]:
    """A parameter of three axes: entry ``i`` of the first has the blocks of ``matrices[i]`` one below the other."""
    return tuple(_packed(matrices))


def _packed(matrices: Sequence[Sequence[Block]]) -> Iterator[Piece]:
    for number, blocks in enumerate(matrices):
        for piece in stacked(blocks):
            yield replace(piece, target=((number, number + 1), *piece.target))


def packed_transposed(blocks: Sequence[Block]) -> tuple[Piece, ...]:
    """A parameter of three axes: entry ``i`` of the first is ``blocks[i]`` with its axes exchanged."""
    pieces = []
    for number, block in enumerate(blocks):
        rows, columns = block.shape
        target = ((number, number + 1), (0, columns), (0, rows))
        pieces.append(Piece(block.tensor, block.spans, target, transposed=True))
    return tuple(pieces)


def vocabulary_rows(table: Block, rank: int, ranks: int) -> tuple[Piece, ...]:
    """A rank's rows of a table [V, D] that is padded with rows of zeros to a multiple of ``ranks``."""
    (_, size), (_, width) = table.spans
    rows = -(-size // ranks)
    start = min(rank * rows, size)
    count = min(size - start, rows)
    columns = (0, width)
    pieces = [Piece(table.tensor, ((start, start + count), columns), ((0, count), columns))] if count else []
    if count < rows:
        pieces.append(Piece(ZEROS, ((0, rows - count), columns), ((count, rows), columns)))
    return tuple(pieces)
