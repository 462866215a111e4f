"""A row loop: a scan block as maps, reductions and products of one row, and where values lie.

No language is in it yet. What it says: for each step, for each row, run the operations in order;
read inputs, carries and values by offset and strides; write each output to its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .accesses import RowPattern, RowView
from .expressions import Apply, Expression


@dataclass(eq=False)
class Memory:
    """A place for one value per row, or per step and row, or for all rows alike.

    ``kind``: "invariant", "sequence" and "carry" are read, "emit" and "next" are written (and may
    be read again in the step), "total" is added to, "scratch" is the kernel's own. ``index``
    numbers those of a kind; ``pattern`` says how rows find their part; a part has ``size``
    elements.
    """

    kind: str
    index: int
    dtype: torch.dtype
    size: int
    pattern: RowPattern


@dataclass(eq=False)
class Value:
    """What an operation computes for one row: ``shape`` without axes of one element.

    It lies in order at ``offset`` of its memory; only a piece of a join that nothing else reads
    may have other ``strides``.
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


@dataclass(eq=False)
class Map:
    """``value[i] = expression`` for each index of the value's shape."""

    value: Value
    expression: Expression


@dataclass(eq=False)
class Reduce:
    """``value[i]`` = the sum (or another ``kind``) of the expression over ``shape[outer:]``."""

    value: Value
    kind: str
    shape: tuple[int, ...]
    outer: int
    expression: Expression


@dataclass(eq=False)
class Product:
    """``value = row @ weight``: ``row`` has ``k`` numbers in order, the weight is an invariant.

    ``grouped``: the row axes in front that each have a weight of their own.
    """

    value: Value
    row: Read
    weight: int
    k: int
    n: int
    grouped: int


Operation = Map | Reduce | Product


@dataclass
class RowLoop:
    """The whole of a scan block for a kernel: see the module.

    ``invariants`` and ``sequences`` are the inputs that are read as they are, by their number in
    the block; ``weight_dtypes`` are the invariants that products multiply with.
    """

    rows: RowView
    operations: list[Operation]
    invariants: dict[int, Memory]
    sequences: dict[int, Memory]
    carries: list[Memory]
    nexts: list[Memory]
    emits: list[Memory]
    totals: list[Memory] = field(default_factory=list)
    weight_dtypes: dict[int, torch.dtype] = field(default_factory=dict)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are computed in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reads(expr: Expression) -> Iterator[Read]:
    """The leaves of an expression."""
    if isinstance(expr, Read):
        yield expr
    elif isinstance(expr, Apply):
        for arg in expr.args:
            yield from reads(arg)
