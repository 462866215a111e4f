"""A row loop -> what a GPU program keeps in registers, and what goes through memory.

A program on a GPU works on a tile of rows: a value is ``[rows, columns]`` in registers, with the
columns padded to a power of two, and Triton cannot slice it. So a product is computed in pieces,
one for each range of columns that is read (each gate of an LSTM is a separate product). A product
with concatenated values is a sum of products. What is read in another order goes through memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from .accesses import RowPattern, contiguous
from .rowloop import Memory, Operation, Product, Read, Reduce, RowLoop, Value, reads

# The fewest columns that a matrix unit (tensor core) takes.
_LEAST_COLUMNS = 16


def columns(count: int) -> int:
    """The columns of a tile that has ``count`` elements per row, with padding."""
    return 1 if count == 1 else max(_LEAST_COLUMNS, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Space:
    """The indices that an operation runs over, as the columns of a tile.

    ``outer``: the number of leading axes that a reduction keeps. They are padded separately from
    the axes that it reduces.
    """

    shape: tuple[int, ...]
    outer: int = 0

    @property
    def outer_size(self) -> int:
        return math.prod(self.shape[: self.outer])

    @property
    def inner_size(self) -> int:
        return math.prod(self.shape[self.outer :])

    @property
    def width(self) -> int:
        """Columns, with padding."""
        return columns(self.inner_size) * (columns(self.outer_size) if self.outer else 1)

    @property
    def is_padded(self) -> bool:
        return self.width != math.prod(self.shape)


@dataclass
class Tiles:
    """Where each value lies.

    - ``history``: which carries are stored at every step.
    - ``computed``: the values that some operation computes, as tiles. The others are results of
      ``cat``, of which only the pieces are computed.
    - ``pieces``: for each product, the (offset, length) of the column ranges that are computed
      separately, as an ordered set.
    - ``next_carries``: the next value of each carry that stays in registers, by index.
    - ``read_back``: the memories that a step writes and reads again.
    - ``writers``: the operations that write to a memory.
    """

    every_row: RowPattern
    history: list[bool]
    computed: set[Value] = field(default_factory=set)
    pieces: dict[Value, dict[tuple[int, int], None]] = field(default_factory=dict)
    next_carries: dict[int, Value] = field(default_factory=dict)
    read_back: list[Memory] = field(default_factory=list)
    writers: dict[Memory, list[Operation]] = field(default_factory=dict)

    def in_register(self, read: Read, space: Space) -> bool:
        """Whether the columns of ``read`` over ``space`` are those of a tile in registers."""
        source, size = read.source, math.prod(space.shape)
        if isinstance(source, Memory):
            if source.kind != "carry" or source.index not in self.next_carries:
                return False
        elif source not in self.computed:
            return False
        if source.size == 1:
            return True
        if space.outer or read.strides != contiguous(space.shape):
            return False
        return (read.offset == 0 and size == source.size) or source in self.pieces

    def piece(self, read: Read, space: Space) -> tuple[int, int]:
        """The columns of a product that are read, as (offset, length)."""
        return (0, 1) if read.source.size == 1 else (read.offset, math.prod(space.shape))

    def add_full_piece(self, value: Value) -> None:
        """Has all columns computed as one piece, if the value is a product."""
        if value in self.pieces:
            self.pieces[value][0, value.size] = None

    def is_stored(self, value: Value) -> bool:
        """Whether the value must be written to its memory, because something reads it there."""
        memory = value.memory
        if memory is None or memory.kind == "emit":
            return memory is not None
        return self.history[memory.index] if memory.kind == "next" else memory in self.read_back

    def row_pieces(self, op: Product) -> list[tuple[Value, int]] | None:
        """The values that the row of a product is concatenated from, each with its offset in it.

        None if the row is no concatenation, or not of complete and contiguous values.
        """
        source = op.row.source
        if isinstance(source, Memory) or source in self.computed or source.memory is None:
            return None
        first = source.offset + op.row.offset
        pieces = [
            (writer.value, writer.value.offset - first)
            for writer in self.writers[source.memory]
            if first <= writer.value.offset < first + op.k
        ]
        pieces.sort(key=lambda piece: piece[1])
        end = 0
        for value, offset in pieces:
            if offset != end or value.strides != contiguous(value.shape):
                return None
            end += value.size
        return pieces if end == op.k else None


def make_tiles(loop: RowLoop, history: list[bool]) -> Tiles:
    """make_tiles : RowLoop x which carries have a history -> Tiles"""
    tiles = Tiles(RowPattern((0, len(loop.rows.dims)), 0), list(history))
    for op in loop.operations:
        tiles.computed.add(op.value)
        if isinstance(op, Product):
            tiles.pieces[op.value] = {}
        if op.value.memory is not None:
            tiles.writers.setdefault(op.value.memory, []).append(op)
    for i, memory in enumerate(loop.nexts):
        writers = tiles.writers[memory]
        if len(writers) == 1 and writers[0].value.size == memory.size:
            tiles.next_carries[i] = writers[0].value
        else:  # written in parts
            tiles.history[i] = True
    for read, space in _reads(loop, tiles):
        source = read.source
        if not tiles.in_register(read, space):
            _put_in_memory(tiles, source)
        elif isinstance(source, Value) and source in tiles.pieces:
            tiles.pieces[source][tiles.piece(read, space)] = None
    for op in loop.operations:
        if isinstance(op, Product):
            for value, _ in tiles.row_pieces(op) or ():
                tiles.add_full_piece(value)
            if tiles.is_stored(op.value):
                tiles.add_full_piece(op.value)
    for value in tiles.next_carries.values():
        tiles.add_full_piece(value)
    return tiles


def space_of(op: Operation) -> Space:
    """The indices that an operation runs over; for a product, those of its row."""
    if isinstance(op, Product):
        return Space((op.k,) if op.k != 1 else ())
    return Space(op.shape, op.outer) if isinstance(op, Reduce) else Space(op.value.shape)


def _reads(loop: RowLoop, tiles: Tiles) -> Iterator[tuple[Read, Space]]:
    """All reads, except of rows of products that are computed from their pieces."""
    for op in loop.operations:
        if not isinstance(op, Product):
            for read in reads(op.expression):
                yield read, space_of(op)
        elif tiles.row_pieces(op) is None:
            yield op.row, space_of(op)


def _put_in_memory(tiles: Tiles, source: Value | Memory) -> None:
    """Marks ``source`` as read from memory; a value without a memory gets a scratch memory."""
    if isinstance(source, Value):
        if source.memory is None:
            source.memory = Memory("scratch", -1, source.dtype, source.size, tiles.every_row)
        source = source.memory
    if source.kind in ("carry", "next"):
        tiles.history[source.index] = True
    if source.kind in ("scratch", "emit", "next", "carry") and source not in tiles.read_back:
        tiles.read_back.append(source)
