"""A row loop -> Triton: one function for all K steps, in which each program takes a tile of rows.

Programs do not synchronize. Carries stay in registers from step to step, and weights in the shared
memory of the multiprocessor, where they must fit. For an affine recurrence, whose steps compose,
the module has a second function (``scan``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..expressions import Expression, Unsupported
from ..rowloop import Memory, Product, Reduce, RowLoop, compute_dtype
from .expressions import literal, type_of
from .placement import Space, columns
from .printer import name_of, with_zeros
from .products import ProductPrinter

# The widest row of a tile, of which 16 fill all registers of eight warps. Triton's compiler takes
# minutes for a wider one, and refuses one that is wider still.
_MOST_ROW_BYTES = 16 << 10
_NEUTRAL = {"sum": 0.0, "product": 1.0, "maximum": -math.inf, "minimum": math.inf}
# Of two ranges of columns; NaN if one of them is.
_COMBINED = {
    "sum": "{0} + {1}", "product": "{0} * {1}",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
}  # fmt: skip

_HEAD = """\
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def multiplied(a, b):
    return a * b


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x

"""


class LoopPrinter(ProductPrinter):
    """``head``: how the module begins. ``scratch_slots``: of scratch memory, used in turn."""

    head, scratch_slots = _HEAD, 1

    def __init__(self, loop: RowLoop, parts: int = 1) -> None:
        super().__init__(loop, parts)
        for dtype in _dtypes(loop):
            type_of(dtype)  # raises Unsupported
        if any(op.vectors > 1 for op in loop.products):
            reason = "GPU kernels do not support products of several vectors of a row"
            if any(op.by_vector for op in loop.products):
                reason += (
                    ", but those of heads, if the state has an axis for them, [rows, heads, "
                    "units], and the recurrence does not mix them"
                )
            raise Unsupported(reason)
        if loop.grouped + loop.trailing > len(loop.rows.dims):
            raise Unsupported(
                "GPU kernels do not support a weight for each head beside one for each head of "
                "each row"
            )
        self.inputs: dict[str, str] = {}  # variables, loaded for a step

    # -- the module -------------------------------------------------------------------------------

    def text(self) -> str:
        self._load_carries()
        self._step()
        self._load_inputs_ahead()
        epilogue = self._store_finals()
        itemsize = max(compute_dtype(memory.dtype).itemsize for memory in self.loop.carries)
        row_bytes = itemsize * max((space.width for space in self.spaces), default=1)
        if row_bytes > _MOST_ROW_BYTES:
            raise Unsupported(
                f"a program would have {row_bytes >> 10} KB of each row in registers, which have "
                f"room for {_MOST_ROW_BYTES >> 10} KB"
            )
        lines = [
            self.head,
            f"WORKSPACE = {self._workspace()!r}",
            f"GROUPED, ROW_BYTES = {self._grouped()}, {row_bytes}",
            f"AXES = {len(self.loop.rows.dims)}",
            f"EXACT = {any(t.itemsize > 2 for t in self.loop.weight_dtypes.values())}",
            *self._constants(),
            "",
            "",
            *self._signature("run", "ROWS", "PRECISION"),
            *(f"    {line}" for line in (*self._rows(), *self._indices(), *self.prologue)),
            "    for step in range(steps):",
            f"        t = tl.cast({'steps - 1 - step' if self.loop.reverse else 'step'}, tl.int64)",
            *(f"        {line}" for line in self.body),
            *(f"    {line}" for line in epilogue),
        ]
        return "\n".join(lines) + "\n"

    def _constants(self) -> Iterator[str]:
        """Further constants of the module."""
        yield "PARTS = 1"

    def _workspace(self) -> list[tuple[str, int, bool]]:
        scratch = [
            (compute_dtype(memory.dtype), self.scratch_slots * memory.size, False)
            for memory in self.scratch
        ]
        histories = [
            (memory.dtype, memory.size, True)
            for i, memory in enumerate(self.loop.carries)
            if self.tiles.history[i] and not self.loop.history[i]
        ]
        return [
            (str(dtype).removeprefix("torch."), size, each_step)
            for dtype, size, each_step in (*scratch, *histories)
        ]

    def _rows(self) -> Iterator[str]:
        axes = self._axis_names()
        groups = " * ".join(axes[i] for i in self._grouped()) or "1"
        yield from self._program()
        yield "last = tl.cast(steps, tl.int64)  # 64 bits, like all offsets computed from it"
        yield f"total = {' * '.join(axes) or '1'}"
        yield f"rows = total // ({groups})"
        yield "tiles = tl.cdiv(rows, ROWS)"
        yield "group = (program // tiles).to(tl.int64)"
        yield "tile = (program % tiles).to(tl.int64)"
        yield "row_in_group = tile * ROWS + tl.arange(0, ROWS)[:, None]"
        yield "inside = row_in_group < rows"
        if not self.loop.trailing:
            yield "row = group * rows + row_in_group"
            return
        heads = self._last_axes(self.loop.trailing)
        yield f"head = group % ({heads})"
        yield f"group = group // ({heads})"
        yield f"row = (group * rows + row_in_group) * ({heads}) + head"

    def _grouped(self) -> list[int]:
        """The row axes along which a weight varies: the first ones, and the last ones."""
        count = len(self.loop.rows.dims)
        return [*range(self.loop.grouped), *range(count - self.loop.trailing, count)]

    def _program(self) -> Iterator[str]:
        """Which tile the program has."""
        yield "program = tl.program_id(0)"

    def _indices(self) -> Iterator[str]:
        for space, name in self.spaces.items():
            first = f"part * {space.width} + " if space.parts > 1 else ""
            yield f"{name} = {first}tl.arange(0, {space.width})[None, :]"
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
            space = self.tiles.flat(memory.size)
            index = f"row * {memory.size} + {self._space(space)}"
            mask = self._mask(space, "inside")
            self.prologue.append(f"carry{i} = tl.load(start{i} + {index}{with_zeros(mask)})")
            if self.tiles.history[i]:
                slot = "last" if self.loop.reverse else "0"
                first = self._slot(f"history{i}", slot, memory)
                self.prologue.append(f"tl.store({first} + {index}, carry{i}{mask})")
            if i in self.tiles.next_carries:
                carry = self._converted(f"carry{i}", memory.dtype)
                self.prologue.append(f"carry{i} = {carry}")

    def _step(self) -> None:
        # What the previous step stored must be visible, and what it read may be overwritten.
        awaited = ("carry", "scratch") if self.scratch_slots == 1 else ("carry",)
        if any(memory.kind in awaited for memory in self.tiles.read_back):
            self._await_step_before()
        for op in self.loop.operations:
            if isinstance(op, Product):
                self._product(op)
            elif isinstance(op, Reduce):
                self._reduce(op)
            else:
                self._map(op)
        for i, value in self.tiles.next_carries.items():
            carry = self._rounded(self._all_columns(value), self.loop.carries[i].dtype)
            self.body.append(f"carry{i} = {carry}")

    def _await_step_before(self) -> None:
        self._barrier(self.body)

    def _load_inputs_ahead(self) -> None:
        """Loads the inputs of the next step before a step, which then waits for no memory."""
        if not self.inputs:
            return
        before, after = "steps - 1", "tl.maximum(t - 1, 0)"
        if not self.loop.reverse:
            before, after = "0", "tl.minimum(t + 1, last - 1)"
        inputs = self.inputs.items()
        self.prologue += [
            f"ahead = tl.cast({before}, tl.int64)",
            *(f"{name} = {loaded}" for name, loaded in inputs),
        ]
        self.body = [
            f"ahead = {after}",
            *(f"next_{name} = {loaded}" for name, loaded in inputs),
            *self.body,
            *(f"{name} = next_{name}" for name in self.inputs),
        ]

    def _is_loaded_ahead(self, source: Memory, space: Space) -> bool:
        """Whether it is loaded a step ahead; registers have room for it until then."""
        return source.kind == "sequence"

    def _define_loaded(self, source: Memory, space: Space, name: str, loaded: str) -> None:
        if self._is_loaded_ahead(source, space):
            self.inputs[name] = loaded
        else:
            super()._define_loaded(source, space, name, loaded)

    def _loaded_pointer(self, source: Memory, space: Space) -> str:
        if self._is_loaded_ahead(source, space):
            return f"sequence{source.index} + ahead * step{source.index}"
        return super()._loaded_pointer(source, space)

    def _store_finals(self) -> list[str]:
        lines: list[str] = []
        if len(self.tiles.next_carries) < len(self.loop.carries):
            self._barrier(lines)
        for i, memory in enumerate(self.loop.carries):
            space = self.tiles.flat(memory.size)
            index = f"row * {memory.size} + {self._space(space)}"
            mask = self._mask(space, "inside")
            if i not in self.tiles.next_carries:
                slot = "0" if self.loop.reverse else "last"
                last = self._slot(f"history{i}", slot, memory)
                lines.append(
                    f"carry{i} = tl.load({last} + {index}{with_zeros(mask)}{self.load_option})"
                )
            lines.append(f"tl.store(final{i} + {index}, carry{i}{mask})")
        return lines

    # -- operations -------------------------------------------------------------------------------

    def _reduce(self, op: Reduce) -> None:
        """Ranges of as many columns are combined element by element, and reduced as one."""
        name, by_width = name_of(op.value), dict[int, tuple[str, Space]]()
        for i, (expression, space) in enumerate(self.tiles.ranges_of(op)):
            x, part = self._to_reduce(op, expression, space), f"{name}_part{i}"
            if space.width in by_width:
                part, _ = by_width[space.width]
                x = _COMBINED[op.kind].format(part, f"({x})")
            else:
                by_width[space.width] = part, space
            self.body.append(f"{part} = {x}")
        for i, (part, space) in enumerate(by_width.values()):
            self._reduce_tile(part if i else name, part, op, space)
            if i:
                self.body.append(f"{name} = {_COMBINED[op.kind].format(name, part)}")
        self._round_what_is_read_back(op.value, name)
        self._store(op.value)

    def _to_reduce(self, op: Reduce, expression: Expression, space: Space) -> str:
        """A tile, with what changes no result where it has no columns."""
        neutral = literal(_NEUTRAL[op.kind], compute_dtype(op.value.dtype))
        x = self._tile(self._operand(expression, op.value.dtype, space), space)
        return f"tl.where({self._space(space)}_in, {x}, {neutral})" if space.is_padded else x

    def _reduce_tile(self, name: str, x: str, op: Reduce, space: Space) -> None:
        axis = "1"
        if space.outer:
            shape = f"(ROWS, {columns(space.outer_size)}, {columns(space.inner_size)})"
            self.body.append(f"{x} = tl.reshape({x}, {shape})")
            axis = "2"
        result = {
            "sum": f"tl.sum({x}, {axis})",
            "product": f"tl.reduce({x}, {axis}, multiplied)",
            "maximum": f"tl.max({x}, {axis})",
            "minimum": f"tl.min({x}, {axis})",
        }[op.kind]
        if op.kind in ("maximum", "minimum"):  # NaN if any element is, as in torch
            nans = f"tl.sum(({x} != {x}).to(tl.int32), {axis})"
            result = f"tl.where({nans} > 0, float('nan'), {result})"
        self.body.append(f"{name} = {result}" + ("" if space.outer else "[:, None]"))


def _dtypes(loop: RowLoop) -> Iterator[torch.dtype]:
    """The dtypes of all that a kernel reads, computes and writes."""
    memories = [*loop.invariants.values(), *loop.sequences.values(), *loop.carries, *loop.emits]
    yield from (memory.dtype for memory in memories)
    yield from loop.weight_dtypes.values()
    yield from (op.value.dtype for op in loop.operations)
