"""A row loop -> the order of its work in one step: products of many rows, loops over each row.

Operations over the same indices share a loop and pass values in registers. A value that is read
elsewhere, or in another order, goes through memory.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch

from ..expressions import parts
from ..rowloop import (
    Map,
    Memory,
    Operation,
    Product,
    Read,
    Reduce,
    RowLoop,
    Value,
    compute_dtype,
    is_same_index,
    reads,
    reads_of,
    scratch_for,
)

# Shorter axes are not worth a vector.
_LEAST_ELEMENTS = 4


@dataclass(eq=False)
class Nest:
    """Nested loops over ``shape``, for one row.

    ``outer``: its reductions are over ``shape[outer:]``; None if it has none.
    """

    shape: tuple[int, ...]
    outer: int | None = None
    operations: list[Map | Reduce] = field(default_factory=list)

    def accepts(self, op: Map | Reduce, *, reads_registers: bool) -> bool:
        """Whether an operation over the same indices can join.

        A reduction must keep the same axes, and a dtype that is not that of the others stays out:
        there are vectors of one dtype. So does an operation whose vectors would be along another
        axis, unless it reads what the nest has in registers.
        """
        outer = op.outer if isinstance(op, Reduce) else None
        if outer is not None and self.outer not in (None, outer):
            return False
        alone = Nest(self.shape, outer, [op])
        joined = Nest(self.shape, self.outer if outer is None else outer, [*self.operations, op])
        if len(joined.dtypes()) > 1 and not (len(self.dtypes()) > 1 and len(alone.dtypes()) > 1):
            return False
        return reads_registers or alone.vector_axis() == self.vector_axis() == joined.vector_axis()

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes that it computes in, but for bool: a mask of vectors is of any dtype."""
        found = {compute_dtype(op.value.dtype) for op in self.operations}
        for op in self.operations:
            found |= {compute_dtype(part.dtype) for part in parts(op.expression)}
        return found - {torch.bool}

    def vector_axis(self, stored: Container[Value] = ()) -> int | None:
        """The axis along which all that is read and ``stored`` lies in contiguous memory.

        It is the last axis, or the last that the reductions keep; None if it is neither.
        """
        strides = [
            op.value.strides
            for op in self.operations
            if isinstance(op, Map) and (op.value in stored or op.value.memory is not None)
        ]
        mapped = {op.value for op in self.operations if isinstance(op, Map)}
        for op in self.operations:
            for read in reads(op.expression):
                if not (read.source in mapped and is_same_index(read, self.shape)):
                    strides.append(read.strides)
        last = len(self.shape) - 1
        candidates = [last] if self.outer is None else [last, self.outer - 1]
        for axis in candidates:
            is_long = axis >= 0 and self.shape[axis] >= _LEAST_ELEMENTS
            if is_long and all(s[axis] in (0, 1) for s in strides):
                return axis
        return None


@dataclass
class Schedule:
    """The work of a step for a tile of rows.

    ``stages``: each is a product for all rows of the tile, or nests to run row by row. ``stored``:
    the values that go through memory. ``scratch``: the kernel's workspace; for those in
    ``one_row``, used within a single stage of nests, one row is enough for the whole tile.
    """

    stages: list[Product | list[Nest]]
    stored: set[Value]
    scratch: list[Memory]
    one_row: set[Memory]


def make_schedule(loop: RowLoop) -> Schedule:
    """make_schedule : RowLoop -> Schedule

    Assigns memory to the values that need one, in the loop itself.
    """
    items, item_of = _fuse_loops(loop)
    stored = _stored_values(loop, items, item_of)
    stages: list[Product | list[Nest]] = []
    stage_of_item: list[int] = []
    for item in items:
        if isinstance(item, Product):
            stages.append(item)
        elif stages and isinstance(stages[-1], list):
            stages[-1].append(item)
        else:
            stages.append([item])
        stage_of_item.append(len(stages) - 1)
    _assign_memory(loop, stored)
    stage_of = {value: stage_of_item[i] for value, i in item_of.items()}
    scratch, one_row = _number_scratch(loop, stages, stage_of)
    return Schedule(stages, stored, scratch, one_row)


