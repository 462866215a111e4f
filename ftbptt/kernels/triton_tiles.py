"""What every kernel in Triton is printed from: tiles, where they lie in memory, and expressions.

A tile is a tensor of Triton's: one axis are rows, the other one the columns of a ``Space`` or, of a
kernel that takes many steps at once, the steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from .accesses import RowPattern, contiguous
from .expressions import Expression, Literal
from .rowloop import Map, Memory, Product, Read, Reduce, RowLoop, Value, compute_dtype
from .tiles import Space, make_tiles
from .triton_expressions import TYPES, apply, literal, type_of


class TilePrinter:
    """The lines of a kernel ``before`` its loop and in its ``body``, and what they have named.

    ``shape``: of a tile, for its columns. ``here``, ``now``: the masks of what a tile has of rows
    in the loop, and of steps if those are many.
    """

    shape, here, now = "(ROWS, {})", "inside", ""

    def __init__(self, loop: RowLoop, history: list[bool], reverse: bool) -> None:
        self.loop, self.reverse, self.asked = loop, reverse, history
        self.tiles = make_tiles(loop, history)
        self.products = {op.weight: op for op in loop.operations if isinstance(op, Product)}
        self.before: list[str] = []
        self.body: list[str] = []
        self.spaces: dict[Space, str] = {}
        self.loaded: dict[Any, str] = {}
        self.names = map("x{}".format, itertools.count())
        self.dirty: set[Memory] = set()
        self.scratch = [m for m in self.tiles.read_back if m.kind == "scratch"]
        for i, memory in enumerate(self.scratch):
            memory.index = i

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

    # -- tiles ------------------------------------------------------------------------------------

    def _flat(self, size: int) -> Space:
        return Space((size,) if size != 1 else ())

    def _space(self, space: Space) -> str:
        return self.spaces.setdefault(space, f"s{len(self.spaces)}")

    def _mask(self, space: Space, rows: str) -> str:
        name = self._space(space)
        own = [rows] * bool(rows) + [f"{name}_in"] * space.is_padded
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
        (start, stop), axes = pattern.axes, self._axis_names()
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
        name = self.loaded[key] = next(self.names)
        lines, rows, steps = self.body, self.here, self.now
        if source.kind == "invariant":
            lines, rows, steps = self.before, "inside", ""
        lines.append(
            f"{name} = tl.load({self._place(source)} + {row}{index}"
            f"{with_zeros(self._mask(space, rows if row else steps))})"
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
        space, name = Space(value.shape), name_of(value)
        index = self._index(space, value.offset, value.strides)
        self.body.append(
            f"tl.store({self._place(memory)} + row * {memory.size} + {index}, "
            f"{name}{self._mask(space, self.here)})"
        )
        self.dirty.add(memory)

    # -- operations -------------------------------------------------------------------------------

    def _computes(self, op: Map | Reduce, space: Space) -> str:
        """What the operation computes at each index of the space, in its own dtype."""
        value = self._expression(op.expression, space)
        return self._cast(value, op.expression.dtype, op.value.dtype)

    def _map(self, op: Map) -> None:
        space = Space(op.value.shape)
        value = f"tl.broadcast_to({self._computes(op, space)}, {self.shape.format(space.width)})"
        self.body.append(f"{name_of(op.value)} = {value}")
        self._store(op.value)

    def _read(self, read: Read, space: Space) -> str:
        if not self.tiles.in_register(read, space):
            return self._load(read, space)
        source = read.source
        if isinstance(source, Memory):
            return f"carry{source.index}"
        if source in self.tiles.pieces:
            return name_of(source, *self.tiles.piece(read, space))
        return name_of(source)

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


def with_zeros(mask: str) -> str:
    """A mask for a load, with what stands for the elements that are not there."""
    return f"{mask}, other=0" if mask else ""


def name_of(value: Value, offset: int | None = None, length: int = 0) -> str:
    return f"v_{value.name}" if offset is None else f"v_{value.name}_{offset}_{length}"
