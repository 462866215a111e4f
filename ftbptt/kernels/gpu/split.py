"""A row loop -> Triton, where several programs share a tile of rows: the weights are split.

Each program has a part of the columns of every wide value, and of the weights only what these
columns need. So weights that one multiprocessor cannot hold stay in the shared memory of several.
What a product or a reduction reads, all columns of a row, the programs exchange through memory: at
least once a step they wait for each other. For that all of them must run at the same time.

The method is that of persistent RNNs (Diamos et al., "Persistent RNNs", ICML 2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ..expressions import Unsupported
from ..rowloop import Memory, Product, Reduce, RowLoop, Value, compute_dtype
from .expressions import type_of
from .loop import LoopPrinter
from .placement import Space, Tiles, columns, make_tiles
from .printer import name_of
from .products import RowPiece, RowTile

_WARPS = 8
# Integers of a counter at which the programs of a tile meet: a line of the cache for each.
_COUNTER = 32
_PARTS = 2, 4, 8, 16, 32, 64
# Rows of a tile: the least that a matrix unit takes, and the most whose results stay in registers.
_ROWS, _MOST_ROWS = 16, 32
# Without a matrix unit, fewer rows are less work for a program, if there are enough processors:
# so few take no longer than 16 with one.
_FEWEST_ROWS = 2
# The fewest elements of a row for which each warp multiplies some of them with all columns.
_LEAST_OF_A_WARP = 16
# Results of a product for each row. Each warp holds its part of all of them, in registers.
_MOST_RESULTS = 128
# Columns of an input that are loaded a step ahead, and wait in registers.
_MOST_LOADED_AHEAD = 64
# Of the rows that a product reads, what is loaded at once: half of all registers.
_MOST_LOADED_BYTES = 128 << 10
# Shared memory besides weights and products: rows as operands, reductions.
_OTHER_SHARED_BYTES = 35 << 10

_HEAD = """

@triton.jit
def arrive(arrivals):
    tl.debug_barrier()  # the stores of all threads of this program come first
    tl.atomic_add(arrivals, 1, sem="release")


@triton.jit
def arrived(arrivals):
    # Not an atomic addition of zero, whose result would go from one thread to all, each time.
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [arrivals], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait(arrivals, expected):
    while arrived(arrivals) < expected:
        pass


