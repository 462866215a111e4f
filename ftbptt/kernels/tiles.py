"""A row loop -> what a GPU's program keeps in registers, and what goes through memory.

A program on a GPU works on a tile of rows: a value is ``[rows, columns]`` in its registers, with
the columns padded to a power of two, and no part of it can be taken out. So a product is computed
piece by piece, as it is read (each gate of an LSTM is a product of its own columns), a product
with joined values is a sum of products, and what is read in another order goes through memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from .accesses import RowPattern, contiguous
from .rowloop import Memory, Operation, Product, Read, Reduce, RowLoop, Value, reads

# A matrix unit takes no fewer columns.
_LEAST_COLUMNS = 16


def columns(count: int) -> int:
    """The columns of a tile for ``count`` numbers a row."""
    return 1 if count == 1 else max(_LEAST_COLUMNS, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Space:
    """The indices that an operation runs over, as the columns of a tile.

    ``outer``: so many leading axes are apart from the others, for a reduction that keeps them.
    """

    shape: tuple[int, ...]
    outer: int = 0

    @property
    def kept(self) -> int:
        return math.prod(self.shape[: self.outer])

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.outer :])

    @property
    def width(self) -> int:
        return columns(self.inner) * (columns(self.kept) if self.outer else 1)

    @property
    def is_padded(self) -> bool:
        return self.width != math.prod(self.shape)


@dataclass
class Tiles:
    """``made``: the values that are tiles. ``pieces``: the (offset, length) of the columns of each
    product that are computed apart. ``carried``: for each carry that stays in registers, the value
    that it has next; ``history``: the carries that are (also) kept in memory. ``read_back``: the
    memory that a step writes and reads again.
    """

    every_row: RowPattern
    history: list[bool]
    made: set[Value] = field(default_factory=set)
    pieces: dict[Value, dict[tuple[int, int], None]] = field(default_factory=dict)
    carried: dict[int, Value] = field(default_factory=dict)
    read_back: list[Memory] = field(default_factory=list)
    writers: dict[Memory, list[Operation]] = field(default_factory=dict)

    def in_register(self, read: Read, space: Space) -> bool:
        """Whether the columns of ``read`` over ``space`` are those of a tile that is at hand."""
        source, size = read.source, math.prod(space.shape)
        if isinstance(source, Memory):
            if source.kind != "carry" or source.index not in self.carried:
                return False
        elif source not in self.made:
            return False
        if source.size == 1:
            return True
        if space.outer or read.strides != contiguous(space.shape):
            return False
        return (read.offset == 0 and size == source.size) or source in self.pieces

    def piece(self, read: Read, space: Space) -> tuple[int, int]:
        """The columns of a product that are read, as (offset, length)."""
        return (0, 1) if read.source.size == 1 else (read.offset, math.prod(space.shape))

    def needs_whole(self, value: Value) -> None:
        if value in self.pieces:
            self.pieces[value][0, value.size] = None

    def is_stored(self, value: Value) -> bool:
        """Whether the value has a place in memory that anything reads."""
        memory = value.memory
        if memory is None or memory.kind == "emit":
            return memory is not None
        return self.history[memory.index] if memory.kind == "next" else memory in self.read_back

    def row_pieces(self, op: Product) -> list[tuple[Value, int]] | None:
        """The values that the row of a product is joined of, each with its place in the row."""
        source = op.row.source
        if isinstance(source, Memory) or source in self.made or source.memory is None:
            return None
        first = source.offset + op.row.offset
        found = [
            (own.value, own.value.offset - first)
            for own in self.writers[source.memory]
            if first <= own.value.offset < first + op.k
        ]
        found.sort(key=lambda piece: piece[1])
        end = 0
        for value, at in found:
            if at != end or value.strides != contiguous(value.shape):
                return None
            end += value.size
        return found if end == op.k else None


def make_tiles(loop: RowLoop, history: list[bool]) -> Tiles:
    """make_tiles : RowLoop, which carries have a history -> Tiles"""
    tiles = Tiles(RowPattern((0, len(loop.rows.dims)), 0), list(history))
    for op in loop.operations:
        tiles.made.add(op.value)
        if isinstance(op, Product):
            tiles.pieces[op.value] = {}
        if op.value.memory is not None:
            tiles.writers.setdefault(op.value.memory, []).append(op)
    for i, memory in enumerate(loop.nexts):
        writers = tiles.writers[memory]
        if len(writers) == 1 and writers[0].value.size == memory.size:
            tiles.carried[i] = writers[0].value
        else:
            tiles.history[i] = True
    for read, space in _reads(loop, tiles):
        source = read.source
        if not tiles.in_register(read, space):
            _read_back(tiles, source)
        elif isinstance(source, Value) and source in tiles.pieces:
            tiles.pieces[source][tiles.piece(read, space)] = None
    for op in loop.operations:
        if isinstance(op, Product):
            for value, _ in tiles.row_pieces(op) or ():
                tiles.needs_whole(value)
            if tiles.is_stored(op.value):
                tiles.needs_whole(op.value)
    for value in tiles.carried.values():
        tiles.needs_whole(value)
    return tiles


def space_of(op: Operation) -> Space:
    """The indices that an operation runs over; those of its row, for a product."""
    if isinstance(op, Product):
        return Space((op.k,) if op.k != 1 else ())
    return Space(op.shape, op.outer) if isinstance(op, Reduce) else Space(op.value.shape)


def _reads(loop: RowLoop, tiles: Tiles) -> Iterator[tuple[Read, Space]]:
    for op in loop.operations:
        if not isinstance(op, Product):
            for read in reads(op.expression):
                yield read, space_of(op)
        elif tiles.row_pieces(op) is None:
            yield op.row, space_of(op)


def _read_back(tiles: Tiles, source: Value | Memory) -> None:
    """``source`` is read from memory; a value without a place gets one of the kernel's own."""
    if isinstance(source, Value):
        if source.memory is None:
            source.memory = Memory("scratch", -1, source.dtype, source.size, tiles.every_row)
        source = source.memory
    if source.kind in ("carry", "next"):
        tiles.history[source.index] = True
    if source.kind in ("scratch", "emit", "next", "carry") and source not in tiles.read_back:
        tiles.read_back.append(source)
