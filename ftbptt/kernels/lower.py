"""A scan block -> its row loop: one pass over the block's graph, for one row of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..compiler.blocks import ScanBlock
from ..compiler.graphs import VIEWS, Node, aten, join_axis, value_of
from .accesses import RowPattern, RowView, contiguous
from .expressions import (
    REDUCTIONS,
    Expression,
    Unsupported,
    cast,
    constant,
    expression,
    is_constant,
    is_elementwise,
    reduced_axes,
    refuse,
)
from .normalize import normalize
from .rowloop import (
    Map,
    Memory,
    Operation,
    Product,
    Read,
    Reduce,
    RowLoop,
    Value,
    compute_dtype,
    scratch_for,
    with_reads,
)

# Rows of fewer numbers leave the vectors of CPUs partly empty, unless fewer rows than these remain.
_LEAST_NUMBERS, _LEAST_ROWS = 32, 8


def make_row_loop(block: ScanBlock, *, on_gpu: bool = False) -> RowLoop:
    """make_row_loop : ScanBlock -> RowLoop

    As many leading axes of the carries as possible become rows, but not the last one, nor any that
    would leave a row few numbers. ``on_gpu``: also those, and an axis of heads, each of which has a
    weight of its own; and loads and stores convert to and from the dtype that is computed in.
    Raises Unsupported, which names the node, if no kernel can be generated.
    """
    shapes = [tuple(value_of(node).shape) for node in block.carries]
    shared = 0
    while all(len(s) > shared and s[shared] == shapes[0][shared] for s in shapes):
        shared += 1
    most = max(min(shared, max(map(len, shapes)) - (not on_gpu)), 0)
    error: Unsupported | None = None
    for rank in range(most, -1, -1):
        try:
            loop = _Builder(block, RowView(shapes[0][:rank]), on_gpu).build()
            return loop if on_gpu else _with_long_rows(block, loop)
        except Unsupported as reason:
            # The reason to report is that of the smallest rank above 0: rank 0, all of the batch
            # as one row, is refused for other reasons.
            error = reason if error is None or rank > 0 else error
    assert error is not None
    raise error


def _with_long_rows(block: ScanBlock, loop: RowLoop) -> RowLoop:
    """The loop with the last row axes as features, where that fills the vectors of few numbers.

    Not where products take rows, nor where few rows would be left for the threads.
    """
    axes = loop.rows.shape[:-1]
    numbers = max(memory.size for memory in loop.carries)
    if loop.products or numbers >= _LEAST_NUMBERS or math.prod(axes) < _LEAST_ROWS:
        return loop
    try:
        return _with_long_rows(block, _Builder(block, RowView(axes), on_gpu=False).build())
    except Unsupported:
        return loop


class _Builder:
    """Builds the loop in one pass over the graph, given which axes are the rows."""

    def __init__(self, block: ScanBlock, rows: RowView, on_gpu: bool) -> None:
        self.block, self.rows, self.on_gpu = block, rows, on_gpu
        normal = normalize(block, rows, heads_are_rows=on_gpu)
        self.graph = normal.graph
        self.values: dict[Node, Value] = {}  # of the nodes
        self.all_values: list[Value] = []  # also copies, pieces of a cat, ...
        self.memories: dict[Node, Memory] = {}  # of the carries
        self.operations: list[Operation] = []
        placeholders = self.graph.find_nodes(op="placeholder")
        n_inv, n_seq = len(block.invariants), len(block.sequences)
        self.invariants = {node: i for i, node in enumerate(placeholders[:n_inv])}
        self.sequences = {node: i for i, node in enumerate(placeholders[n_inv : n_inv + n_seq])}
        self.carries = placeholders[n_inv + n_seq :]
        self.loop = RowLoop(
            rows, block.history, block.reverse, self.operations, {}, {}, [], [], [],
            normal.emit_layouts,
        )  # fmt: skip
        for i, node in enumerate(self.carries):
            self.memories[node] = self._memory("carry", i, node)
            self.loop.carries.append(self.memories[node])

    def _memory(self, kind: str, index: int, node: Node) -> Memory:
        """A memory with a part per row, for the node's value."""
        size = self.rows.size(node)
        return Memory(kind, index, value_of(node).dtype, size, self.rows.part_each(size))

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
                if self.rows.has_rows(node) and not _is_only_reduced(node):
                    self._map(node)
            elif node.target in REDUCTIONS:
                self._reduce(node)
            elif node.target in (aten.mm.default, aten.bmm.default):
                self._product(node)
            elif node.target is aten.cat.default:
                self._cat(node)
            else:
                raise refuse(node, "kernels do not support this operation")
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
        self.all_values.append(value)
        return value

    def _map(self, node: Node) -> None:
        value = self._expression(node, list(value_of(node).shape), self.rows.rank(node))
        self.operations.append(Map(self._value(node), value))

    def _expression(self, node: Node, shape: list[int], rank: int) -> Expression:
        """The node's expression. Elementwise values that rows share are computed inside of it."""

        def leaf(arg: Node) -> Expression:
            base = self.rows.strided(arg).base
            if base is arg and is_elementwise(arg) and arg not in self.values:
                return self._expression(arg, shape, rank)
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
            access = self.rows.features_of(node, shape, rank)
            source = self.values[base] if base in self.values else self.memories[base]
        elif base in self.invariants or base in self.sequences:
            access, pattern = self.rows.input_of(node, shape, rank)
            source = self._input(base, pattern)
        else:
            raise refuse(base, "it has no value for each row")
        strides = tuple(s for s, n in zip(access.strides, shape[rank:], strict=True) if n != 1)
        return Read(source, access.offset, strides, value_of(node).dtype)

    def _input(self, base: Node, pattern: RowPattern) -> Memory:
        """The memory of an input, of which all reads must have the same pattern."""
        kind, indices, memories = "invariant", self.invariants, self.loop.invariants
        if base in self.sequences:
            kind, indices, memories = "sequence", self.sequences, self.loop.sequences
        index = indices[base]
        memory = memories.setdefault(
            index, Memory(kind, index, value_of(base).dtype, value_of(base).numel(), pattern)
        )
        if memory.pattern != pattern:
            raise refuse(base, "it is read by row in two different ways")
        return memory

    def _reduce(self, node: Node) -> None:
        kind, source = REDUCTIONS[node.target], node.args[0]
        dtype, value = value_of(node).dtype, value_of(source)
        if not value.dtype.is_floating_point or dtype != value.dtype:
            raise refuse(node, "a reduction of numbers that are not floating point")
        shape, rank = list(value.shape), self.rows.rank(source)
        reduced = reduced_axes(node)
        if any(d < rank and value.shape[d] != 1 for d in reduced):
            raise refuse(node, "it mixes rows of the batch")
        # The axes that are not reduced come first; axes of one element are left out.
        features = [d for d in range(rank, value.dim()) if value.shape[d] != 1]
        outer = [d for d in features if d not in reduced]
        order = [*outer, *(d for d in features if d in reduced)]
        reduced_value = self._reduced_value(source, shape, rank)
        expression = _with_axes(reduced_value, [features.index(d) for d in order])
        if len(order) == len(outer):  # nothing to reduce
            self.operations.append(Map(self._value(node), expression))
            return
        extents = tuple(value.shape[d] for d in order)
        self.operations.append(Reduce(self._value(node), kind, extents, len(outer), expression))

    def _reduced_value(self, node: Node, shape: list[int], rank: int) -> Expression:
        """What a reduction reads: computed on the way if nothing else reads it."""
        if _is_only_reduced(node):
            return self._expression(node, shape, rank)
        return self._leaf(node, shape, rank)

    def _total(self, node: Node, index: int) -> None:
        """A sum over the rows, which the kernel accumulates over the steps as well."""
        source = node.args[0]
        shape, rank = list(value_of(source).shape), self.rows.rank(source)
        if set(reduced_axes(node)) != set(range(rank)):
            raise refuse(node, "a sum over axes other than the rows")
        total = self._new_value(f"total{index}", value_of(node).dtype, shape[rank:])
        total.memory = Memory("total", index, total.dtype, total.size, RowPattern((0, 0), 0))
        self.loop.totals.append(total.memory)
        self.operations.append(Map(total, self._reduced_value(source, shape, rank)))

    def _product(self, node: Node) -> None:
        a, weight = node.args[:2]
        if weight not in self.invariants:
            raise refuse(node, "a product whose second operand changes with the step")
        value = value_of(node)
        if not (value.dtype.is_floating_point or value.dtype.is_complex):
            raise refuse(node, "a product of numbers that are not floating point")
        shape, rank = list(value_of(a).shape), self.rows.rank(a)
        if rank == len(shape):
            raise refuse(node, "a product over the rows of the batch")
        vectors, k, n = math.prod(shape[rank:-1]), shape[-1], value.shape[-1]
        # A batch of weights is one for each of the leading row axes, or for each vector of a row
        # or each of the last row axes, or for each of both.
        is_batch = node.target is aten.bmm.default and value_of(weight).stride(0) != 0
        by_vector = is_batch and node.meta.get("by_vector", rank == 0)
        grouped, trailing = 0, node.meta.get("trailing", 0) if is_batch else 0
        if is_batch:
            others = max(vectors, 1) if by_vector else math.prod(self.rows.last(trailing))
            groups, rest = divmod(value_of(weight).shape[0], others)
            if rest:
                raise refuse(node, "several vectors of a row share each weight of a batch")
            grouped = self.rows.axis(groups, node)
        read = self._read(a, shape, rank)
        features = [size for size in (vectors, k) if size != 1]
        if read.strides != contiguous(features) or not self._is_operand(read):
            read = self._copied(a, shape, rank)
        index = self.invariants[weight]
        transposed = node.meta.get("transposed", False)
        if index in self.loop.weight_dtypes and transposed != (index in self.loop.transposed):
            raise refuse(node, "a weight that is multiplied with from both sides")
        self.loop.weight_dtypes[index] = value_of(weight).dtype
        if transposed:
            self.loop.transposed.add(index)
        self.operations.append(
            Product(self._value(node), read, index, vectors, k, n, grouped, by_vector, trailing)
        )

    def _is_operand(self, read: Read) -> bool:
        """Whether a product can read its rows in place: one per row, and not to be converted."""
        if isinstance(read.source, Value):
            return True
        is_per_row = read.source.pattern.axes == (0, len(self.rows.dims))
        return is_per_row and (self.on_gpu or read.dtype == compute_dtype(read.dtype))

    def _copied(self, node: Node, shape: list[int], rank: int) -> Read:
        """The node copied to a contiguous value."""
        read = self._read(node, shape, rank)
        name = f"{node.name}_copy{len(self.operations)}"
        value = self._new_value(name, read.dtype, shape[rank:])
        self.operations.append(Map(value, read))
        return Read(value, 0, contiguous(value.shape), read.dtype)

    def _cat(self, node: Node) -> None:
        """``cat``: pieces that are written directly to their offsets in one memory."""
        shape, rank = value_of(node).shape, self.rows.rank(node)
        dim = join_axis(node)
        values = [(piece, value_of(piece)) for piece in node.args[0]]
        # torch also joins what is empty and has one axis only.
        pieces = [p for p, value in values if value.dim() == len(shape) and value.shape[dim]]
        if dim < rank:
            raise refuse(node, "it concatenates rows of the batch")
        result = self._value(node)
        result.memory = scratch_for(result, self.rows)
        strides, offset = contiguous(shape[rank:]), 0
        for piece in pieces:
            features = value_of(piece).shape[rank:]
            is_contiguous = math.prod(features[: dim - rank]) == 1
            value = self._same_value(piece) if is_contiguous else None
            if value is None or value.memory is not None or value.dtype != result.dtype:
                read = cast(self._leaf(piece, list(value_of(piece).shape), rank), result.dtype)
                value = self._new_value(f"{node.name}_at{offset}", result.dtype, features)
                value.strides = tuple(s for s, n in zip(strides, features, strict=True) if n != 1)
                self.operations.append(Map(value, read))
            value.memory, value.offset = result.memory, offset
            offset += features[dim - rank] * strides[dim - rank]

    def _same_value(self, node: Node) -> Value | None:
        """The computed value that has the node's elements in the same order, if there is one."""
        access, shape = self.rows.strided(node), value_of(node).shape
        value = self.values.get(access.base)
        if value is None or access.offset or self.rows.size(node) != value.size:
            return None
        strides = [s for s, n in zip(access.strides, shape, strict=True) if n != 1]
        expected = [s for s, n in zip(contiguous(shape), shape, strict=True) if n != 1]
        return value if strides == expected else None

    def _store(self, node: Node, kind: str, index: int) -> None:
        """Makes the kernel write the value of ``node`` to the memory of an output.

        The operation that computes it writes there if it can, otherwise a copy of the value.
        """
        memory = self._memory(kind, index, node)
        (self.loop.nexts if kind == "next" else self.loop.emits).append(memory)
        value = None
        if self.on_gpu or memory.dtype == compute_dtype(memory.dtype):
            value = self._same_value(node)
        if value is not None and value.memory is not None:
            if value.memory.kind == "scratch" and value.memory.size == value.size:
                for other in self.all_values:  # a cat that is an output: its pieces go there
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


def _is_only_reduced(node: Node) -> bool:
    """Whether the node is elementwise, and all that reads it is one reduction."""
    users = list(node.users)
    return is_elementwise(node) and len(users) == 1 and users[0].target in REDUCTIONS


def _with_axes(expr: Expression, order: Sequence[int]) -> Expression:
    """The expression over its axes in another order."""
    return with_reads(
        expr, lambda read: replace(read, strides=tuple(read.strides[i] for i in order))
    )
