"""A row loop -> Triton: one function for all K steps, for a tile of rows that no other waits for.

The carries stay in registers from step to step, the weights in the shared memory of the
multiprocessor, where they must fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .accesses import RowPattern, contiguous
from .expressions import Expression, Literal, Unsupported
from .rowloop import Memory, Product, Read, Reduce, RowLoop, Value, compute_dtype
from .tiles import Space, columns, make_tiles, space_of
from .triton_expressions import TYPES, apply, literal, type_of

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
    a program has one; ``ROW_BYTES``: of the widest tile. Raises Unsupported.
    """
    return _Printer(loop, history, reverse).text()


class _Printer:
    def __init__(self, loop: RowLoop, history: list[bool], reverse: bool) -> None:
        self.loop, self.reverse, self.asked = loop, reverse, history
        for dtype in _dtypes(loop):
            type_of(dtype)
        self.tiles = make_tiles(loop, history)
        self.products = {op.weight: op for op in loop.operations if isinstance(op, Product)}
        self.grouped = max((op.grouped for op in self.products.values()), default=0)
        self.before: list[str] = []  # the loop
        self.body: list[str] = []
        self.spaces: dict[Space, str] = {}
        self.loaded: dict[Any, str] = {}
        self.dirty: set[Memory] = set()
        self.weights: dict[Any, str] = {}
        self.scratch = [m for m in self.tiles.read_back if m.kind == "scratch"]
        for i, memory in enumerate(self.scratch):
            memory.index = i
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

    def _axis_names(self) -> list[str]:
        return [f"axis{i}" for i in range(len(self.loop.rows.dims))]

    def _arguments(self) -> Iterator[str]:
        loop, kept = self.loop, self.tiles.history
        yield from (f"invariant{i}" for i in sorted(loop.invariants))
        yield from (f"weight{i}" for i in self.products)
        yield from (f"sequence{i}" for i in sorted(loop.sequences))
        for name in ("start", "final"):
            yield from (f"{name}{i}" for i in range(len(loop.carries)))
        yield from (f"history{i}" for i, flag in enumerate(self.asked) if flag)
        yield from (f"emit{i}" for i in range(len(loop.emits)))
        yield from (f"scratch{i}" for i in range(len(self.scratch)))
        yield from (f"history{i}" for i, flag in enumerate(kept) if flag and not self.asked[i])
        yield from ("steps", *self._axis_names())
        yield from (f"step{i}" for i in sorted(loop.sequences))
        for i in self.products:
            yield from (f"group_stride{i}", f"k_stride{i}", f"n_stride{i}")

    def _rows(self) -> Iterator[str]:
        axes = self._axis_names()
        groups = " * ".join(axes[: self.grouped]) or "1"
        yield "last = tl.cast(steps, tl.int64)  # so are all numbers of elements behind it"
        yield f"total = {' * '.join(axes) or '1'}"
        yield f"rows = total // ({groups})"
        yield "group = tl.program_id(1).to(tl.int64)"
        yield "own = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]"
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
            mask = self._mask(space, True)
            self.before.append(f"carry{i} = tl.load(start{i} + {own}{_other(mask)})")
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
            else:
                space = space_of(op)
                value = self._expression(op.expression, space)
                have, want = op.expression.dtype, compute_dtype(op.value.dtype)
                if compute_dtype(have) != want:
                    value = self._cast(value, have, want)
                self._reduce(op, value, space) if isinstance(op, Reduce) else self.body.append(
                    f"{_name(op.value)} = tl.broadcast_to({value}, (ROWS, {space.width}))"
                )
                self._store(op.value)
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
            mask = self._mask(space, True)
            if i not in self.tiles.carried:
                slot = "0" if self.reverse else "last"
                last = self._slot(f"history{i}", slot, memory)
                yield f"carry{i} = tl.load({last} + {own}{_other(mask)})"
            yield f"tl.store(final{i} + {own}, carry{i}{mask})"

    # -- tiles ------------------------------------------------------------------------------------

    def _flat(self, size: int) -> Space:
        return Space((size,) if size != 1 else ())

    def _space(self, space: Space) -> str:
        return self.spaces.setdefault(space, f"s{len(self.spaces)}")

    def _mask(self, space: Space, by_row: bool) -> str:
        name = self._space(space)
        own = ["inside"] * by_row + [f"{name}_in"] * space.is_padded
        return f", mask={' & '.join(own)}" if own else ""

    def _index(self, space: Space, offset: int, strides: tuple[int, ...]) -> str:
        """The element of each column."""
        name, first, terms = self._space(space), [str(offset)] if offset else [], []
        if not space.outer and strides == contiguous(space.shape):
            return " + ".join([*first, name])
        parts = [(name, space.shape, strides)]
        if space.outer:
            o = space.outer
            parts = [
                (f"{name}_outer", space.shape[:o], strides[:o]),
                (f"{name}_inner", space.shape[o:], strides[o:]),
            ]
        for column, shape, own in parts:
            for count, behind, stride in zip(shape, contiguous(shape), own, strict=True):
                if stride:
                    axis = f"{column} // {behind}" if behind != 1 else column
                    axis = f"{axis} % {count}" if count * behind != math.prod(shape) else axis
                    terms.append(f"({axis}) * {stride}" if stride != 1 else f"({axis})")
        return " + ".join([*first, *(terms or [f"{name} * 0"])])

    def _slot(self, name: str, slot: str, memory: Memory) -> str:
        return f"{name} + {slot} * total * {memory.size}" if slot != "0" else name

    def _place(self, memory: Memory) -> str:
        """Where the rows of a memory begin at this step."""
        if memory.kind in ("carry", "next"):
            behind = (memory.kind == "next") != self.reverse
            return self._slot(f"history{memory.index}", "(t + 1)" if behind else "t", memory)
        if memory.kind == "emit":
            return self._slot(f"emit{memory.index}", "t", memory)
        name = f"{memory.kind}{memory.index}"
        return f"{name} + t * step{memory.index}" if memory.kind == "sequence" else name

    def _row(self, pattern: RowPattern, unit: int) -> str:
        (start, stop), axes = pattern.own, self._axis_names()
        if start == stop:
            return ""
        row = "row"
        if stop < len(axes):
            row = f"({row} // ({' * '.join(axes[stop:])}))"
        if start > 0:
            row = f"({row} % ({' * '.join(axes[start:stop])}))"
        return f"{row} * {unit} + "

    def _load(self, read: Read, space: Space) -> str:
        offset = read.offset
        if isinstance(read.source, Value):
            assert read.source.memory is not None
            source, offset = read.source.memory, offset + read.source.offset
        else:
            source = read.source
        key = (source, offset, read.strides, space)
        if key in self.loaded:
            return self.loaded[key]
        if source in self.dirty:
            self.body.append("tl.debug_barrier()")
            self.dirty.clear()
        own = source.kind in ("invariant", "sequence")
        row = self._row(source.pattern, source.pattern.unit if own else source.size)
        index = self._index(space, offset, read.strides)
        name = self.loaded[key] = f"x{len(self.loaded)}"
        lines = self.before if source.kind == "invariant" else self.body
        lines.append(
            f"{name} = tl.load({self._place(source)} + {row}{index}"
            f"{_other(self._mask(space, bool(row)))})"
        )
        self._computed(lines, name, source.dtype)
        return name

    def _computed(self, lines: list[str], name: str, dtype: torch.dtype) -> None:
        """Converts what was loaded to what is computed in."""
        if compute_dtype(dtype) != dtype:
            lines.append(f"{name} = {name}.to({TYPES[compute_dtype(dtype)]})")

    def _store(self, value: Value) -> None:
        memory = value.memory
        if memory is None or not self.tiles.is_stored(value):
            return
        space, name = Space(value.shape), _name(value)
        index = self._index(space, value.offset, value.strides)
        self.body.append(
            f"tl.store({self._place(memory)} + row * {memory.size} + {index}, "
            f"{name}{self._mask(space, True)})"
        )
        self.dirty.add(memory)

    # -- operations -------------------------------------------------------------------------------

    def _read(self, read: Read, space: Space) -> str:
        if not self.tiles.in_register(read, space):
            return self._load(read, space)
        source = read.source
        if isinstance(source, Memory):
            return f"carry{source.index}"
        if source in self.tiles.pieces:
            return _name(source, *self.tiles.piece(read, space))
        return _name(source)

    def _expression(self, expr: Expression, space: Space) -> str:
        if isinstance(expr, Literal):
            return literal(expr.value, compute_dtype(expr.dtype))
        if isinstance(expr, Read):
            return self._read(expr, space)
        args = [self._expression(arg, space) for arg in expr.args]
        if expr.name == "cast":
            return self._cast(args[0], expr.args[0].dtype, expr.dtype)
        return apply(expr, args)

    def _cast(self, text: str, have: torch.dtype, want: torch.dtype) -> str:
        if compute_dtype(have) == compute_dtype(want):
            return text
        if want == torch.bool:
            return f"({text} != 0)"
        return f"{text}.to({type_of(compute_dtype(want))})"

    def _reduce(self, op: Reduce, value: str, space: Space) -> None:
        neutral = literal(_NEUTRAL[op.kind], compute_dtype(op.value.dtype))
        x = f"tl.broadcast_to({value}, (ROWS, {space.width}))"
        if space.is_padded:
            x = f"tl.where({self._space(space)}_in, {x}, {neutral})"
        axis, name = "1", _name(op.value)
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
            name = _name(op.value, offset, length)
            for i, (a, at, k) in enumerate(row):
                weight = self._weight(op, at, k, offset, length)
                self.body.append(f"{name} = {self._dot(op, a, k, length, weight, name, i == 0)}")
        if self.tiles.is_stored(op.value):
            self.body.append(f"{_name(op.value)} = {_name(op.value, 0, op.n)}")
            self._store(op.value)

    def _whole(self, value: Value) -> str:
        return _name(value, 0, value.size) if value in self.tiles.pieces else _name(value)

    def _dot(self, op: Product, a: str, k: int, n: int, weight: str, name: str, first: bool) -> str:
        own, kind = self.loop.weight_dtypes[op.weight], type_of(compute_dtype(op.value.dtype))
        if columns(k) != k:
            a = f"tl.where({self._space(self._flat(k))}_in, {a}, 0)"
        if k == 1 or n == 1:
            product = f"{a} * {weight}.to({kind})"
            if k != 1:
                product = f"tl.sum({product}, 1)[:, None]"
            return product if first else f"{name} + {product}"
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


def _other(mask: str) -> str:
    """A mask for a load, with what stands for the elements that are not there."""
    return f"{mask}, other=0" if mask else ""


def _name(value: Value, offset: int | None = None, length: int = 0) -> str:
    return f"v_{value.name}" if offset is None else f"v_{value.name}_{offset}_{length}"
