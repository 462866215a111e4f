"""A scan block -> its row loop: the block's graph, gone through once for one row of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compiler.distribute import ScanBlock
from ..compiler.graphs import VIEWS, Node, aten, value_of
from .accesses import RowPattern, RowView, contiguous
from .expressions import (
    Expression,
    Unsupported,
    cast,
    constant,
    expression,
    is_constant,
    is_elementwise,
    refuse,
)
from .normalize import normalize
from .rowloop import Map, Memory, Operation, Product, Read, Reduce, RowLoop, Value, compute_dtype

_REDUCTIONS = {
    aten.sum.dim_IntList: "sum", aten.sum.default: "sum", aten.amax.default: "maximum",
    aten.amin.default: "minimum", aten.prod.dim_int: "product",
}  # fmt: skip


def make_row_loop(block: ScanBlock, *, least_features: int = 1) -> RowLoop:
    """make_row_loop : ScanBlock -> RowLoop

    As many axes of the carries are rows as can be, but for ``least_features``. Raises Unsupported,
    which names the node, for a block that no kernel can be made of.
    """
    shapes = [tuple(value_of(node).shape) for node in block.carries]
    shared = 0
    while all(len(s) > shared and s[shared] == shapes[0][shared] for s in shapes):
        shared += 1
    most = max(min(shared, max(map(len, shapes)) - least_features), 0)
    error: Unsupported | None = None
    for rank in range(most, -1, -1):
        try:
            return _Builder(block, RowView(shapes[0][:rank])).build()
        except Unsupported as found:
            # With as few row axes as possible, it is the operation that stands in the way.
            error = found if error is None or rank > 0 else error
    assert error is not None
    raise error


class _Builder:
    """Goes through the graph once, with the leading axes of the carries as the rows."""

    def __init__(self, block: ScanBlock, rows: RowView) -> None:
        self.block, self.rows = block, rows
        self.graph = normalize(block.module, self._has_rows)
        self.values: dict[Node, Value] = {}
        self.places: list[Value] = []
        self.memories: dict[Node, Memory] = {}
        self.operations: list[Operation] = []
        placeholders = self.graph.find_nodes(op="placeholder")
        n_inv, n_seq = len(block.invariants), len(block.sequences)
        self.invariants = {node: i for i, node in enumerate(placeholders[:n_inv])}
        self.sequences = {node: i for i, node in enumerate(placeholders[n_inv : n_inv + n_seq])}
        self.carries = placeholders[n_inv + n_seq :]
        self.loop = RowLoop(rows, self.operations, {}, {}, [], [], [])
        for i, node in enumerate(self.carries):
            self.memories[node] = self._own_memory("carry", i, node)
            self.loop.carries.append(self.memories[node])

    def _has_rows(self, node: Node) -> bool:
        try:
            self.rows.rank(node)
        except Unsupported:
            return False
        return True

    def _own_memory(self, kind: str, index: int, node: Node) -> Memory:
        size = self.rows.size(node)
        pattern = RowPattern((0, len(self.rows.dims)), size)
        return Memory(kind, index, value_of(node).dtype, size, pattern)

    def build(self) -> RowLoop:
        outputs = list(self.graph.output_node().args[0])
        n_carries, n_totals = len(self.carries), len(self.block.totals)
        outputs, totals = outputs[: len(outputs) - n_totals], outputs[len(outputs) - n_totals :]
        for node in self.graph.nodes:
            if node in totals:
                continue
            if node.op != "call_function" or is_constant(node) or node.target in VIEWS:
                continue
            if is_elementwise(node):
                if self._has_rows(node):
                    self._map(node)
            elif node.target in _REDUCTIONS:
                self._reduce(node)
            elif node.target in (aten.mm.default, aten.bmm.default):
                self._product(node)
            elif node.target is aten.cat.default:
                self._join(node)
            else:
                raise refuse(node, "no kernel is known for it")
        for i, node in enumerate(totals):
            self._total(node, i)
        for i, node in enumerate(outputs):
            kind, index = ("next", i) if i < n_carries else ("emit", i - n_carries)
            self._store(node, kind, index)
        return self.loop

    # -- operations -----------------------------------------------------------------------------

    def _value(self, node: Node) -> Value:
        value = self._new_value(node.name, value_of(node).dtype, self.rows.features(node))
        self.values[node] = value
        return value

    def _new_value(self, name: str, dtype: torch.dtype, features: Sequence[int]) -> Value:
        shape = tuple(n for n in features if n != 1)
        value = Value(name, dtype, shape, contiguous(shape))
        self.places.append(value)
        return value

    def _map(self, node: Node) -> None:
        found = self._leaves(node, list(value_of(node).shape), self.rows.rank(node))
        self.operations.append(Map(self._value(node), found))

    def _leaves(self, node: Node, shape: list[int], rank: int) -> Expression:
        """The node's expression; values that not every row has of its own are computed in it."""

        def leaf(arg: Node) -> Expression:
            base = self.rows.strided(arg).base
            if base is arg and is_elementwise(arg) and arg not in self.values:
                return self._leaves(arg, shape, rank)
            return self._leaf(arg, shape, rank)

        return expression(node, leaf)

    def _leaf(self, node: Node, shape: list[int], rank: int) -> Expression:
        base = self.rows.strided(node).base
        return constant(base) if is_constant(base) else self._read(node, shape, rank)

    def _read(self, node: Node, shape: list[int], rank: int) -> Read:
        """The node as it is read at an index of ``shape``."""
        base = self.rows.strided(node).base
        source: Value | Memory
        if base in self.values or base in self.carries:
            seen = self.rows.features_of(node, shape, rank)
            source = self.values[base] if base in self.values else self.memories[base]
        elif base in self.invariants or base in self.sequences:
            seen, pattern = self.rows.input_of(node, shape, rank)
            source = self._input(base, pattern)
        else:
            raise refuse(base, "not a value of each row")
        strides = tuple(s for s, n in zip(seen.strides, shape[rank:], strict=True) if n != 1)
        return Read(source, seen.offset, strides, value_of(node).dtype)

    def _input(self, base: Node, pattern: RowPattern) -> Memory:
        kind, numbers, found = "invariant", self.invariants, self.loop.invariants
        if base in self.sequences:
            kind, numbers, found = "sequence", self.sequences, self.loop.sequences
        index = numbers[base]
        memory = found.setdefault(
            index, Memory(kind, index, value_of(base).dtype, value_of(base).numel(), pattern)
        )
        if memory.pattern != pattern:
            raise refuse(base, "read by row in two ways")
        return memory

    def _reduce(self, node: Node) -> None:
        kind, source = _REDUCTIONS[node.target], node.args[0]
        dtype, value = value_of(node).dtype, value_of(source)
        if not value.dtype.is_floating_point or dtype != value.dtype:
            raise refuse(node, "a reduction of other than floating point numbers")
        rank, axes = self.rows.rank(source), list(range(value.dim()))
        given = node.args[1] if len(node.args) > 1 else []
        reduced = [d % value.dim() for d in ([given] if isinstance(given, int) else given)] or axes
        if any(d < rank and value.shape[d] != 1 for d in reduced):
            raise refuse(node, "it mixes rows of the batch")
        kept = [d for d in axes[rank:] if d not in reduced]
        order = [*kept, *(d for d in axes[rank:] if d in reduced)]
        read = self._read(source, list(value.shape), rank)
        outer = sum(value.shape[d] != 1 for d in kept)
        strides = dict(zip(_wide(value.shape, rank), read.strides, strict=True))
        order = [d for d in order if value.shape[d] != 1]
        read = Read(read.source, read.offset, tuple(strides[d] for d in order), read.dtype)
        if len(order) == outer:  # nothing to reduce
            self.operations.append(Map(self._value(node), read))
            return
        shape = tuple(value.shape[d] for d in order)
        self.operations.append(Reduce(self._value(node), kind, shape, outer, read))

    def _total(self, node: Node, index: int) -> None:
        """A sum over the rows, that is added up over the steps as well."""
        source, dims = node.args[:2]
        value = value_of(source)
        shape, rank = list(value.shape), self.rows.rank(source)
        if {d % len(shape) for d in dims} != set(range(rank)):
            raise refuse(node, "a sum over other axes than the rows")
        whole = self._new_value(f"total{index}", value_of(node).dtype, shape[rank:])
        whole.memory = Memory("total", index, whole.dtype, whole.size, RowPattern((0, 0), 0))
        self.loop.totals.append(whole.memory)
        self.operations.append(Map(whole, self._leaf(source, shape, rank)))

    def _product(self, node: Node) -> None:
        a, weight = node.args[:2]
        if weight not in self.invariants:
            raise refuse(node, "a product with something that is not the same at every step")
        value = value_of(node)
        if not value.dtype.is_floating_point:
            raise refuse(node, "a product of other than floating point numbers")
        shape, rank = list(value_of(a).shape), self.rows.rank(a)
        k, n = shape[-1], value.shape[-1]
        if math.prod(shape[:-1]) != self.rows.total:
            raise refuse(node, "a product of several rows for each row of the batch")
        # As many row axes in front as there are weights.
        shared = node.target is aten.mm.default or value_of(weight).stride(0) == 0
        grouped = 0 if shared else self.rows.axis(shape[0], node)
        read = self._read(a, shape, rank)
        strides = read.strides if k != 1 else (1,)
        if strides != (1,) or not _is_operand(read, self.rows):
            read = self._copied(a, shape, rank)
        index = self.invariants[weight]
        self.loop.weight_dtypes[index] = value_of(weight).dtype
        self.operations.append(Product(self._value(node), read, index, k, n, grouped))

    def _copied(self, node: Node, shape: list[int], rank: int) -> Read:
        """The node's elements in order, in memory of its own."""
        read = self._read(node, shape, rank)
        name = f"{node.name}_copy{len(self.operations)}"
        value = self._new_value(name, read.dtype, shape[rank:])
        self.operations.append(Map(value, read))
        return Read(value, 0, contiguous(value.shape), read.dtype)

    def _join(self, node: Node) -> None:
        """``cat``: a value whose pieces are written straight into their places."""
        pieces = [p for p in node.args[0] if value_of(p).numel()]
        shape, rank = value_of(node).shape, self.rows.rank(node)
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
        if dim < rank:
            raise refuse(node, "it joins rows of the batch")
        whole = self._value(node)
        pattern = RowPattern((0, len(self.rows.dims)), whole.size)
        whole.memory = Memory("scratch", -1, whole.dtype, whole.size, pattern)
        strides, offset = contiguous(shape[rank:]), 0
        for piece in pieces:
            features = value_of(piece).shape[rank:]
            value = self._whole_of(piece) if math.prod(features[: dim - rank]) == 1 else None
            if value is None or value.memory is not None or value.dtype != whole.dtype:
                read = cast(self._leaf(piece, list(value_of(piece).shape), rank), whole.dtype)
                value = self._new_value(f"{node.name}_at{offset}", whole.dtype, features)
                value.strides = tuple(s for s, n in zip(strides, features, strict=True) if n != 1)
                self.operations.append(Map(value, read))
            value.memory, value.offset = whole.memory, offset
            offset += features[dim - rank] * strides[dim - rank]

    def _whole_of(self, node: Node) -> Value | None:
        """The computed value that the node is all of, in order, if there is one."""
        seen = self.rows.strided(node)
        value, own = self.values.get(seen.base), value_of(node).shape
        if value is None or seen.offset or self.rows.size(node) != value.size:
            return None
        strides = [s for s, n in zip(seen.strides, own, strict=True) if n != 1]
        ordered = [s for s, n in zip(contiguous(own), own, strict=True) if n != 1]
        return value if strides == ordered else None

    def _store(self, node: Node, kind: str, index: int) -> None:
        """Makes the value of ``node`` end in the memory of an output."""
        memory = self._own_memory(kind, index, node)
        (self.loop.nexts if kind == "next" else self.loop.emits).append(memory)
        value = None
        if memory.dtype == compute_dtype(memory.dtype):
            value = self._whole_of(node)
        if value is not None and value.memory is not None:
            if value.memory.kind == "scratch" and value.memory.size == value.size:
                for other in self.places:  # a join that is an output: its pieces go there
                    if other.memory is value.memory and other is not value:
                        other.memory = memory
                value.memory = memory
                return
            value = None
        if value is None:
            shape, rank = list(value_of(node).shape), self.rows.rank(node)
            value = self._new_value(f"{kind}_{index}", memory.dtype, shape[rank:])
            self.operations.append(Map(value, self._leaf(node, shape, rank)))
        value.memory = memory


def _wide(shape: Any, rank: int) -> Iterator[int]:
    """The axes behind the rows that have more than one element."""
    return (d for d in range(rank, len(shape)) if shape[d] != 1)


def _is_operand(read: Read, rows: RowView) -> bool:
    """Whether a product can read its rows where they are."""
    if isinstance(read.source, Value):
        return True
    own = read.source.pattern.own == (0, len(rows.dims))
    return own and read.dtype == compute_dtype(read.dtype)
