"""A row loop and its schedule -> C++: one function for all K steps, parallel over rows.

Each thread takes tiles of rows and runs all steps on one tile before it takes the next, so threads
do not synchronize between steps. But with large weights and few rows for each, they share the
products of one tile (see ``tiles.h``). The headers hold the code that is the same for all loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..rowloop import Memory, Product, RowLoop, compute_dtype, reads
from .nest import NestPrinter, c_type, memory_name
from .schedule import Nest, make_schedule

# Rows per tile: the values of one step should fit into a core's private cache; but weights that do
# not fit should be read for as many rows as possible.
_TILE_BYTES = 256 << 10
_LEAST_ROWS, _MOST_ROWS = 8, 64

# Threads share a product where each alone would read so many bytes of weights for one row, or more
# of them for more rows, up to a number from which on arithmetic takes longer than reading. And a
# thread has at least so many bytes of them: waiting for the others costs about a microsecond.
_SHARED_BYTES, _SHARED_ROWS, _LEAST_SHARE = 256 << 10, 8, 64 << 10

# In multiplications of a product, of which a thread makes about 30 in a nanosecond: what an element
# of an operation takes, and to wake threads that sleep, about 0.1 ms.
_PER_ELEMENT, _WAKING = 16, 4 << 20


def print_cpp(loop: RowLoop) -> str:
    """print_cpp : RowLoop -> source of the kernel

    The function is ``run(memory, numbers)``. ``memory``: pointers to the invariants, weights,
    sequences, carries, final carries, histories, emits and totals. ``numbers``: the number of
    steps, the sizes of the row axes, the stride between the steps of each sequence (in elements),
    and the strides (group, k, n) of each weight.
    """
    printer = _Printer(loop)
    return "\n".join(_indented(printer.lines())) + "\n"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    """The lines indented by the depth of their braces, for people and debuggers."""
    depth = 0
    for line in map(str.strip, lines):
        depth -= line.startswith("}")
        yield line if line.startswith("#") else "  " * depth + line
        depth += line.endswith("{")


class _Printer:
    def __init__(self, loop: RowLoop) -> None:
        self.loop = loop
        self.schedule = make_schedule(loop)
        # One per weight: all products with a weight have the same k and n.
        self.products = {op.weight: op for op in loop.products}
        self.groups = loop.grouped

    def lines(self) -> Iterator[str]:
        yield '#include "rows.h"'
        yield "using namespace ftbptt;"
        yield ""
        yield 'extern "C" void run(void* const* memory, const int64_t* numbers) {'
        yield from self._arguments()
        yield from self._pack_buffers()
        yield f"const int64_t threads = threads_for(steps * total * {self._work()}, {_WAKING});"
        yield (
            f"const Tiles tiles(threads, total, {self._axes(0, self.groups)}, {self._tile_rows()}, "
            f"{self._sharing()});"
        )
        yield from self._workspaces()
        for i, memory in enumerate(self.loop.totals):
            t = c_type(compute_dtype(memory.dtype))
            yield f"Sums<{t}> sums{i}(tiles.threads, {memory.size});"
        yield "#pragma omp parallel num_threads(tiles.threads) if (tiles.threads > 1)"
        yield "{"
        yield from self._pack_weights()
        yield from self._tile_buffers()
        yield "for (const Tile tile : tiles.of_thread()) {"
        if self.products:
            yield "tiles.wait();"
        yield "const int64_t first = tile.first, rows = tile.rows;"
        yield from self._load_carries()
        yield "for (int64_t step = 0; step < steps; ++step) {"
        t = "steps - 1 - step" if self.loop.reverse else "step"
        yield f"const int64_t t = {t};"
        yield from self._step_pointers()
        yield from self._stages()
        yield from self._swap_carries()
        yield from self._add_totals()
        yield "}"
        yield from self._store_finals()
        yield "}"
        yield "}"
        yield from self._store_totals()
        yield "}"

    # -- arguments and weights --------------------------------------------------------------------

    def _arguments(self) -> Iterator[str]:
        """Names the elements of ``memory`` and ``numbers``, in the order given in ``print_cpp``."""
        for index, (name, dtype, const) in enumerate(self._tensors()):
            t = f"const {c_type(dtype)}" if const else c_type(dtype)
            yield f"{t}* const {name} = static_cast<{t}*>(memory[{index}]);"
        dims = len(self.loop.rows.dims)
        yield "const int64_t steps = numbers[0];"
        for axis in range(dims):
            yield f"const int64_t axis{axis} = numbers[{1 + axis}];"
        yield f"const int64_t total = {self._axes(0, dims)};"
        first_step = 1 + dims
        for index, i in enumerate(sorted(self.loop.sequences), start=first_step):
            yield f"const int64_t step{i} = numbers[{index}];"
        first_stride = first_step + len(self.loop.sequences)
        for n, weight in enumerate(self.products):  # three strides each: group, k, n
            yield f"const int64_t* const strides{weight} = numbers + {first_stride + 3 * n};"

    def _tensors(self) -> Iterator[tuple[str, torch.dtype, bool]]:
        """(name, dtype, whether it is only read) of each pointer in ``memory``."""
        loop = self.loop
        invariants, sequences = sorted(loop.invariants.items()), sorted(loop.sequences.items())
        yield from ((f"invariant{i}", memory.dtype, True) for i, memory in invariants)
        yield from ((f"weight{i}", dtype, True) for i, dtype in loop.weight_dtypes.items())
        yield from ((f"sequence{i}", memory.dtype, True) for i, memory in sequences)
        yield from ((f"start{i}", memory.dtype, True) for i, memory in enumerate(loop.carries))
        yield from ((f"final{i}", memory.dtype, False) for i, memory in enumerate(loop.carries))
        for i, flag in enumerate(self.loop.history):
            if flag:
                yield f"history{i}", loop.carries[i].dtype, False
        yield from ((f"emits{i}", memory.dtype, False) for i, memory in enumerate(loop.emits))
        yield from ((f"totals{i}", memory.dtype, False) for i, memory in enumerate(loop.totals))

    def _axes(self, start: int, stop: int) -> str:
        """The product of the sizes of these row axes."""
        return " * ".join(f"axis{i}" for i in range(start, stop)) or "1"

    def _tile_rows(self) -> int:
        """The largest number of rows in a tile."""
        if self._weight_bytes() > _TILE_BYTES:
            return _MOST_ROWS
        memories = (*self.schedule.scratch, *self.loop.carries, *self.loop.emits)
        row_bytes = sum(memory.size * compute_dtype(memory.dtype).itemsize for memory in memories)
        rows = _TILE_BYTES // max(row_bytes, 1)
        return max(_LEAST_ROWS, min(_MOST_ROWS, rows // 8 * 8))

    def _work(self) -> int:
        """What a step of a row takes, in multiplications of a product."""
        stages = self.schedule.stages
        products = sum(op.vectors * op.k * op.n for op in stages if isinstance(op, Product))
        nests = [nest for stage in stages if not isinstance(stage, Product) for nest in stage]
        elements = sum(math.prod(nest.shape) * len(nest.operations) for nest in nests)
        return products + _PER_ELEMENT * elements

    def _sharing(self) -> str:
        """When threads share products, in C++."""
        of_product = self._weight_bytes() // max(len(self.loop.products), 1)
        few = min(of_product // _SHARED_BYTES, _SHARED_ROWS)
        return f"{{{few}, {of_product // _LEAST_SHARE}}}"

    def _weight_bytes(self) -> int:
        """Of one group, packed."""

        def of(weight: int, op: Product) -> int:
            dtype = self.loop.weight_dtypes[weight]
            itemsize = (dtype if dtype == torch.bfloat16 else compute_dtype(dtype)).itemsize
            itemsize *= 1 + dtype.is_complex  # see complex_gemm.h
            return op.k * op.n * (op.vectors if op.by_vector else 1) * itemsize

        return sum(of(weight, op) for weight, op in self.products.items())

    def _weights(self, op: Product) -> str:
        """How many weights the product has."""
        groups = self._axes(0, op.grouped)
        return f"{groups} * {op.vectors}" if op.by_vector else groups

    def _gemm(self, op: Product) -> str:
        """The class of the product, in C++."""
        dtype = self.loop.weight_dtypes[op.weight]
        if dtype == torch.bfloat16:
            return "HalfGemm"
        if dtype.is_complex:
            return f"ComplexGemm<{c_type(dtype.to_real())}>"
        return f"Gemm<{c_type(compute_dtype(dtype))}>"

    def _pack_buffers(self) -> Iterator[str]:
        for weight, op in self.products.items():
            t = c_type(compute_dtype(self.loop.weight_dtypes[weight]))
            count = self._weights(op)
            size = f"{self._gemm(op)}::packed_size({op.k}, {op.n})"
            yield f"const int64_t packed_size{weight} = {size};"
            yield f"Buffer<{t}> packed{weight}({count} * packed_size{weight});"

    def _pack_weights(self) -> Iterator[str]:
        if not self.products:
            return
        for weight, op in self.products.items():
            count = self._weights(op)
            yield (
                f"pack<{self._gemm(op)}>(weight{weight}, strides{weight}, {op.k}, {op.n}, {count}, "
                f"packed{weight}.data());"
            )
        yield "#pragma omp barrier"

    # -- one tile ---------------------------------------------------------------------------------

    def _workspaces(self) -> Iterator[str]:
        """Those of tiles, which several threads may share."""
        for memory in self.schedule.scratch:
            if memory not in self.schedule.one_row:
                t, name = c_type(compute_dtype(memory.dtype)), memory_name(memory)
                yield f"Workspace<{t}> {name}_space(tiles, tiles.rows * {memory.size});"
        for i, memory in enumerate(self.loop.carries):
            if not self.loop.history[i]:
                t = c_type(memory.dtype)
                yield f"Workspace<{t}> carry{i}_space(tiles, 2 * tiles.rows * {memory.size});"

    def _tile_buffers(self) -> Iterator[str]:
        for memory in self.schedule.scratch:
            t, name = c_type(compute_dtype(memory.dtype)), memory_name(memory)
            if memory in self.schedule.one_row:
                yield f"Buffer<{t}> {name}_buffer({memory.size});"
                yield f"{t}* const {name} = {name}_buffer.data();"
            else:
                yield f"{t}* const {name} = {name}_space.of_tile();"
        for i, memory in enumerate(self.loop.totals):
            yield f"auto* const {memory_name(memory)} = sums{i}.of_step();"

    def _load_carries(self) -> Iterator[str]:
        for i, memory in enumerate(self.loop.carries):
            t, size = c_type(memory.dtype), memory.size
            if self.loop.history[i]:
                slot = "steps * total + first" if self.loop.reverse else "first"
                target = f"history{i} + ({slot}) * {size}"
            else:
                yield f"{t}* carry{i} = carry{i}_space.of_tile();"
                yield f"{t}* next{i} = carry{i} + tiles.rows * {size};"
                target = f"carry{i}"
            yield self._copy(f"start{i} + first * {size}", target, size)

    def _step_pointers(self) -> Iterator[str]:
        """Pointers to the tile's carries and emits at this step."""
        before, after = ("t + 1", "t") if self.loop.reverse else ("t", "t + 1")
        for i, memory in enumerate(self.loop.carries):
            if self.loop.history[i]:
                t, size = c_type(memory.dtype), memory.size
                yield (
                    f"const {t}* const carry{i} = "
                    f"history{i} + (({before}) * total + first) * {size};"
                )
                yield f"{t}* const next{i} = history{i} + (({after}) * total + first) * {size};"
        for i, memory in enumerate(self.loop.emits):
            t = c_type(memory.dtype)
            yield f"{t}* const emit{i} = emits{i} + (t * total + first) * {memory.size};"

    def _swap_carries(self) -> Iterator[str]:
        for i, flag in enumerate(self.loop.history):
            if not flag:
                yield f"std::swap(carry{i}, next{i});"

    def _store_finals(self) -> Iterator[str]:
        for i, memory in enumerate(self.loop.carries):
            size, source = memory.size, f"carry{i}"
            if self.loop.history[i]:
                slot = "first" if self.loop.reverse else "steps * total + first"
                source = f"history{i} + ({slot}) * {size}"
            yield self._copy(source, f"final{i} + first * {size}", size)

    def _copy(self, source: str, target: str, size: int) -> str:
        """Copies the thread's rows of a tile."""
        begin, count = f"tile.begin * {size}", f"(tile.end - tile.begin) * {size}"
        return f"copy({source} + {begin}, {count}, {target} + {begin});"

    def _add_totals(self) -> Iterator[str]:
        for i in range(len(self.loop.totals)):
            yield f"sums{i}.add_step(step);"

    def _store_totals(self) -> Iterator[str]:
        for i in range(len(self.loop.totals)):
            yield f"sums{i}.store(totals{i});"

    # -- one stage --------------------------------------------------------------------------------

    def _stages(self) -> Iterator[str]:
        """All of a step. Where threads share products, they wait for what others have written."""
        written: set[Memory | None] = set()  # by products since they last waited
        was_product = False
        for stage in self.schedule.stages:
            if isinstance(stage, Product):
                if not was_product or stage.row.memory in written:
                    yield "tiles.wait();"
                    written = set()
                written.add(stage.value.memory)
                yield from self._product(stage)
            else:
                if was_product:
                    yield "tiles.wait();"
                yield from self._rows(stage)
            was_product = isinstance(stage, Product)
        if was_product:
            yield "tiles.wait();"

    def _row_pointer(self, memory: Memory, row: str) -> str:
        """Pointer to a row's part of a memory; ``row`` is the index of the row in the tile."""
        name = memory_name(memory)
        if memory.kind in ("invariant", "sequence"):
            base = f"{name} + t * step{memory.index}" if memory.kind == "sequence" else name
            start, stop = memory.pattern.axes
            if start == stop:
                return base
            index = f"(first + {row})"
            if self._is_shared(memory):
                part = _part(memory) if row == "r" else f"Part({self._part_of(memory, row)})"
                index = f"{part}.index"
            return f"{base} + {index} * {memory.pattern.unit}"
        if memory.kind == "total" or memory in self.schedule.one_row:
            return name
        return f"{name} + {row} * {memory.size}"

    def _is_shared(self, memory: Memory) -> bool:
        """Whether some rows have the same part of it, but not all."""
        start, stop = memory.pattern.axes
        return start < stop and (start, stop) != (0, len(self.loop.rows.dims))

    def _part_of(self, memory: Memory, row: str) -> str:
        """The arguments of the C++ class ``Part``, for a row in the tile."""
        start, stop = memory.pattern.axes
        after, count = self._axes(stop, len(self.loop.rows.dims)), self._axes(start, stop)
        return f"first + {row}, {after}, {count}"

    def _tile_pointer(self, memory: Memory, offset: int) -> str:
        """Pointer to the tile's first row."""
        pointer = self._row_pointer(memory, "0")
        return f"{pointer} + {offset}" if offset else pointer

    def _product(self, op: Product) -> Iterator[str]:
        value, a, c = op.value, op.row.memory, op.value.memory
        assert a is not None
        assert c is not None
        lda, ldc, rows = a.pattern.unit, c.size, "rows"
        a_pointer = self._tile_pointer(a, op.row.start)
        c_pointer = self._tile_pointer(c, value.offset)
        packed = f"packed{op.weight}.data()"
        if op.grouped:
            # ``tile.group`` counts the groups of the weight with the most grouped axes; a weight
            # with fewer is shared by several of those groups.
            group = f"tile.group / ({self._axes(op.grouped, self.groups)})"
            of_group = f" * {op.vectors}" if op.by_vector else ""
            packed += f" + {group}{of_group} * packed_size{op.weight}"
        if not op.by_vector and (lda, ldc) == (op.vectors * op.k, op.vectors * op.n):
            lda, ldc, rows = op.k, op.n, f"rows * {op.vectors}" if op.vectors > 1 else rows
        elif op.vectors > 1:
            yield f"for (int64_t v = 0; v < {op.vectors}; ++v)"
            a_pointer, c_pointer = f"{a_pointer} + v * {op.k}", f"{c_pointer} + v * {op.n}"
            packed += f" + v * packed_size{op.weight}" if op.by_vector else ""
        yield (
            f"tiles.multiply<{self._gemm(op)}, {op.k}, {op.n}>({rows}, {a_pointer}, {lda}, "
            f"{packed}, {c_pointer}, {ldc});"
        )

    def _rows(self, nests: list[Nest]) -> Iterator[str]:
        used: dict[Memory, None] = {}  # an ordered set
        for nest in nests:
            for op in nest.operations:
                for read in reads(op.expression):
                    if read.memory is not None:
                        used[read.memory] = None
                if op.value in self.schedule.stored and op.value.memory is not None:
                    used[op.value.memory] = None
        yield "{"
        parts = {_part(memory): memory for memory in used if self._is_shared(memory)}
        for part, memory in parts.items():
            yield f"Part {part}({self._part_of(memory, 'tile.begin')});"
        yield "for (int64_t r = tile.begin; r < tile.end; ++r) {"
        for memory in used:
            constant = "const " if memory.kind in ("invariant", "sequence", "carry") else ""
            is_internal = memory.kind in ("scratch", "total")
            dtype = compute_dtype(memory.dtype) if is_internal else memory.dtype
            name = f"row_{memory_name(memory)}"
            yield f"{constant}{c_type(dtype)}* const {name} = {self._row_pointer(memory, 'r')};"
        for nest in nests:
            yield from NestPrinter(nest, self.schedule.stored).lines()
        for part in parts:
            yield f"{part}.next();"
        yield "}"
        yield "}"


def _part(memory: Memory) -> str:
    """The C++ name of the part that a loop over rows has come to: one for each pattern."""
    return "part{}_{}".format(*memory.pattern.axes)