def _fuse_loops(loop: RowLoop) -> tuple[list[Product | Nest], dict[Value, int]]:
    """(products and nests in order, the index of the one that computes each value)

    An operation joins the first nest over the same indices that comes after all that it reads.
    """
    items: list[Product | Nest] = []
    item_of: dict[Value, int] = {}
    writers: dict[Memory, list[Operation]] = {}
    for op in loop.operations:
        if op.value.memory is not None:
            writers.setdefault(op.value.memory, []).append(op)

    def first_item(read: Read, shape: tuple[int, ...]) -> int:
        """The index of the first item that a loop over ``shape`` with this read can be."""
        if isinstance(read.source, Memory):
            return 0
        if read.source not in item_of:  # a cat: after all of its pieces
            assert read.source.memory is not None
            return 1 + max(item_of[op.value] for op in writers[read.source.memory])
        i = item_of[read.source]
        return i if _in_register(read, shape, items[i]) else i + 1

    for op in loop.operations:
        if isinstance(op, Product):
            item_of[op.value] = len(items)
            items.append(op)
            continue
        sources = list(reads(op.expression))
        first = max((first_item(read, op.shape) for read in sources), default=0)
        for i in range(first, len(items)):
            nest = items[i]
            if isinstance(nest, Nest) and nest.shape == op.shape:
                reads_registers = any(_in_register(read, op.shape, nest) for read in sources)
                if nest.accepts(op, reads_registers=reads_registers):
                    break
        else:
            i, nest = len(items), Nest(op.shape)
            items.append(nest)
        nest.operations.append(op)
        nest.outer = op.outer if isinstance(op, Reduce) else nest.outer
        item_of[op.value] = i
    return items, item_of


def _in_register(read: Read, shape: tuple[int, ...] | None, item: Product | Nest) -> bool:
    """Whether a loop over ``shape`` in ``item`` reads what the same iteration has computed."""
    value = read.source
    if not (isinstance(value, Value) and isinstance(item, Nest) and item.shape == shape):
        return False
    is_mapped = any(op.value is value and isinstance(op, Map) for op in item.operations)
    return is_mapped and is_same_index(read, shape)


def _stored_values(
    loop: RowLoop, items: list[Product | Nest], item_of: dict[Value, int]
) -> set[Value]:
    """The values that go through memory: outputs, results of products and reductions, and values
    that are read outside of the iteration that computes them."""
    stored = {op.value for op in loop.operations if op.value.memory is not None}
    for op in loop.operations:
        if isinstance(op, (Product, Reduce)):
            stored.add(op.value)
        shape = None if isinstance(op, Product) else op.shape
        for read in reads_of(op):
            if isinstance(read.source, Value) and read.source in item_of:
                item = items[item_of[read.source]]
                is_same_item = item_of[read.source] == item_of[op.value]
                if not (is_same_item and _in_register(read, shape, item)):
                    stored.add(read.source)
    return stored


def _assign_memory(loop: RowLoop, stored: set[Value]) -> None:
    """Gives a scratch memory to each stored value that has none."""
    for op in loop.operations:
        if op.value in stored and op.value.memory is None:
            op.value.memory = scratch_for(op.value, loop.rows)


def _number_scratch(
    loop: RowLoop, stages: list[Product | list[Nest]], stage_of: dict[Value, int]
) -> tuple[list[Memory], set[Memory]]:
    """(the scratch memories, numbered in order of first use, those that need only one row)"""
    used_in: dict[Memory, set[int]] = {}
    for op in loop.operations:
        for memory in (op.value.memory, *(read.memory for read in reads_of(op))):
            if memory is not None and memory.kind == "scratch":
                used_in.setdefault(memory, set()).add(stage_of[op.value])
    for index, memory in enumerate(used_in):
        memory.index = index
    one_row = {
        memory
        for memory, indices in used_in.items()
        if len(indices) == 1 and isinstance(stages[next(iter(indices))], list)
    }
    return list(used_in), one_row
