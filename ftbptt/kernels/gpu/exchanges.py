"""Fewer exchanges between the programs that share a tile of rows.

A reduction needs all columns of what it reads, but a program has only some of them. Where all
columns can be computed from what the programs exchange anyway, each computes them for itself: a
variance that reads what its mean has read already costs no exchange of the deviations.
"""

from __future__ import annotations

from dataclasses import replace

from ..accesses import contiguous
from ..expressions import Apply, Expression, Literal, cast
from ..rowloop import Map, Memory, Operation, Product, Read, Reduce, RowLoop, Value, reads
from .placement import Tiles, make_tiles

# Operations that a program computes again for all columns, rather than wait for the others.
_MOST_OPERATIONS = 8


def with_fewer_exchanges(loop: RowLoop) -> RowLoop:
    """with_fewer_exchanges : RowLoop -> RowLoop of the same meaning

    What its reductions read is computed in them, where that saves an exchange.
    """
    tiles = make_tiles(loop, 2)  # what each of two programs has whole, each of more has
    maps = {op.value: op for op in loop.operations if isinstance(op, Map)}
    exchanged = _exchanged(loop, tiles)
    operations: list[Operation] = []
    for op in loop.operations:
        if isinstance(op, Reduce):
            op = replace(op, expression=_computed(op.expression, op, maps, tiles, exchanged))
            exchanged |= {read.source for read in reads(op.expression)}
        operations.append(op)
    return replace(loop, operations=_used(operations))


def _exchanged(loop: RowLoop, tiles: Tiles) -> set[Value | Memory]:
    """What others than reductions read of columns that a program lacks."""
    found: set[Value | Memory] = set()
    for op in loop.operations:
        if isinstance(op, Product):
            found.add(op.row.source)
        elif isinstance(op, Map):
            space = tiles.space_of(op)
            found |= {r.source for r in reads(op.expression) if not tiles.in_register(r, space)}
    return found


def _computed(
    expr: Expression,
    op: Reduce,
    maps: dict[Value, Map],
    tiles: Tiles,
    exchanged: set[Value | Memory],
) -> Expression:
    """What a reduction reads, computed from what every program has, where that is possible."""

    def is_at_hand(read: Read) -> bool:
        source = read.source
        if isinstance(source, Memory) and source.kind in ("invariant", "sequence"):
            return True
        is_whole = isinstance(source, Value) and tiles.space_of_value(source).parts == 1
        return is_whole or source in exchanged

    def again(expr: Expression) -> Expression | None:
        if isinstance(expr, Literal):
            return expr
        if isinstance(expr, Apply):
            args = [again(arg) for arg in expr.args]
            return None if None in args else replace(expr, args=tuple(args))
        if is_at_hand(expr):
            return expr
        is_same_index = expr.offset == 0 and expr.strides == contiguous(op.shape)
        if expr.source not in maps or not is_same_index or expr.source.shape != op.shape:
            return None
        inner = again(maps[expr.source].expression)
        return None if inner is None else cast(inner, expr.dtype)

    if isinstance(expr, Apply):
        return replace(
            expr, args=tuple(_computed(arg, op, maps, tiles, exchanged) for arg in expr.args)
        )
    found = again(expr) if isinstance(expr, Read) else None
    return expr if found is None or _operations(found) > _MOST_OPERATIONS else found


def _operations(expr: Expression) -> int:
    return 1 + sum(map(_operations, expr.args)) if isinstance(expr, Apply) else 0


def _used(operations: list[Operation]) -> list[Operation]:
    """Without the maps whose value nothing reads any longer."""
    found: list[Operation] = []
    read: set[Value | Memory] = set()
    for op in reversed(operations):
        value, memory = op.value, op.value.memory
        is_written = memory is not None and (memory.kind != "scratch" or memory in read)
        if isinstance(op, Map) and not is_written and value not in read:
            continue
        found.append(op)
        sources = [op.row] if isinstance(op, Product) else reads(op.expression)
        for source in (r.source for r in sources):
            read.add(source)
            if isinstance(source, Value) and source.memory is not None:
                read.add(source.memory)
    return found[::-1]