@triton.jit
def over_warps(products, WARPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Split, so that each thread sums all warps' parts of its own elements. A sum over the axis of
    # the warps would leave every element in every warp, and so would all that is computed of it.
    halves = tl.reshape(products, (WARPS // 2, 2, ROWS, COLUMNS))
    first, second = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return tl.sum(first + second, 0)

"""


class Sharing(NamedTuple):
    """How programs share rows: ``parts`` of them a tile of ``rows``."""

    parts: int
    rows: int


def choose_sharing(
    loop: RowLoop, processors: int, shared_bytes: int, has_matrix_unit: bool
) -> Sharing:
    """choose_sharing : RowLoop x a GPU's sizes -> Sharing

    ``processors``: the multiprocessors, each of which runs one program, with ``shared_bytes`` of
    shared memory. ``has_matrix_unit``: for the dtypes of the weights. Of those with which all
    programs run at once, the one with the fewest rows, and with the least work for a program.
    Raises Unsupported if there is none.
    """
    # Where a row is reduced, its columns are in registers as well.
    reduces = any(isinstance(op, Reduce) for op in loop.operations)
    groups = math.prod((*loop.rows.dims[: loop.grouped], *loop.rows.last(loop.trailing)))
    rows_of_group = loop.rows.total // max(groups, 1)
    for rows in (_ROWS, _MOST_ROWS) if has_matrix_unit and not reduces else (_ROWS,):
        candidates: list[tuple[int, int]] = []
        tiles_of_rows = groups * -(-rows_of_group // rows)
        for parts in _PARTS:
            tiles = make_tiles(loop, parts)
            if parts * tiles_of_rows <= processors and _is_held(loop, tiles, rows, shared_bytes):
                work = sum(weight_elements(tiles, op) for op in loop.products)
                candidates.append((work, parts))
        if candidates:
            return Sharing(min(candidates)[1], rows)
    raise Unsupported(
        f"split, with {loop.rows.total} rows, they do not fit on {processors} multiprocessors"
    )


def _is_held(loop: RowLoop, tiles: Tiles, rows: int, shared_bytes: int) -> bool:
    """Whether a multiprocessor holds a program's weights, and the results of its products."""
    widths = [[tiles.flat(n).width for _, n in tiles.pieces[op.value]] for op in loop.products]
    widest = max(width for of_product in widths for width in of_product)
    # Triton adds the parts of a product that the warps computed in shared memory.
    used = weight_bytes(loop, tiles) + 4 * _WARPS * rows * widest + _OTHER_SHARED_BYTES
    return used <= shared_bytes and max(map(sum, widths)) <= _MOST_RESULTS


def weight_elements(tiles: Tiles, op: Product) -> int:
    """The elements of a product's weight that a program holds."""
    pieces = tiles.row_pieces(op)
    row = (
        [value.size for value, _ in pieces]
        if pieces
        else [space.inner_size for _, space, _ in tiles.rows_of(op)]
    )
    return sum(map(columns, row)) * sum(tiles.flat(n).width for _, n in tiles.pieces[op.value])


def weight_bytes(loop: RowLoop, tiles: Tiles) -> int:
    """The bytes of all weights that a program holds."""
    return sum(
        weight_elements(tiles, op) * loop.weight_dtypes[op.weight].itemsize for op in loop.products
    )


class SplitPrinter(LoopPrinter):
    """Programs meet in two halves: each arrives as soon as it has stored what the others read,
    and waits for their arrivals where it reads, so that what lies in between delays none.

    All arrivals count the same, so a program arrives again only after it has waited.
    """

    head = LoopPrinter.head + _HEAD
    # A slot of scratch memory is written again only after the next step's meeting.
    scratch_slots = 2
    load_option = ', cache_modifier=".cg"'  # not from the cache of this multiprocessor

    def __init__(self, loop: RowLoop, sharing: Sharing) -> None:
        super().__init__(loop, sharing.parts)
        self.parts, self.tile_rows = sharing
        self.reshaped = set[str]()
        self.meetings = 0  # of the programs of a tile, in a step
        # The lines of a step after which all that the next meeting is for is stored: in this step,
        # and for the next one; and whether steps begin by waiting for the step before.
        self.stored = self.next_stored = 0
        self.awaits_step_before = False

    def _constants(self) -> Iterator[str]:
        is_exact = set(self.loop.weight_dtypes.values()) == {torch.float32}
        yield f"PARTS, WARPS = {self.parts}, {_WARPS}"
        rows = self.tile_rows
        yield f"TILE_ROWS, EXACT_ROWS = {rows}, {_FEWEST_ROWS if is_exact else rows}"
        yield f"COUNTER = {_COUNTER}"

    def _arguments(self) -> Iterator[str]:
        for name in super()._arguments():
            if name == "steps":
                yield "arrivals"
            yield name

    def _program(self) -> Iterator[str]:
        yield f"part = tl.program_id(0) % {self.parts}"
        yield f"program = tl.program_id(0) // {self.parts}"
        yield f"arrivals += program * {_COUNTER}"
        yield "expected = tl.full((), 0, tl.int32)"

    # -- meetings ---------------------------------------------------------------------------------

    def _step(self) -> None:
        super()._step()
        if self.awaits_step_before:
            self.prologue.append("arrive(arrivals)")
            self.body.insert(self.next_stored, "arrive(arrivals)")

    def _await_step_before(self) -> None:
        self.awaits_step_before = True
        self._wait(self.body)
        self.next_stored = len(self.body)

    def _barrier(self, lines: list[str]) -> None:
        if lines is self.body:
            lines.insert(self.stored, "arrive(arrivals)")
            self._wait(lines)
            self.next_stored = len(lines)
        else:
            if not self.awaits_step_before:  # else the last step has arrived
                lines.append("arrive(arrivals)")
            self._wait(lines)
        self.dirty.clear()

    def _wait(self, lines: list[str]) -> None:
        lines += [f"expected += {self.parts}", "wait(arrivals, expected)"]
        self.meetings += lines is self.body

    def _store_at(self, value: Value, space: Space, index: str, name: str) -> None:
        super()._store_at(value, space, index, name)
        memory = value.memory
        assert memory is not None
        read_back = self.tiles.read_back
        if memory in read_back:
            self.stored = len(self.body)
        if memory.kind == "next" and self.loop.carries[memory.index] in read_back:
            self.next_stored = len(self.body)

    # -- what is read and computed ----------------------------------------------------------------

    def _is_loaded_ahead(self, source: Memory, space: Space) -> bool:
        # Not what a reduction reads, all columns of a row.
        return super()._is_loaded_ahead(source, space) and space.width <= _MOST_LOADED_AHEAD

    def _step_pointer(self, memory: Memory) -> str:
        if memory.kind == "scratch":
            return self._slot(f"scratch{memory.index}", "(t % 2)", memory)
        return super()._step_pointer(memory)

    def _batches(self, op: Product, row: list[RowPiece]) -> list[list[RowPiece]]:
        piece = row[0][1].width * self.tile_rows * self.loop.weight_dtypes[op.weight].itemsize
        at_once = max(1, _MOST_LOADED_BYTES // piece)
        return [row[i : i + at_once] for i in range(0, len(row), at_once)]

    def _product_columns(
        self, op: Product, row: Iterable[RowTile], offset: int, length: int
    ) -> None:
        """Each warp multiplies a part of the row with all columns, if that is not short."""
        dtype = self.loop.weight_dtypes[op.weight]
        name, kind = name_of(op.value, offset, length), type_of(compute_dtype(op.value.dtype))
        width = self.tiles.flat(length).width
        is_matrix = length != 1 and dtype is not torch.float64
        accumulator, is_summed = "", False
        for tile in row:
            a, k_first, k = tile
            if not is_matrix or columns(k) < _WARPS * _LEAST_OF_A_WARP:
                self._add_product(op, tile, offset, length, is_first=not is_summed)
                is_summed = True
                continue
            of_warp = columns(k) // _WARPS
            rows = f"tl.permute(tl.reshape({a}, (ROWS, {_WARPS}, {of_warp})), (1, 0, 2))"
            weight = self._weight(op, k_first, k, offset, length)
            weight = self._weight_by_warp(weight, of_warp, width)
            self.body.append(
                f"{name}_by_warp = tl.dot({self._factor(op, rows)}, {weight}{accumulator}, "
                f"input_precision=PRECISION, out_dtype={kind})"
            )
            accumulator = f", acc={name}_by_warp"
        if accumulator:
            summed = f"over_warps({name}_by_warp, {_WARPS}, ROWS, {width})"
            self.body.append(f"{name} = {f'{name} + ' if is_summed else ''}{summed}")

    def _weight_by_warp(self, weight: str, of_warp: int, width: int) -> str:
        by_warp = f"{weight}_by_warp"
        if by_warp not in self.reshaped:
            self.reshaped.add(by_warp)
            shape = f"({_WARPS}, {of_warp}, {width})"
            self.prologue.append(f"{by_warp} = tl.reshape({weight}, {shape})")
        return by_warp
