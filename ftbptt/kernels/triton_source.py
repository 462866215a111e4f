"""A row loop -> Triton: one function for all K steps, in which each program takes a tile of rows.

Programs do not synchronize. Carries stay in registers from step to step, and weights in the shared
memory of the multiprocessor, where they must fit. For an affine recurrence, whose steps compose,
the module has a second function (``triton_scan``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .affine import affine_next
from .expressions import Unsupported
from .rowloop import Product, Reduce, RowLoop, Value, compute_dtype
from .tiles import columns, space_of
from .triton_expressions import TYPES, literal, type_of
from .triton_scan import print_scan
from .triton_tiles import TilePrinter, name_of, with_zeros

_NEUTRAL = {"sum": 0.0, "product": 1.0, "maximum": -math.inf, "minimum": math.inf}

# Shared memory that a program can have on an H100, and the part that Triton needs for layout
# conversions of the rows.
_SHARED_BYTES, _SHARED_BYTES_OF_ROWS = 227 << 10, 35 << 10

_HEAD = """\
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def multiplied(a, b):
    return a * b

"""


def print_triton(loop: RowLoop, history: list[bool], *, reverse: bool) -> str:
    """print_triton : RowLoop x which carries have a history -> source of a module with the kernel

    The kernel is ``run(*memory, *workspace, *numbers, ROWS, PRECISION)``, with ``memory`` and
    ``numbers`` as in ``cpp``. Constants of the module:

    - ``WORKSPACE``: the tensors to allocate for a launch, as (dtype, elements per row, whether it
      has K + 1 slots, as a history).
    - ``AXES``: the number of row axes. ``GROUPED``: the leading ones along which a weight varies; a
      program has rows of one group only.
    - ``ROW_BYTES``: size of a row of the widest tile.
    - ``EXACT``: whether, without TF32, some products cannot use a matrix unit.

    If the steps compose there is also ``run_composed``. Raises Unsupported.
    """
    text, affine = _Printer(loop, history, reverse).text(), affine_next(loop)
    return text if affine is None else text + print_scan(loop, history, affine, reverse=reverse)


class _Printer(TilePrinter):
    def __init__(self, loop: RowLoop, history: list[bool], reverse: bool) -> None:
        super().__init__(loop, history, reverse)
        for dtype in _dtypes(loop):
            type_of(dtype)  # raises Unsupported
        self.grouped = max((op.grouped for op in self.products.values()), default=0)
        self.weights: dict[Any, str] = {}
        self._check_weights()

    # -- the module -------------------------------------------------------------------------------

    def text(self) -> str:
        self._load_carries()
        self._step()
        epilogue = list(self._store_finals())
        itemsize = max(compute_dtype(memory.dtype).itemsize for memory in self.loop.carries)
        row_bytes = itemsize * max((space.width for space in self.spaces), default=1)
        unspecialized = ", ".join(f'"{name}"' for name in ("steps", *self._axis_names()))
        lines = [
            _HEAD,
            f"WORKSPACE = {self._workspace()!r}",
            f"AXES, GROUPED, ROW_BYTES = {len(self.loop.rows.dims)}, {self.grouped}, {row_bytes}",
            f"EXACT = {any(t.itemsize > 2 for t in self.loop.weight_dtypes.values())}",
            "",
            "",
            f"@triton.jit(do_not_specialize=[{unspecialized}])",
            f"def run({', '.join(self._arguments())}, ROWS: tl.constexpr, "
            "PRECISION: tl.constexpr):",
            *(f"    {line}" for line in (*self._rows(), *self._indices(), *self.prologue)),
            "    for step in range(steps):",
            f"        t = tl.cast({'steps - 1 - step' if self.reverse else 'step'}, tl.int64)",
            *(f"        {line}" for line in self.body),
            *(f"    {line}" for line in epilogue),
        ]
        return "\n".join(lines) + "\n"

    def _workspace(self) -> list[tuple[str, int, bool]]:
        scratch = [(compute_dtype(memory.dtype), memory.size, False) for memory in self.scratch]
        histories = [
            (memory.dtype, memory.size, True)
            for i, memory in enumerate(self.loop.carries)
            if self.tiles.history[i] and not self.wanted_history[i]
        ]
        return [
            (str(dtype).removeprefix("torch."), size, each_step)
            for dtype, size, each_step in (*scratch, *histories)
        ]

    def _rows(self) -> Iterator[str]:
        axes = self._axis_names()
        groups = " * ".join(axes[: self.grouped]) or "1"
        yield "last = tl.cast(steps, tl.int64)  # 64 bits, like all offsets computed from it"
        yield f"total = {' * '.join(axes) or '1'}"
        yield f"rows = total // ({groups})"
        yield "tiles = tl.cdiv(rows, ROWS)"
        yield "group = (tl.program_id(0) // tiles).to(tl.int64)"
        yield "tile = (tl.program_id(0) % tiles).to(tl.int64)"
        yield "row_in_group = tile * ROWS + tl.arange(0, ROWS)[:, None]"
        yield "inside = row_in_group < rows"
        yield "row = group * rows + row_in_group"

    def _indices(self) -> Iterator[str]:
        for space, name in self.spaces.items():
            yield f"{name} = tl.arange(0, {space.width})[None, :]"
            if space.outer:
                inner = columns(space.inner_size)
                yield f"{name}_outer, {name}_inner = {name} // {inner}, {name} % {inner}"
                yield (
                    f"{name}_in = ({name}_outer < {space.outer_size}) & "
                    f"({name}_inner < {space.inner_size})"
                )
            elif space.is_padded:
                yield f"{name}_in = {name} < {space.inner_size}"

    # -- before, in and after the loop ------------------------------------------------------------

    def _load_carries(self) -> None:
        for i, memory in enumerate(self.loop.carries):
            space = self._flat(memory.size)
            index = f"row * {memory.size} + {self._space(space)}"
            mask = self._mask(space, "inside")
            self.prologue.append(f"carry{i} = tl.load(start{i} + {index}{with_zeros(mask)})")
            if self.tiles.history[i]:
                slot = "last" if self.reverse else "0"
                first = self._slot(f"history{i}", slot, memory)
                self.prologue.append(f"tl.store({first} + {index}, carry{i}{mask})")
            if i in self.tiles.next_carries:
                self._convert(self.prologue, f"carry{i}", memory.dtype)

    def _step(self) -> None:
        # What the previous step stored must be visible, and what it read may be overwritten.
        if any(memory.kind in ("carry", "scratch") for memory in self.tiles.read_back):
            self.body.append("tl.debug_barrier()")
        for op in self.loop.operations:
            if isinstance(op, Product):
                self._product(op)
            elif isinstance(op, Reduce):
                self._reduce(op)
            else:
                self._map(op)
        for i, value in self.tiles.next_carries.items():
            self.body.append(f"carry{i} = {self._all_columns(value)}")
            memory = self.loop.carries[i]
            if memory.dtype != compute_dtype(memory.dtype):  # round it, as memory would
                self.body.append(f"carry{i} = carry{i}.to({TYPES[memory.dtype]})")
                self._convert(self.body, f"carry{i}", memory.dtype)

    def _store_finals(self) -> Iterator[str]:
        if len(self.tiles.next_carries) < len(self.loop.carries):
            yield "tl.debug_barrier()"
        for i, memory in enumerate(self.loop.carries):
            space = self._flat(memory.size)
            index = f"row * {memory.size} + {self._space(space)}"
            mask = self._mask(space, "inside")
            if i not in self.tiles.next_carries:
                slot = "0" if self.reverse else "last"
                last = self._slot(f"history{i}", slot, memory)
                yield f"carry{i} = tl.load({last} + {index}{with_zeros(mask)})"
            yield f"tl.store(final{i} + {index}, carry{i}{mask})"

    # -- operations -------------------------------------------------------------------------------

    def _reduce(self, op: Reduce) -> None:
        space = space_of(op)
        neutral = literal(_NEUTRAL[op.kind], compute_dtype(op.value.dtype))
        x = f"tl.broadcast_to({self._operand(op, space)}, {self.shape.format(space.width)})"
        if space.is_padded:
            x = f"tl.where({self._space(space)}_in, {x}, {neutral})"
        axis, name = "1", name_of(op.value)
        if space.outer:
            shape = f"(ROWS, {columns(space.outer_size)}, {columns(space.inner_size)})"
            axis, x = "2", f"tl.reshape({x}, {shape})"
        self.body.append(f"{name} = {x}")
        result = {
            "sum": f"tl.sum({name}, {axis})",
            "product": f"tl.reduce({name}, {axis}, multiplied)",
            "maximum": f"tl.max({name}, {axis})",
            "minimum": f"tl.min({name}, {axis})",
        }[op.kind]
        if op.kind in ("maximum", "minimum"):  # NaN if any element is, as in torch
            nans = f"tl.sum(({name} != {name}).to(tl.int32), {axis})"
            result = f"tl.where({nans} > 0, float('nan'), {result})"
        self.body.append(f"{name} = {result}" + ("" if space.outer else "[:, None]"))
        self._store(op.value)

    # -- products ---------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        """Raises Unsupported if the tiles of all weights do not fit into shared memory."""
        size = 0
        for op in self.products.values():
            if op.vectors > 1:
                raise Unsupported("GPU kernels do not support products of several vectors of a row")
            n = sum(columns(length) for _, length in self.tiles.pieces[op.value])
            pieces = self.tiles.row_pieces(op)
            k = sum(columns(value.size) for value, _ in pieces) if pieces else columns(op.k)
            size += k * n * self.loop.weight_dtypes[op.weight].itemsize
        available = _shared_bytes_for_weights()
        if size > available:
            raise Unsupported(
                f"its weights need {size >> 10} KB of a multiprocessor's shared memory, which has "
                f"{available >> 10} KB for them"
            )

    def _product(self, op: Product) -> None:
        pieces = self.tiles.row_pieces(op)
        if pieces is None:
            row = [(self._read(op.row, space_of(op)), 0, op.k)]
        else:
            row = [(self._all_columns(value), first, value.size) for value, first in pieces]
        for offset, length in self.tiles.pieces[op.value]:
            name = name_of(op.value, offset, length)
            for i, (a, k_first, k) in enumerate(row):
                weight = self._weight(op, k_first, k, offset, length)
                self.body.append(f"{name} = {self._dot(op, a, k, length, weight, name, i == 0)}")
        if self.tiles.is_stored(op.value):
            self.body.append(f"{name_of(op.value)} = {name_of(op.value, 0, op.n)}")
            self._store(op.value)

    def _all_columns(self, value: Value) -> str:
        return name_of(value, 0, value.size) if value in self.tiles.pieces else name_of(value)

    def _dot(self, op: Product, a: str, k: int, n: int, weight: str, name: str, first: bool) -> str:
        """``a`` [rows, k] @ ``weight`` [k, n], added to ``name`` if it is not the ``first``."""
        weight_dtype = self.loop.weight_dtypes[op.weight]
        kind = type_of(compute_dtype(op.value.dtype))
        if columns(k) != k:
            a = f"tl.where({self._space(self._flat(k))}_in, {a}, 0)"
        if k == 1 or n == 1:
            product = f"{a} * {weight}.to({kind})"
            if k != 1:
                product = f"tl.sum({product}, 1)[:, None]"
            return product if first else f"{name} + {product}"
        if weight_dtype is torch.float64:
            # Triton derives a product's layout from the narrowest load that an operand depends on,
            # such as a mask, and has no layout for float64 below 32 bits (3.6, 3.7). A sum hides
            # the load.
            a = f"tl.sum(({a})[:, :, None], 2)"
        accumulator = "" if first else f", acc={name}"
        return (
            f"tl.dot({a}.to({TYPES[weight_dtype]}), {weight}{accumulator}, "
            f"input_precision=PRECISION, out_dtype={kind})"
        )

    def _weight(self, op: Product, k_first: int, k: int, n_first: int, n: int) -> str:
        """The variable with the tile [k, n] of a weight, or [1, k] if it has one column.

        ``k_first`` and ``n_first``: the row and column of the weight where the tile starts.
        """
        key = (op.weight, k_first, k, n_first, n)
        if key in self.weights:
            return self.weights[key]
        name = self.weights[key] = f"w{len(self.weights)}"
        w, space = op.weight, self._flat(k if n == 1 else n)
        column = self._space(space)
        masks = [f"{column}_in"] if space.is_padded else []
        if n == 1:
            offset = f"({k_first} + {column}) * k_stride{w} + {n_first} * n_stride{w}"
        else:
            offset = f"({n_first} + {column}) * n_stride{w}"
            rows = f"tl.arange(0, {columns(k)})[:, None]"
            offset += f" + ({k_first} + {rows}) * k_stride{w}"
            masks += [f"({rows} < {k})"] if columns(k) != k else []
        if op.grouped:  # ``group`` counts the groups of the weight with the most grouped axes
            after = " * ".join(self._axis_names()[op.grouped : self.grouped]) or "1"
            offset += f" + group // ({after}) * group_stride{w}"
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        self.prologue.append(f"{name} = tl.load(weight{w} + {offset}{mask})")
        return name


def _shared_bytes_for_weights() -> int:
    """Bytes of shared memory that the weights of a program can take."""
    available = _SHARED_BYTES
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties()
        # The attribute is missing in torch's type stubs, and on AMD devices.
        default = device.shared_memory_per_block
        available = getattr(device, "shared_memory_per_block_optin", default)
    return available - _SHARED_BYTES_OF_ROWS


def _dtypes(loop: RowLoop) -> Iterator[torch.dtype]:
    """The dtypes of all that a kernel reads, computes and writes."""
    memories = [*loop.invariants.values(), *loop.sequences.values(), *loop.carries, *loop.emits]
    yield from (memory.dtype for memory in memories)
    yield from loop.weight_dtypes.values()
    yield from (op.value.dtype for op in loop.operations)
