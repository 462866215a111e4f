"""The common base of the Triton printers: tiles, their loads and stores, and expressions.

A tile is a Triton tensor of two axes. One axis is the rows; the other is the columns of a ``Space``
or, in a kernel that runs many steps at once, the steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..accesses import RowPattern, contiguous
from ..expressions import COMPARISONS, Expression, Literal
from ..rowloop import Map, Memory, Read, RowLoop, Value, compute_dtype
from .expressions import TYPES, apply, literal, type_of
from .placement import Space, make_tiles


class TilePrinter:
    """Collects the lines of a kernel: ``prologue``, before its loop, and ``body``, inside.

    ``shape``: of a tile, to be formatted with its number of columns. ``element_mask`` and
    ``step_mask``: the variables that mask, inside the loop, the elements that exist, and the steps
    that exist where a tile has several. ``load_option``: of loads of what the kernel itself stored.
    """

    shape, element_mask, step_mask, load_option = "(ROWS, {})", "inside", "", ""

    def __init__(self, loop: RowLoop, parts: int = 1) -> None:
        self.loop, self.tiles = loop, make_tiles(loop, parts)
        self.prologue: list[str] = []
        self.body: list[str] = []
        # The variables that the lines define: of column indices, and of what is loaded.
        self.spaces: dict[Space, str] = {}
        self.loaded: dict[Any, str] = {}
        self.names = map("x{}".format, itertools.count())
        self.dirty: set[Memory] = set()  # stored to since the last barrier
        self.scratch = [m for m in self.tiles.read_back if m.kind == "scratch"]
        for i, memory in enumerate(self.scratch):
            memory.index = i

    def _axis_names(self) -> list[str]:
        return [f"axis{i}" for i in range(len(self.loop.rows.dims))]

    def _arguments(self) -> Iterator[str]:
        """The parameters: memory as in ``cpu.loop``, then workspace, then its numbers."""
        loop, wanted = self.loop, self.loop.history
        yield from (f"invariant{i}" for i in sorted(loop.invariants))
        yield from (f"weight{i}" for i in loop.weight_dtypes)
        yield from (f"sequence{i}" for i in sorted(loop.sequences))
        for name in ("start", "final"):
            yield from (f"{name}{i}" for i in range(len(loop.carries)))
        yield from (f"history{i}" for i, flag in enumerate(wanted) if flag)
        yield from (f"emit{i}" for i in range(len(loop.emits)))
        yield from (f"scratch{i}" for i in range(len(self.scratch)))
        stored = self.tiles.history
        yield from (f"history{i}" for i, flag in enumerate(stored) if flag and not wanted[i])
        yield from ("steps", *self._axis_names())
        yield from (f"step{i}" for i in sorted(loop.sequences))
        for i in loop.weight_dtypes:
            yield from (f"group_stride{i}", f"k_stride{i}", f"n_stride{i}")

    def _signature(self, name: str, *constants: str) -> Iterator[str]:
        """How a function begins. ``constants``: its last parameters, known to the compiler."""
        unspecialized = ", ".join(f'"{size}"' for size in ("steps", *self._axis_names()))
        parameters = [*self._arguments(), *(f"{each}: tl.constexpr" for each in constants)]
        yield f"@triton.jit(do_not_specialize=[{unspecialized}])"
        yield f"def {name}({', '.join(parameters)}):"

    # -- tiles ------------------------------------------------------------------------------------

    def _space(self, space: Space) -> str:
        """The variable with the column indices of the space; ``<name>_in`` masks its padding."""
        return self.spaces.setdefault(space, f"s{len(self.spaces)}")

    def _mask(self, space: Space, rows: str) -> str:
        """The mask argument of a load or store; empty if nothing needs to be masked."""
        name = self._space(space)
        masks = [rows] * bool(rows) + [f"{name}_in"] * space.is_padded
        return f", mask={' & '.join(masks)}" if masks else ""

    def _index(self, space: Space, offset: int, strides: tuple[int, ...]) -> str:
        """The index of the element that each column reads."""
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
        for column, shape, part_strides in parts:
            for count, after, stride in zip(shape, contiguous(shape), part_strides, strict=True):
                if stride:
                    axis = f"{column} // {after}" if after != 1 else column
                    axis = f"{axis} % {count}" if count * after != math.prod(shape) else axis
                    terms.append(f"({axis}) * {stride}" if stride != 1 else f"({axis})")
        return " + ".join([*first, *(terms or [f"{name} * 0"])])

    def _slot(self, name: str, slot: str, memory: Memory) -> str:
        """The start of one step in a sequence of all rows."""
        return f"{name} + {slot} * total * {memory.size}" if slot != "0" else name

    def _step_pointer(self, memory: Memory) -> str:
        """Where the rows of a memory start at this step."""
        if memory.kind in ("carry", "next"):
            is_later_slot = (memory.kind == "next") != self.loop.reverse
            return self._slot(f"history{memory.index}", "(t + 1)" if is_later_slot else "t", memory)
        if memory.kind == "emit":
            return self._slot(f"emit{memory.index}", "t", memory)
        name = f"{memory.kind}{memory.index}"
        return f"{name} + t * step{memory.index}" if memory.kind == "sequence" else name

    def _row_offset(self, pattern: RowPattern) -> str:
        """``row // after % count * unit + `` of the pattern; empty if all rows share one part."""
        (start, stop), axes = pattern.axes, self._axis_names()
        if start == stop:
            return ""
        row = "row"
        if stop < len(axes):
            row = f"({row} // ({' * '.join(axes[stop:])}))"
        if start > 0:
            row = f"({row} % ({' * '.join(axes[start:stop])}))"
        return f"{row} * {pattern.unit} + "

    def _load(self, read: Read, space: Space) -> str:
        """The variable that holds what is read from memory."""
        source, offset = read.memory, read.start
        assert source is not None
        key = (source, offset, read.strides, space)
        if key in self.loaded:
            return self.loaded[key]
        if source in self.dirty:
            self._barrier(self.body)
        is_input = source.kind in ("invariant", "sequence")
        row = self._row_offset(source.pattern)
        index = self._index(space, offset, read.strides)
        name = self.loaded[key] = next(self.names)
        by_row, by_step = self.element_mask, self.step_mask
        if source.kind == "invariant":
            by_row, by_step = "inside", ""
        mask = with_zeros(self._mask(space, by_row if row else by_step))
        option = "" if is_input else self.load_option
        loaded = f"tl.load({self._loaded_pointer(source, space)} + {row}{index}{mask}{option})"
        self._define_loaded(source, space, name, self._converted(loaded, source.dtype))
        return name

    def _loaded_pointer(self, source: Memory, space: Space) -> str:
        """Where the rows of what is loaded start."""
        return self._step_pointer(source)

    def _define_loaded(self, source: Memory, space: Space, name: str, loaded: str) -> None:
        lines = self.prologue if source.kind == "invariant" else self.body
        lines.append(f"{name} = {loaded}")

    def _converted(self, loaded: str, dtype: torch.dtype) -> str:
        """What was loaded, in its compute dtype."""
        if compute_dtype(dtype) == dtype:
            return loaded
        return f"{loaded}.to({TYPES[compute_dtype(dtype)]})"

    def _rounded(self, name: str, dtype: torch.dtype) -> str:
        """What is computed, as memory of this dtype would give it back."""
        if compute_dtype(dtype) == dtype:
            return name
        return self._converted(f"{name}.to({TYPES[dtype]})", dtype)

    def _round_what_is_read_back(self, value: Value, name: str) -> None:
        """So that a value is the same in registers as in memory, where both are read.

        In 16 bits it would not be, and the maximum of such values equal to none of them.
        """
        memory = value.memory
        if memory is None or memory.kind == "scratch" or memory not in self.tiles.read_back:
            return
        rounded = self._rounded(name, memory.dtype)
        if rounded != name:
            self.body.append(f"{name} = {rounded}")

    def _barrier(self, lines: list[str]) -> None:
        """Waits until all stores so far are visible to those that load them."""
        lines.append("tl.debug_barrier()")
        self.dirty.clear()

    def _store(self, value: Value) -> None:
        memory = value.memory
        if memory is None or not self.tiles.is_stored(value):
            return
        space = self.tiles.space_of_value(value)
        self._store_at(
            value, space, self._index(space, value.offset, value.strides), name_of(value)
        )

    def _store_at(self, value: Value, space: Space, index: str, name: str) -> None:
        memory = value.memory
        assert memory is not None
        self.body.append(
            f"tl.store({self._step_pointer(memory)} + row * {memory.size} + {index}, "
            f"{name}{self._mask(space, self.element_mask)})"
        )
        self.dirty.add(memory)

    # -- operations -------------------------------------------------------------------------------

    def _operand(self, expression: Expression, dtype: torch.dtype, space: Space) -> str:
        """The expression at each index of the space, in the dtype of its operation's value."""
        return self._cast(self._expression(expression, space), expression.dtype, dtype)

    def _tile(self, value: str, space: Space) -> str:
        """All rows of what may be the same for all, and so is one row."""
        return f"tl.broadcast_to({value}, {self.shape.format(space.width)})"

    def _map(self, op: Map) -> None:
        space = self.tiles.space_of(op)
        value = self._tile(self._operand(op.expression, op.value.dtype, space), space)
        self.body.append(f"{name_of(op.value)} = {value}")
        self._round_what_is_read_back(op.value, name_of(op.value))
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
        if expr.name in COMPARISONS:  # as if both were from memory: one of them may be
            args = [self._rounded(a, arg.dtype) for a, arg in zip(args, expr.args, strict=True)]
        return apply(expr, args)

    def _cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        if compute_dtype(source) == compute_dtype(target):
            return text
        if target == torch.bool:
            return f"({text} != 0)"
        return f"{text}.to({type_of(compute_dtype(target))})"


def with_zeros(mask: str) -> str:
    """The mask argument of a load, with zero for the masked elements."""
    return f"{mask}, other=0" if mask else ""


def name_of(value: Value, offset: int | None = None, length: int = 0) -> str:
    """The variable of a value, or of some columns of a product."""
    return f"v_{value.name}" if offset is None else f"v_{value.name}_{offset}_{length}"
