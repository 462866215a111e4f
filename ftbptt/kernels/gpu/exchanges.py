"""Fewer exchanges between the programs that share a tile of rows.

A reduction needs all columns of what it reads, but a program has only some of them. Where all
columns can be computed from what the programs exchange anyway, each computes them for itself: a
variance that reads what its mean has read already costs no exchange of the deviations.
"""

from __future__ import annotations

from dataclasses import replace

from ..expressions import Apply, Expression, Literal, cast, parts
from ..rowloop import (
    Map,
    Memory,
    Operation,
    Product,
    Read,
    Reduce,
    RowLoop,
    Value,
    is_same_index,
    reads,
    reads_of,
    with_reads,
)
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
            op = replace(op, expression=_computed(op, maps, tiles, exchanged))
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
        if expr.source not in maps or not is_same_index(expr, op.shape):
            return None
        inner = again(maps[expr.source].expression)
        return None if inner is None else cast(inner, expr.dtype)

    def computed(read: Read) -> Expression:
        found = again(read)
        operations = sum(isinstance(part, Apply) for part in parts(found))
        return read if found is None or operations > _MOST_OPERATIONS else found

    return with_reads(op.expression, computed)


def _used(operations: list[Operation]) -> list[Operation]:
    """Without the maps whose value nothing reads any longer."""
    found: list[Operation] = []
    read: set[Value | Memory | None] = set()
    for op in reversed(operations):
        value, memory = op.value, op.value.memory
        is_written = memory is not None and (memory.kind != "scratch" or memory in read)
        if isinstance(op, Map) and not is_written and value not in read:
            continue
        found.append(op)
        for r in reads_of(op):
            read |= {r.source, r.memory}
    return found[::-1]
