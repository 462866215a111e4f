"""A row loop -> the order of its work in a step: products for many rows, loops for each row.

Operations over the same indices share a loop, in which values pass in registers; a value that is
read elsewhere, or in another order, is kept in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .accesses import RowPattern, contiguous
from .rowloop import Map, Memory, Operation, Product, Read, Reduce, RowLoop, Value, reads


@dataclass(eq=False)
class Nest:
    """Loops over ``shape``, for one row; the axes behind ``outer`` are those of its reductions."""

    shape: tuple[int, ...]
    outer: int | None = None
    operations: list[Map | Reduce] = field(default_factory=list)


@dataclass
class Schedule:
    """``stages``: a product for all rows at hand, or nests that are run row by row.

    ``kept``: values that live in memory; ``scratch``: the kernel's own memory, with whether one
    row of it is enough.
    """

    stages: list[Product | list[Nest]]
    kept: set[Value]
    scratch: list[Memory]
    one_row: set[Memory]


def make_schedule(loop: RowLoop) -> Schedule:
    """make_schedule : RowLoop -> Schedule"""
    items: list[Product | Nest] = []
    place: dict[Value, int] = {}
    writers: dict[Memory, list[Operation]] = {}
    for op in loop.operations:
        if op.value.memory is not None:
            writers.setdefault(op.value.memory, []).append(op)

    def ready(read: Read, shape: tuple[int, ...] | None) -> int:
        """The first item that can read this: that of its making if it passes in a register."""
        if isinstance(read.source, Memory):
            return 0
        at = [place[read.source]] if read.source in place else []
        if not at:  # a join: all of its pieces
            assert read.source.memory is not None
            return 1 + max(place[op.value] for op in writers[read.source.memory])
        return at[0] if _in_register(read, shape, items[at[0]]) else at[0] + 1

    for op in loop.operations:
        if isinstance(op, Product):
            items.append(op)
            place[op.value] = len(items) - 1
            continue
        shape = op.value.shape if isinstance(op, Map) else op.shape
        outer = op.outer if isinstance(op, Reduce) else None
        first = max((ready(read, shape) for read in reads(op.expression)), default=0)
        for i in range(first, len(items)):
            item = items[i]
            fits = outer is None or (isinstance(item, Nest) and item.outer in (None, outer))
            if isinstance(item, Nest) and item.shape == shape and fits:
                break
        else:
            items.append(Nest(shape))
            i = len(items) - 1
        nest = items[i]
        assert isinstance(nest, Nest)
        nest.operations.append(op)
        nest.outer = outer if outer is not None else nest.outer
        place[op.value] = i

    kept = _kept(loop, items, place)
    stages: list[Product | list[Nest]] = []
    stage_of: list[int] = []
    for item in items:
        if isinstance(item, Product):
            stages.append(item)
        elif stages and isinstance(stages[-1], list):
            stages[-1].append(item)
        else:
            stages.append([item])
        stage_of.append(len(stages) - 1)
    return _with_scratch(loop, stages, kept, {v: stage_of[i] for v, i in place.items()})


def _in_register(read: Read, shape: tuple[int, ...] | None, item: Product | Nest) -> bool:
    """Whether a loop over ``shape`` reads what the same turn of it has just computed."""
    value = read.source
    if not (isinstance(value, Value) and isinstance(item, Nest) and item.shape == shape):
        return False
    if any(op.value is value and isinstance(op, Reduce) for op in item.operations):
        return False
    return value.shape == shape and not read.offset and read.strides == contiguous(value.shape)


def _kept(loop: RowLoop, items: list[Product | Nest], place: dict[Value, int]) -> set[Value]:
    kept = {op.value for op in loop.operations if op.value.memory is not None}
    for op in loop.operations:
        if isinstance(op, (Product, Reduce)):
            kept.add(op.value)
        shape = None if isinstance(op, Product) else op.value.shape
        if isinstance(op, Reduce):
            shape = op.shape
        for read in [op.row] if isinstance(op, Product) else reads(op.expression):
            if isinstance(read.source, Value) and read.source in place:
                item = items[place[read.source]]
                same = place[read.source] == place[op.value]
                if not (same and _in_register(read, shape, item)):
                    kept.add(read.source)
    return kept


def _with_scratch(
    loop: RowLoop,
    stages: list[Product | list[Nest]],
    kept: set[Value],
    stage_of: dict[Value, int],
) -> Schedule:
    """Gives the values without a place one of their own."""
    every_row = (0, len(loop.rows.dims))
    for op in loop.operations:
        if op.value in kept and op.value.memory is None:
            pattern = RowPattern(every_row, op.value.size)
            op.value.memory = Memory("scratch", -1, op.value.dtype, op.value.size, pattern)
    scratch: list[Memory] = []
    touched: dict[Memory, set[int]] = {}
    for op in loop.operations:
        used = [op.value.memory] if op.value.memory is not None else []
        for read in [op.row] if isinstance(op, Product) else reads(op.expression):
            if isinstance(read.source, Value) and read.source.memory is not None:
                used.append(read.source.memory)
        for memory in used:
            if memory.kind == "scratch":
                touched.setdefault(memory, set()).add(stage_of[op.value])
                if memory not in scratch:
                    memory.index = len(scratch)
                    scratch.append(memory)
    one_row = {
        memory
        for memory, at in touched.items()
        if len(at) == 1 and isinstance(stages[next(iter(at))], list)
    }
    return Schedule(stages, kept, scratch, one_row)
