"""A row loop and its schedule -> C++: one function for all K steps, the rows shared by threads.

Each thread takes tiles of rows and runs all steps on one before it takes the next, so nothing is
waited for between steps. What is fixed for every loop stands in ``rows.h`` and ``gemm.h``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .accesses import RowPattern
from .cpp_nest import NestPrinter, c_type, memory_name
from .rowloop import Memory, Product, Read, RowLoop, Value, compute_dtype, reads
from .schedule import Nest, make_schedule

# The rows of a tile: their values of one step should stay in a core's own caches, and a weight
# that does not must be read for many rows at once.
_TILE_BYTES = 256 << 10
_LEAST_ROWS, _MOST_ROWS = 8, 64


def print_cpp(loop: RowLoop, history: list[bool], *, reverse: bool) -> str:
    """print_cpp : RowLoop, which carries have a history -> source of the kernel

    The function is ``run(memory, numbers)``; ``memory`` are pointers to: invariants, weights,
    sequences, carries, final carries, histories, emits, totals. ``numbers`` are: steps, the sizes
    of the row axes, elements of each sequence per step, strides (group, k, n) of each weight.
    """
    printer = _Printer(loop, history, reverse)
    return "\n".join(_indented(printer.lines())) + "\n"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    """The lines indented by the braces that are open, to be read in a debugger or by a person."""
    depth = 0
    for line in map(str.strip, lines):
        depth -= line.startswith("}")
        yield line if line.startswith("#") else "  " * depth + line
        depth += line.endswith("{")


class _Printer:
    def __init__(self, loop: RowLoop, history: list[bool], reverse: bool) -> None:
        self.loop, self.history, self.reverse = loop, history, reverse
        self.schedule = make_schedule(loop)
        self.products = {
            op.weight: op for op in loop.operations if isinstance(op, Product)
        }  # a weight of several products has the same k and n in each
        self.groups = max((op.grouped for op in self.products.values()), default=0)

    def lines(self) -> Iterator[str]:
        yield '#include "rows.h"'
        yield "using namespace ftbptt;"
        yield ""
        yield 'extern "C" void run(void* const* memory, const int64_t* numbers) {'
        yield from self._arguments()
        yield from self._packing_space()
        yield f"const Tiles tiles(total, {self._axes(0, self.groups)}, {self._tile()});"
        for i, memory in enumerate(self.loop.totals):
            t = c_type(compute_dtype(memory.dtype))
            yield f"Sums<{t}> sums{i}(tiles.threads, {memory.size});"
        yield "#pragma omp parallel num_threads(tiles.threads) if (tiles.threads > 1)"
        yield "{"
        yield from self._pack()
        yield from self._scratch()
        yield "for (const Tile tile : tiles.of_thread()) {"
        yield "const int64_t first = tile.first, rows = tile.rows;"
        yield from self._start()
        yield "for (int64_t step = 0; step < steps; ++step) {"
        t = "steps - 1 - step" if self.reverse else "step"
        yield f"const int64_t t = {t};"
        yield from self._places()
        for stage in self.schedule.stages:
            yield from self._product(stage) if isinstance(stage, Product) else self._rows(stage)
        yield from self._swap()
        yield from self._add_up()
        yield "}"
        yield from self._finish()
        yield "}"
        yield "}"
        yield from self._totals()
        yield "}"

    # -- the whole --------------------------------------------------------------------------------

    def _arguments(self) -> Iterator[str]:
        loop = self.loop
        place = 0
        for i in sorted(loop.invariants):
            yield self._argument(f"invariant{i}", loop.invariants[i].dtype, place)
            place += 1
        for weight in self.products:
            yield self._argument(f"weight{weight}", self.loop.weight_dtypes[weight], place)
            place += 1
        for i in sorted(loop.sequences):
            yield self._argument(f"sequence{i}", loop.sequences[i].dtype, place)
            place += 1
        for name, own in (("start", loop.carries), ("final", loop.carries)):
            for i, memory in enumerate(own):
                yield self._argument(f"{name}{i}", memory.dtype, place, const=name == "start")
                place += 1
        for i, flag in enumerate(self.history):
            if flag:
                yield self._argument(f"history{i}", loop.carries[i].dtype, place, const=False)
                place += 1
        for i, memory in enumerate(loop.emits):
            yield self._argument(f"emits{i}", memory.dtype, place, const=False)
            place += 1
        for i, memory in enumerate(loop.totals):
            yield self._argument(f"totals{i}", memory.dtype, place, const=False)
            place += 1
        dims = len(loop.rows.dims)
        yield "const int64_t steps = numbers[0];"
        for axis in range(dims):
            yield f"const int64_t axis{axis} = numbers[{1 + axis}];"
        yield f"const int64_t total = {self._axes(0, dims)};"
        place = 1 + dims
        for i in sorted(loop.sequences):
            yield f"const int64_t step{i} = numbers[{place}];"
            place += 1
        for weight in self.products:
            yield f"const int64_t* const strides{weight} = numbers + {place};"
            place += 3

    def _argument(self, name: str, dtype: torch.dtype, place: int, const: bool = True) -> str:
        kind = f"const {c_type(dtype)}" if const else c_type(dtype)
        return f"{kind}* const {name} = static_cast<{kind}*>(memory[{place}]);"

    def _axes(self, first: int, behind: int) -> str:
        return " * ".join(f"axis{i}" for i in range(first, behind)) or "1"

    def _tile(self) -> int:
        """Rows of a tile."""
        size = sum(self._bytes(memory) for memory in self._by_row())
        weights = sum(op.k * op.n for op in self.products.values()) * 4
        rows = _TILE_BYTES // max(size, 1)
        if weights > _TILE_BYTES:  # read from farther away: for more rows at once
            rows *= 2
        return max(_LEAST_ROWS, min(_MOST_ROWS, rows // 8 * 8))

    def _by_row(self) -> Iterator[Memory]:
        yield from self.schedule.scratch
        yield from self.loop.carries
        yield from self.loop.emits

    def _bytes(self, memory: Memory) -> int:
        return memory.size * compute_dtype(memory.dtype).itemsize

    def _packing_space(self) -> Iterator[str]:
        for weight, op in self.products.items():
            t = c_type(compute_dtype(self.loop.weight_dtypes[weight]))
            count = self._axes(0, op.grouped)
            yield f"const int64_t packed_size{weight} = Gemm<{t}>::packed_size({op.k}, {op.n});"
            yield f"Buffer<{t}> packed{weight}({count} * packed_size{weight});"

    def _pack(self) -> Iterator[str]:
        if not self.products:
            return
        for weight, op in self.products.items():
            t = c_type(compute_dtype(self.loop.weight_dtypes[weight]))
            count = self._axes(0, op.grouped)
            yield (
                f"pack<{t}>(weight{weight}, strides{weight}, {op.k}, {op.n}, {count}, "
                f"packed{weight}.data());"
            )
        yield "#pragma omp barrier"

    # -- one tile ---------------------------------------------------------------------------------

    def _scratch(self) -> Iterator[str]:
        for memory in self.schedule.scratch:
            rows = "1" if memory in self.schedule.one_row else "tiles.rows"
            t = c_type(compute_dtype(memory.dtype))
            yield f"Buffer<{t}> {memory_name(memory)}_buffer({rows} * {memory.size});"
            yield f"{t}* const {memory_name(memory)} = {memory_name(memory)}_buffer.data();"
        for i, memory in enumerate(self.loop.carries):
            if not self.history[i]:
                t = c_type(memory.dtype)
                yield f"Buffer<{t}> carry{i}_buffer(2 * tiles.rows * {memory.size});"
        for i, memory in enumerate(self.loop.totals):
            yield f"auto* const {memory_name(memory)} = sums{i}.of_step();"

    def _start(self) -> Iterator[str]:
        for i, memory in enumerate(self.loop.carries):
            t, size = c_type(memory.dtype), memory.size
            if self.history[i]:
                slot = "steps * total + first" if self.reverse else "first"
                target = f"history{i} + ({slot}) * {size}"
            else:
                yield f"{t}* carry{i} = carry{i}_buffer.data();"
                yield f"{t}* next{i} = carry{i} + tiles.rows * {size};"
                target = f"carry{i}"
            yield f"copy(start{i} + first * {size}, rows * {size}, {target});"

    def _places(self) -> Iterator[str]:
        """Where the tile's part of each tensor is at this step."""
        before, after = ("t + 1", "t") if self.reverse else ("t", "t + 1")
        for i, memory in enumerate(self.loop.carries):
            if self.history[i]:
                t, size = c_type(memory.dtype), memory.size
                yield (
                    f"const {t}* const carry{i} = "
                    f"history{i} + (({before}) * total + first) * {size};"
                )
                yield (f"{t}* const next{i} = history{i} + (({after}) * total + first) * {size};")
        for i, memory in enumerate(self.loop.emits):
            t = c_type(memory.dtype)
            yield f"{t}* const emit{i} = emits{i} + (t * total + first) * {memory.size};"

    def _swap(self) -> Iterator[str]:
        for i, flag in enumerate(self.history):
            if not flag:
                yield f"std::swap(carry{i}, next{i});"

    def _finish(self) -> Iterator[str]:
        for i, memory in enumerate(self.loop.carries):
            size, source = memory.size, f"carry{i}"
            if self.history[i]:
                slot = "first" if self.reverse else "steps * total + first"
                source = f"history{i} + ({slot}) * {size}"
            yield f"copy({source}, rows * {size}, final{i} + first * {size});"

    def _add_up(self) -> Iterator[str]:
        for i in range(len(self.loop.totals)):
            yield f"sums{i}.add_step();"

    def _totals(self) -> Iterator[str]:
        for i in range(len(self.loop.totals)):
            yield f"sums{i}.store(totals{i});"

    # -- one stage --------------------------------------------------------------------------------

    def _row_pointer(self, memory: Memory, row: str) -> str:
        """The start of a row's part, where ``row`` counts from the start of the tile."""
        name = memory_name(memory)
        if memory.kind in ("invariant", "sequence"):
            at = f"{name} + t * step{memory.index}" if memory.kind == "sequence" else name
            index = self._row_index(memory.pattern, row)
            return f"{at} + {index} * {memory.pattern.unit}" if index else at
        if memory.kind == "total" or memory in self.schedule.one_row:
            return name
        return f"{name} + {row} * {memory.size}"

    def _row_index(self, pattern: RowPattern, row: str) -> str:
        start, stop = pattern.own
        if start == stop:
            return ""
        index = f"(first + {row})"
        if stop < len(self.loop.rows.dims):
            index = f"({index} / ({self._axes(stop, len(self.loop.rows.dims))}))"
        if start > 0:
            index = f"({index} % ({self._axes(start, stop)}))"
        return index

    def _pointer_to(self, memory: Memory, offset: int) -> str:
        pointer = self._row_pointer(memory, "0")
        return f"{pointer} + {offset}" if offset else pointer

    def _product(self, op: Product) -> Iterator[str]:
        source, value = op.row.source, op.value
        a = source.memory if isinstance(source, Value) else source
        assert a is not None
        assert value.memory is not None
        offset = op.row.offset + (source.offset if isinstance(source, Value) else 0)
        t = c_type(compute_dtype(value.dtype))
        lda = a.pattern.unit if a.kind == "sequence" else a.size
        # A tile is of one group of the most row axes; a weight may be shared by several of those.
        which = f"tile.group / ({self._axes(op.grouped, self.groups)})"
        group = f" + {which} * packed_size{op.weight}" if op.grouped else ""
        yield (
            f"Gemm<{t}>::run(rows, {op.k}, {op.n}, {self._pointer_to(a, offset)}, {lda}, "
            f"packed{op.weight}.data(){group}, {self._pointer_to(value.memory, value.offset)}, "
            f"{value.memory.size});"
        )

    def _rows(self, nests: list[Nest]) -> Iterator[str]:
        yield "for (int64_t r = 0; r < rows; ++r) {"
        used: dict[Memory, None] = {}
        for nest in nests:
            for op in nest.operations:
                for read in reads(op.expression):
                    memory = _memory_of(read)
                    if memory is not None:
                        used[memory] = None
                if op.value in self.schedule.kept and op.value.memory is not None:
                    used[op.value.memory] = None
        for memory in used:
            constant = "const " if memory.kind in ("invariant", "sequence", "carry") else ""
            own = memory.kind in ("scratch", "total")
            dtype = compute_dtype(memory.dtype) if own else memory.dtype
            name = f"row_{memory_name(memory)}"
            yield (f"{constant}{c_type(dtype)}* const {name} = {self._row_pointer(memory, 'r')};")
        for nest in nests:
            yield from NestPrinter(nest, self.schedule.kept).lines()
        yield "}"


def _memory_of(read: Read) -> Memory | None:
    return read.source.memory if isinstance(read.source, Value) else read.source
