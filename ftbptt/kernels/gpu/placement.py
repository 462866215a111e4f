"""A row loop -> what a GPU program keeps in registers, and what goes through memory.

A program on a GPU works on a tile of rows: a value is ``[rows, columns]`` in registers, with the
columns padded to a power of two, and Triton cannot slice it. So a product is computed in pieces,
one for each range of columns that is read (each gate of an LSTM is a separate product). A product
with concatenated values is a sum of products. What is read in another order goes through memory.

Several programs may share a tile of rows (``parts``). Each then has a part of the columns of every
wide value. Products and reductions read all columns, through memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..accesses import RowView, contiguous
from ..expressions import Expression
from ..rowloop import (
    Map,
    Memory,
    Operation,
    Product,
    Read,
    Reduce,
    RowLoop,
    Value,
    reads,
    scratch_for,
    with_reads,
)

# The fewest columns that a matrix unit (tensor core) takes.
_LEAST_COLUMNS = 16
# The most columns of a row that a product reads from memory at once, and a reduction, whose tile
# is in registers.
_MOST_COLUMNS, _MOST_REDUCED = 256, 128


def columns(count: int) -> int:
    """The columns of a tile that has ``count`` elements per row, with padding."""
    return 1 if count == 1 else max(_LEAST_COLUMNS, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Space:
    """The indices that an operation runs over, as the columns of a tile.

    ``outer``: the number of leading axes that a reduction keeps. They are padded separately from
    the axes that it reduces. ``parts``: the number of programs that share the columns.
    """

    shape: tuple[int, ...]
    outer: int = 0
    parts: int = 1

    @property
    def outer_size(self) -> int:
        return math.prod(self.shape[: self.outer])

    @property
    def inner_size(self) -> int:
        return math.prod(self.shape[self.outer :])

    @property
    def width(self) -> int:
        """Columns of a program, with padding."""
        outer = columns(self.outer_size) if self.outer else 1
        return columns(self.inner_size) * outer // self.parts

    @property
    def is_padded(self) -> bool:
        return self.width * self.parts != math.prod(self.shape)


@dataclass
class Tiles:
    """Where each value lies.

    - ``parts``: the number of programs that share a tile of rows.
    - ``history``: which carries are stored at every step, those that are wanted and maybe more.
    - ``computed``: the values that some operation computes, as tiles. The others are results of
      ``cat``, of which only the pieces are computed.
    - ``reduced``: the values of reductions, of which each program has all columns.
    - ``pieces``: for each product, the (offset, length) of the column ranges that are computed
      separately, as an ordered set.
    - ``next_carries``: the next value of each carry that stays in registers, by index.
    - ``read_back``: the memories that a step writes and reads again.
    - ``writers``: the operations that write to a memory.
    """

    rows: RowView
    parts: int
    history: list[bool]
    computed: set[Value] = field(default_factory=set)
    reduced: set[Value] = field(default_factory=set)
    pieces: dict[Value, dict[tuple[int, int], None]] = field(default_factory=dict)
    next_carries: dict[int, Value] = field(default_factory=dict)
    read_back: list[Memory] = field(default_factory=list)
    writers: dict[Memory, list[Operation]] = field(default_factory=dict)

    def space(self, shape: tuple[int, ...]) -> Space:
        """The indices of a value, of which a program has a part if there are enough of them."""
        is_wide = columns(math.prod(shape)) >= self.parts * _LEAST_COLUMNS
        return Space(shape, parts=self.parts if is_wide else 1)

    def flat(self, size: int) -> Space:
        """The same of ``size`` contiguous columns."""
        return self.space(flat(size).shape)

    def space_of_value(self, value: Value) -> Space:
        return Space(value.shape) if value in self.reduced else self.space(value.shape)

    def space_of(self, op: Map | Reduce) -> Space:
        """The indices that an operation runs over."""
        return Space(op.shape, op.outer) if isinstance(op, Reduce) else self.space(op.shape)

    def rows_of(self, op: Product) -> list[tuple[Read, Space, int]]:
        """What a product reads of its row, each with its indices and its offset in the row."""
        length, found = op.k if self.parts == 1 else _MOST_COLUMNS, []
        for first in range(0, op.k, length):
            space = flat(min(length, op.k - first))
            offset, strides = op.row.offset + first, contiguous(space.shape)
            found.append((replace(op.row, offset=offset, strides=strides), space, first))
        return found

    def ranges_of(self, op: Reduce) -> list[tuple[Expression, Space]]:
        """What a reduction reads, in ranges of its columns, each with its indices."""
        if self.parts == 1 or len(op.shape) > 1 or op.shape[0] <= _MOST_REDUCED:
            return [(op.expression, self.space_of(op))]
        ranges = [
            (first, flat(min(_MOST_REDUCED, op.shape[0] - first)))
            for first in range(0, op.shape[0], _MOST_REDUCED)
        ]
        return [(_from(op.expression, first, space), space) for first, space in ranges]

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
        length = size if source in self.pieces else source.size
        if space.parts != (1 if source in self.reduced else self.flat(length).parts):
            return False
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

    def stored_pieces(self, value: Value) -> list[tuple[int, int]]:
        """The pieces that a product is stored in, each element once; empty if they do not do."""
        if (0, value.size) in self.pieces[value]:
            return [(0, value.size)]
        ordered, end = sorted(self.pieces[value]), 0
        for offset, length in ordered:
            if offset != end:
                return []
            end += length
        return ordered if end == value.size and value.strides == contiguous(value.shape) else []

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
        if self.parts > 1:
            return None
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


def make_tiles(loop: RowLoop, parts: int) -> Tiles:
    """make_tiles : RowLoop x programs of a tile -> Tiles"""
    tiles = Tiles(loop.rows, parts, list(loop.history))
    for op in loop.operations:
        tiles.computed.add(op.value)
        if isinstance(op, Reduce):
            tiles.reduced.add(op.value)
        if isinstance(op, Product):
            tiles.pieces[op.value] = {}
        if op.value.memory is not None:
            tiles.writers.setdefault(op.value.memory, []).append(op)
    for i, memory in enumerate(loop.nexts):
        writers = tiles.writers[memory]
        value = writers[0].value
        is_whole = len(writers) == 1 and value.size == memory.size
        if is_whole and tiles.space_of_value(value).parts == tiles.flat(memory.size).parts:
            tiles.next_carries[i] = value
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
    for value in tiles.next_carries.values():
        tiles.add_full_piece(value)
    for value in tiles.pieces:
        if tiles.is_stored(value) and not tiles.stored_pieces(value):
            tiles.add_full_piece(value)
    return tiles


def flat(size: int) -> Space:
    """All indices of ``size`` contiguous columns."""
    return Space((size,) if size != 1 else ())


def _reads(loop: RowLoop, tiles: Tiles) -> Iterator[tuple[Read, Space]]:
    """All reads, except of rows of products that are computed from their pieces."""
    for op in loop.operations:
        if isinstance(op, Reduce):
            for expression, space in tiles.ranges_of(op):
                for read in reads(expression):
                    yield read, space
        elif isinstance(op, Map):
            for read in reads(op.expression):
                yield read, tiles.space_of(op)
        elif tiles.row_pieces(op) is None:
            for read, space, _ in tiles.rows_of(op):
                yield read, space


def _from(expr: Expression, first: int, space: Space) -> Expression:
    """The expression over one axis, from one of its indices on."""

    def moved(read: Read) -> Read:
        offset, strides = read.offset + first * read.strides[0], read.strides[: len(space.shape)]
        return replace(read, offset=offset, strides=strides)

    return with_reads(expr, moved)


def _put_in_memory(tiles: Tiles, source: Value | Memory) -> None:
    """Marks ``source`` as read from memory; a value without a memory gets a scratch memory."""
    if isinstance(source, Value):
        if source.memory is None:
            source.memory = scratch_for(source, tiles.rows)
        source = source.memory
    if source.kind in ("carry", "next"):
        tiles.history[source.index] = True
    if source.kind in ("scratch", "emit", "next", "carry") and source not in tiles.read_back:
        tiles.read_back.append(source)
