"""A row loop -> Triton: one function for all K steps, for a tile of rows that no other waits for.

The carries stay in registers from step to step, the weights in the shared memory of the
multiprocessor, where they must fit. A recurrence whose steps compose has another function beside
it (``triton_scan``).
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

# The shared memory that a program can have on an H100, and what of it rows are rearranged in.
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
    """print_triton : RowLoop, which carries have a history -> source of a module with the kernel

    Its function is ``run(*memory, *numbers, ROWS, PRECISION)``: ``memory`` and ``numbers`` as in
    ``cpp``, and behind the memory the kernel's own, as ``OWN`` says: (dtype, elements per row,
    whether there is one for each step and one more). ``GROUPED``: the row axes in front of which
    a program has one; ``ROW_BYTES``: of the widest tile; ``EXACT``: whether a product may be one
    that no matrix unit does. There is ``run_composed`` as well if the
    steps compose. Raises Unsupported.
    """
    text, affine = _Printer(loop, history, reverse).text(), affine_next(loop)
    return text if affine is None else text + print_scan(loop, history, affine, reverse=reverse)


class _Printer(TilePrinter):
    def __init__(self, loop: RowLoop, history: list[bool], reverse: bool) -> None:
        super().__init__(loop, history, reverse)
        for dtype in _dtypes(loop):
            type_of(dtype)
        self.grouped = max((op.grouped for op in self.products.values()), default=0)
        self.weights: dict[Any, str] = {}
        self._check_weights()

    # -- the whole --------------------------------------------------------------------------------

    def text(self) -> str:
        self._start()
        self._step()
        after = list(self._finish())
        own = [
            (str(compute_dtype(m.dtype)).removeprefix("torch."), m.size, False)
            for m in self.scratch
        ]
        own += [
            (str(m.dtype).removeprefix("torch."), m.size, True)
            for i, m in enumerate(self.loop.carries)
            if self.tiles.history[i] and not self.asked[i]
        ]
        itemsize = max(compute_dtype(memory.dtype).itemsize for memory in self.loop.carries)
        row_bytes = itemsize * max((space.width for space in self.spaces), default=1)
        fixed = ", ".join(f'"{name}"' for name in ("steps", *self._axis_names()))
        lines = [
            _HEAD,
            f"OWN = {own!r}",
            f"AXES, GROUPED, ROW_BYTES = {len(self.loop.rows.dims)}, {self.grouped}, {row_bytes}",
            f"EXACT = {any(own.itemsize > 2 for own in self.loop.weight_dtypes.values())}",
            "",
            "",
            f"@triton.jit(do_not_specialize=[{fixed}])",
            f"def run({', '.join(self._arguments())}, ROWS: tl.constexpr, "
            "PRECISION: tl.constexpr):",
            *(f"    {line}" for line in (*self._rows(), *self._indices(), *self.before)),
            "    for step in range(steps):",
            f"        t = tl.cast({'steps - 1 - step' if self.reverse else 'step'}, tl.int64)",
            *(f"        {line}" for line in self.body),
            *(f"    {line}" for line in after),
        ]
        return "\n".join(lines) + "\n"

    def _rows(self) -> Iterator[str]:
        axes = self._axis_names()
        groups = " * ".join(axes[: self.grouped]) or "1"
        yield "last = tl.cast(steps, tl.int64)  # so are all numbers of elements behind it"
        yield f"total = {' * '.join(axes) or '1'}"
        yield f"rows = total // ({groups})"
        yield "tiles = tl.cdiv(rows, ROWS)"
        yield "group = (tl.program_id(0) // tiles).to(tl.int64)"
        yield "own = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]"
        yield "inside = own < rows"
        yield "row = group * rows + own"

    def _indices(self) -> Iterator[str]:
        for space, name in self.spaces.items():
            yield f"{name} = tl.arange(0, {space.width})[None, :]"
            if space.outer:
                inner = columns(space.inner)
                yield f"{name}_outer, {name}_inner = {name} // {inner}, {name} % {inner}"
                yield (
                    f"{name}_in = ({name}_outer < {space.kept}) & ({name}_inner < {space.inner})"
                )
            elif space.is_padded:
                yield f"{name}_in = {name} < {space.inner}"

    # -- before, in and after the loop ------------------------------------------------------------

    def _start(self) -> None:
        for i, memory in enumerate(self.loop.carries):
            space = self._flat(memory.size)
            own = f"row * {memory.size} + {self._space(space)}"
            mask = self._mask(space, "inside")
            self.before.append(f"carry{i} = tl.load(start{i} + {own}{with_zeros(mask)})")
            if self.tiles.history[i]:
                slot = "last" if self.reverse else "0"
                first = self._slot(f"history{i}", slot, memory)
                self.before.append(f"tl.store({first} + {own}, carry{i}{mask})")
            if i in self.tiles.carried:
                self._computed(self.before, f"carry{i}", memory.dtype)

    def _step(self) -> None:
        kept = any(memory.kind in ("carry", "scratch") for memory in self.tiles.read_back)
        if kept:
            self.body.append("tl.debug_barrier()")
        for op in self.loop.operations:
            if isinstance(op, Product):
                self._product(op)
            elif isinstance(op, Reduce):
                self._reduce(op)
            else:
                self._map(op)
        for i, after in self.tiles.carried.items():
            self.body.append(f"carry{i} = {self._whole(after)}")
            memory = self.loop.carries[i]
            if memory.dtype != compute_dtype(memory.dtype):
                self.body.append(f"carry{i} = carry{i}.to({TYPES[memory.dtype]})")
                self._computed(self.body, f"carry{i}", memory.dtype)

    def _finish(self) -> Iterator[str]:
        if len(self.tiles.carried) < len(self.loop.carries):
            yield "tl.debug_barrier()"
        for i, memory in enumerate(self.loop.carries):
            space = self._flat(memory.size)
            own = f"row * {memory.size} + {self._space(space)}"
            mask = self._mask(space, "inside")
            if i not in self.tiles.carried:
                slot = "0" if self.reverse else "last"
                last = self._slot(f"history{i}", slot, memory)
                yield f"carry{i} = tl.load({last} + {own}{with_zeros(mask)})"
            yield f"tl.store(final{i} + {own}, carry{i}{mask})"

    # -- operations -------------------------------------------------------------------------------

    def _reduce(self, op: Reduce) -> None:
        space = space_of(op)
        neutral = literal(_NEUTRAL[op.kind], compute_dtype(op.value.dtype))
        x = f"tl.broadcast_to({self._computes(op, space)}, {self.shape.format(space.width)})"
        if space.is_padded:
            x = f"tl.where({self._space(space)}_in, {x}, {neutral})"
        axis, name = "1", name_of(op.value)
        if space.outer:
            parts = f"(ROWS, {columns(space.kept)}, {columns(space.inner)})"
            axis, x = "2", f"tl.reshape({x}, {parts})"
        self.body.append(f"{name} = {x}")
        whole = {
            "sum": f"tl.sum({name}, {axis})",
            "product": f"tl.reduce({name}, {axis}, multiplied)",
            "maximum": f"tl.max({name}, {axis})",
            "minimum": f"tl.min({name}, {axis})",
        }[op.kind]
        if op.kind in ("maximum", "minimum"):  # torch's of a NaN is one
            nans = f"tl.sum(({name} != {name}).to(tl.int32), {axis})"
            whole = f"tl.where({nans} > 0, float('nan'), {whole})"
        self.body.append(f"{name} = {whole}" + ("" if space.outer else "[:, None]"))
        self._store(op.value)

    # -- products ---------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        """Raises Unsupported if the tiles of all weights do not fit."""
        size = 0
        for op in self.products.values():
            wide = sum(columns(length) for _, length in self.tiles.pieces[op.value])
            joined = self.tiles.row_pieces(op)
            tall = sum(columns(v.size) for v, _ in joined) if joined else columns(op.k)
            size += wide * tall * self.loop.weight_dtypes[op.weight].itemsize
        room = _weight_room()
        if size > room:
            raise Unsupported(
                f"its weights take {size >> 10} KB of a multiprocessor, which has {room >> 10} for "
                "them"
            )

    def _product(self, op: Product) -> None:
        joined = self.tiles.row_pieces(op)
        if joined is None:
            row = [(self._read(op.row, space_of(op)), 0, op.k)]
        else:
            row = [(self._whole(value), at, value.size) for value, at in joined]
        for offset, length in self.tiles.pieces[op.value]:
            name = name_of(op.value, offset, length)
            for i, (a, at, k) in enumerate(row):
                weight = self._weight(op, at, k, offset, length)
                self.body.append(f"{name} = {self._dot(op, a, k, length, weight, name, i == 0)}")
        if self.tiles.is_stored(op.value):
            self.body.append(f"{name_of(op.value)} = {name_of(op.value, 0, op.n)}")
            self._store(op.value)

    def _whole(self, value: Value) -> str:
        return name_of(value, 0, value.size) if value in self.tiles.pieces else name_of(value)

    def _dot(self, op: Product, a: str, k: int, n: int, weight: str, name: str, first: bool) -> str:
        own, kind = self.loop.weight_dtypes[op.weight], type_of(compute_dtype(op.value.dtype))
        if columns(k) != k:
            a = f"tl.where({self._space(self._flat(k))}_in, {a}, 0)"
        if k == 1 or n == 1:
            product = f"{a} * {weight}.to({kind})"
            if k != 1:
                product = f"tl.sum({product}, 1)[:, None]"
            return product if first else f"{name} + {product}"
        if own is torch.float64:
            # Triton takes a product's layout from the narrowest load behind an operand, such as a
            # mask, and has none for float64 below 32 bits (3.6, 3.7): a sum breaks the chain.
            a = f"tl.sum(({a})[:, :, None], 2)"
        more = "" if first else f", acc={name}"
        return (
            f"tl.dot({a}.to({TYPES[own]}), {weight}{more}, input_precision=PRECISION, "
            f"out_dtype={kind})"
        )

    def _weight(self, op: Product, k_first: int, k: int, n_first: int, n: int) -> str:
        """The tile [k, n] of a weight; [1, k] for a product of one column."""
        key = (op.weight, k_first, k, n_first, n)
        if key in self.weights:
            return self.weights[key]
        name = self.weights[key] = f"w{len(self.weights)}"
        w, own = op.weight, self._flat(k if n == 1 else n)
        columns_of = self._space(own)
        mask = [f"{columns_of}_in"] if own.is_padded else []
        if n == 1:
            place = f"({k_first} + {columns_of}) * k_stride{w} + {n_first} * n_stride{w}"
        else:
            place = f"({n_first} + {columns_of}) * n_stride{w}"
            rows = f"tl.arange(0, {columns(k)})[:, None]"
            place += f" + ({k_first} + {rows}) * k_stride{w}"
            mask += [f"({rows} < {k})"] if columns(k) != k else []
        if op.grouped:
            behind = " * ".join(self._axis_names()[op.grouped : self.grouped]) or "1"
            place += f" + group // ({behind}) * group_stride{w}"
        masked = f", mask={' & '.join(mask)}, other=0" if mask else ""
        self.before.append(f"{name} = tl.load(weight{w} + {place}{masked})")
        return name


def _weight_room() -> int:
    """Bytes of shared memory for the weights of a program."""
    whole = _SHARED_BYTES
    if torch.cuda.is_available():  # its name is not in torch's stubs, and AMD's have none
        found = torch.cuda.get_device_properties()
        whole = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return whole - _SHARED_BYTES_OF_ROWS


def _dtypes(loop: RowLoop) -> Iterator[torch.dtype]:
    """Of all that a kernel reads, computes and writes."""
    given = [*loop.invariants.values(), *loop.sequences.values(), *loop.carries, *loop.emits]
    yield from (memory.dtype for memory in given)
    yield from loop.weight_dtypes.values()
    yield from (op.value.dtype for op in loop.operations)
