"""A row loop -> Triton, where several programs share a tile of rows: the weights are split.

Each program has a part of the columns of every wide value, and of the weights only what these
columns need. So weights that one multiprocessor cannot hold stay in the shared memory of several.
What a product or a reduction reads, all columns of a row, the programs exchange through memory: at
least once a step they wait for each other. For that all of them must run at the same time.

The method is that of persistent RNNs (Diamos et al., "Persistent RNNs", ICML 2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..expressions import Unsupported
from ..rowloop import Memory, Product, RowLoop, compute_dtype
from .expressions import type_of
from .loop import LoopPrinter
from .placement import Space, Tiles, columns, make_tiles

_WARPS = 8
# Integers of a counter at which the programs of a tile meet: a line of the cache for each.
_COUNTER = 32
# Rows of a tile: the least that a matrix unit takes. The results for more do not stay in registers.
_PARTS, _ROWS = (2, 4, 8, 16, 32, 64), 16
# The fewest elements of a row for which each warp multiplies some of them with all columns.
_LEAST_OF_A_WARP = 16
# Results of a product for each row. Each warp holds its part of all of them, in registers.
_MOST_RESULTS = 128
# Columns of an input that are loaded a step ahead, and wait in registers.
_MOST_LOADED_AHEAD = 64
# Shared memory besides weights and products: rows as operands, reductions.
_OTHER_SHARED_BYTES = 35 << 10

_MEET = """

@triton.jit
def meet(arrivals, expected, PARTS: tl.constexpr):
    tl.debug_barrier()  # the stores of all threads of this program come first
    expected += PARTS
    tl.atomic_add(arrivals, 1, sem="release")
    while tl.atomic_add(arrivals, 0, sem="acquire") < expected:
        pass
    tl.debug_barrier()
    return expected

"""


def choose_parts(loop: RowLoop, processors: int, shared_bytes: int) -> int:
    """choose_parts : RowLoop x a GPU's sizes -> programs of a tile

    ``processors``: the multiprocessors, each of which runs one program, with ``shared_bytes`` of
    shared memory. Of the numbers for which all programs run at once, the one with the least work
    for a program. Raises Unsupported if there is none.
    """
    products, rows = loop.products, loop.rows
    groups = math.prod((*rows.dims[: loop.grouped], *rows.last(loop.trailing)))
    rows_of_group = rows.total // max(groups, 1)
    candidates: list[tuple[int, int]] = []
    for parts in _PARTS:
        tiles = make_tiles(loop, parts)
        widths = [[tiles.flat(n).width for _, n in tiles.pieces[op.value]] for op in products]
        widest = max(width for of_product in widths for width in of_product)
        # Triton adds the parts of a product that the warps computed in shared memory.
        used = weight_bytes(loop, tiles) + 4 * _WARPS * _ROWS * widest + _OTHER_SHARED_BYTES
        is_held = used <= shared_bytes and max(map(sum, widths)) <= _MOST_RESULTS
        if is_held and groups * -(-rows_of_group // _ROWS) * parts <= processors:
            candidates.append((sum(weight_elements(tiles, op) for op in products), parts))
    if not candidates:
        raise Unsupported(
            f"split, with {rows.total} rows, they do not fit on {processors} multiprocessors"
        )
    return min(candidates)[1]


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
    head = LoopPrinter.head + _MEET
    # A slot of scratch memory is written again only after the next step's barrier.
    scratch_slots = 2
    load_option = ', cache_modifier=".cg"'  # not from the cache of this multiprocessor

    def __init__(self, loop: RowLoop, parts: int) -> None:
        super().__init__(loop, parts)
        self.parts, self.reshaped = parts, set[str]()
        self.meetings = 0  # of the programs of a tile, in a step

    def _constants(self) -> Iterator[str]:
        yield f"PARTS, TILE_ROWS, WARPS = {self.parts}, {_ROWS}, {_WARPS}"
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

    def _barrier(self, lines: list[str]) -> None:
        lines.append(f"expected = meet(arrivals, expected, {self.parts})")
        self.meetings += 1
        self.dirty.clear()

    def _is_loaded_ahead(self, source: Memory, space: Space) -> bool:
        # Not what a reduction reads, all columns of a row.
        return super()._is_loaded_ahead(source, space) and space.width <= _MOST_LOADED_AHEAD

    def _step_pointer(self, memory: Memory) -> str:
        if memory.kind == "scratch":
            return self._slot(f"scratch{memory.index}", "(t % 2)", memory)
        return super()._step_pointer(memory)

    def _dot(self, op: Product, a: str, k: int, n: int, weight: str, name: str, first: bool) -> str:
        dtype, kind = self.loop.weight_dtypes[op.weight], type_of(compute_dtype(op.value.dtype))
        length = columns(k) // _WARPS
        if length < _LEAST_OF_A_WARP or n == 1 or dtype is torch.float64:
            return super()._dot(op, a, k, n, weight, name, first)
        rows = f"tl.permute(tl.reshape({a}, (ROWS, {_WARPS}, {length})), (1, 0, 2))"
        by_warp = f"{weight}_by_warp"
        if by_warp not in self.reshaped:
            self.reshaped.add(by_warp)
            shape = f"({_WARPS}, {length}, {self.tiles.flat(n).width})"
            self.prologue.append(f"{by_warp} = tl.reshape({weight}, {shape})")
        product = (
            f"tl.sum(tl.dot({self._factor(op, rows)}, {by_warp}, input_precision=PRECISION, "
            f"out_dtype={kind}), 0)"
        )
        return product if first else f"{name} + {product}"
