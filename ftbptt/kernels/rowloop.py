"""A row loop: a scan block as maps, reductions and products of one row, and where values lie.

It is independent of the target language. Its meaning: for each step and each row, run the
operations in order; read inputs, carries and values by offset and strides; write each output to its
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .accesses import RowPattern, RowView, contiguous
from .expressions import Apply, Expression, parts


@dataclass(eq=False)
class Memory:
    """A tensor, or workspace of the kernel: a part per row or per step and row, or one for all.

    ``kind``: "invariant", "sequence" and "carry" are read; "emit" and "next" are written, and may
    be read again in the same step; "total" is accumulated into; "scratch" is workspace. ``index``:
    the position among the memories of its kind, -1 if not yet assigned. ``size``: elements of a
    part. ``pattern``: where the part of a row starts.
    """

    kind: str
    index: int
    dtype: torch.dtype
    size: int
    pattern: RowPattern


@dataclass(eq=False)
class Value:
    """The result of an operation for one row: ``shape`` is without axes of one element.

    It is contiguous at ``offset`` in its memory, if it has one. Only a piece of a ``cat`` that
    nothing else reads may have other ``strides``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: Memory | None = None
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Read:
    """``source[offset + sum(index * strides)]``, a leaf of an expression."""

    source: Value | Memory
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def memory(self) -> Memory | None:
        """Where the source lies; None for a value in a register."""
        return self.source.memory if isinstance(self.source, Value) else self.source

    @property
    def start(self) -> int:
        """The offset in that memory."""
        return self.offset + (self.source.offset if isinstance(self.source, Value) else 0)


@dataclass(eq=False)
class Map:
    """``value[i] = expression`` for each index of the value's shape."""

    value: Value
    expression: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


@dataclass(eq=False)
class Reduce:
    """``value[i]`` = the expression reduced over ``shape[outer:]``, for i in ``shape[:outer]``.

    ``kind``: "sum", "product", "maximum" or "minimum".
    """

    value: Value
    kind: str
    shape: tuple[int, ...]
    outer: int
    expression: Expression


@dataclass(eq=False)
class Product:
    """``value[v, n] = row[v, k] @ weight[k, n]``: ``row`` is contiguous.

    ``weight``: index of an invariant of the block. ``vectors``: the size of the axis v.
    ``by_vector``: whether each vector has a weight of its own. ``grouped``, ``trailing``: the
    numbers of the first and of the last row axes along which the weight varies.
    """

    value: Value
    row: Read
    weight: int
    vectors: int
    k: int
    n: int
    grouped: int
    by_vector: bool
    trailing: int = 0


Operation = Map | Reduce | Product


class EmitLayout(NamedTuple):
    """How a kernel writes an emit at a step: ``shape``, which has the rows first.

    The emit is that, its axes in the order ``back``, in the shape that the block has it in.
    """

    shape: tuple[int, ...]
    back: tuple[int, ...]


@dataclass
class RowLoop:
    """A scan block, for a kernel (see the module).

    ``history`` flags the carries that are wanted at every step; ``reverse``: the last step comes
    first. ``invariants`` and ``sequences``: the inputs that expressions and products read
    directly, by their index in the block. ``nexts``: the next carries. ``weight_dtypes``: the
    invariants that products multiply with, by index, as a kernel takes them, and ``transposed``
    which of those are ``[n, k]``.
    """

    rows: RowView
    history: list[bool]
    reverse: bool
    operations: list[Operation]
    invariants: dict[int, Memory]
    sequences: dict[int, Memory]
    carries: list[Memory]
    nexts: list[Memory]
    emits: list[Memory]
    emit_layouts: list[EmitLayout]
    totals: list[Memory] = field(default_factory=list)
    weight_dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    transposed: set[int] = field(default_factory=set)

    @property
    def products(self) -> list[Product]:
        return [op for op in self.operations if isinstance(op, Product)]

    @property
    def grouped(self) -> int:
        """How many of the first row axes some weight varies along."""
        return max((op.grouped for op in self.products), default=0)

    @property
    def trailing(self) -> int:
        """How many of the last row axes some weight varies along."""
        return max((op.trailing for op in self.products), default=0)


def scratch_for(value: Value, rows: RowView) -> Memory:
    """Workspace with room for the value of each row."""
    return Memory("scratch", -1, value.dtype, value.size, rows.part_each(value.size))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute: float32 for 16-bit floating point, else the same."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reads(expr: Expression) -> Iterator[Read]:
    """The reads in an expression, in order."""
    return (part for part in parts(expr) if isinstance(part, Read))


def reads_of(op: Operation) -> Iterator[Read]:
    """All that an operation reads, but the weight of a product."""
    return iter([op.row]) if isinstance(op, Product) else reads(op.expression)


def with_reads(expr: Expression, change: Callable[[Read], Expression]) -> Expression:
    """The expression with another one in place of each of its reads."""
    if isinstance(expr, Read):
        return change(expr)
    if isinstance(expr, Apply):
        return replace(expr, args=tuple(with_reads(arg, change) for arg in expr.args))
    return expr


def is_same_index(read: Read, shape: tuple[int, ...] | None) -> bool:
    """Whether element i of a loop over ``shape`` reads element i of a value."""
    value = read.source
    assert isinstance(value, Value)
    return value.shape == shape and not read.offset and read.strides == contiguous(value.shape)
