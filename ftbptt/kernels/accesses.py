"""The nodes of a step as seen by one row of the batch: features, and strided reads of them.

The rows of a batch are independent inside a recurrence, so a kernel sees one row at a time. A
value is then its *features*: what is left of its shape after the row axes. A view computes nothing:
it is an offset and strides into the features of its base, which we find by applying the view to an
empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._compat.running import is_view_of
from ..compiler.graphs import VIEWS, Node, aten, value_of
from .expressions import Unsupported, refuse

_RESHAPES = {aten.reshape.default, aten.view.default}


@dataclass(frozen=True)
class Strided:
    """A node as a view of the memory of another: ``base[offset + sum(index * strides)]``."""

    base: Node
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class RowPattern:
    """Where a row's part of a tensor starts: ``row // after % count * unit`` elements in.

    The tensor varies along the row axes ``axes[0]`` to ``axes[1] - 1`` and is constant along the
    others. ``count`` is the product of the sizes of those axes and ``after`` that of the row axes
    after them; the sizes are known when the kernel runs. An empty range: all rows share one part.
    """

    axes: tuple[int, int]
    unit: int


class RowView:
    """The rows of a block (its leading axes), and what each node is for one row.

    ``shape``: the sizes of the row axes. ``dims``: the same without those of size 1.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.dims = tuple(n for n in shape if n != 1)
        self.total = math.prod(shape)
        self._strided: dict[Node, Strided] = {}

    def part_each(self, size: int) -> RowPattern:
        """Of a memory that has a part of so many elements for each row."""
        return RowPattern((0, len(self.dims)), size)

    def rank(self, node: Node) -> int:
        """The number of leading axes of the node's value that are row axes."""
        shape = value_of(node).shape
        for rank in range(len(shape) + 1):
            if math.prod(shape[:rank]) == self.total:
                return rank
        raise refuse(node, f"its shape {list(shape)} does not start with the rows of the batch")

    def has_rows(self, node: Node) -> bool:
        """Whether the node has a value per row."""
        try:
            self.rank(node)
        except Unsupported:
            return False
        return True

    def features(self, node: Node) -> tuple[int, ...]:
        return tuple(value_of(node).shape[self.rank(node) :])

    def size(self, node: Node) -> int:
        return math.prod(self.features(node))

    def strided(self, node: Node) -> Strided:
        """The node as a strided view of a computed value or an input."""
        if node not in self._strided:
            self._strided[node] = self._make_strided(node)
        return self._strided[node]

    def _make_strided(self, node: Node) -> Strided:
        shape = value_of(node).shape
        if node.op != "call_function" or node.target not in VIEWS:
            return Strided(node, 0, contiguous(shape))
        origin = before_reshape(node) if node.target in _RESHAPES else node.args[0]
        source, value = self.strided(origin), value_of(origin)
        memory = torch.empty(value_of(source.base).numel(), device="meta", dtype=value.dtype)
        before = memory.as_strided(value.shape, source.strides, source.offset)
        try:
            after = node.target(before, *node.args[1:], **node.kwargs)
        except RuntimeError:  # of aten.view, where a reshape would copy
            after = None
        if after is None or not is_view_of(after, memory):
            raise refuse(node, "a reshape that has to copy its data")
        return Strided(source.base, int(after.storage_offset()), tuple(after.stride()))

    def features_of(self, node: Node, shape: Sequence[int], rank: int) -> Strided:
        """One row of the node broadcast to ``shape``, whose first ``rank`` axes are the rows.

        The strides are those of the feature axes. The node's base must be a computed value or a
        carry, in which the features of each row are contiguous.
        """
        strides, source = self._broadcast(node, shape)
        size = self.size(source.base)
        by_row = self.part_each(size if self.dims else 0)
        if self._pattern(node, shape[:rank], strides[:rank]) != by_row:
            raise refuse(node, "it mixes rows of the batch")
        inner = strides[rank:]
        last = source.offset + sum((n - 1) * s for n, s in zip(shape[rank:], inner, strict=True))
        if last >= max(size, 1):
            raise refuse(node, "it reads another row of the batch")
        return Strided(source.base, source.offset, inner)

    def input_of(self, node: Node, shape: Sequence[int], rank: int) -> tuple[Strided, RowPattern]:
        """Like ``features_of``, for an input of the block, of which rows may share parts."""
        strides, source = self._broadcast(node, shape)
        pattern = self._pattern(node, shape[:rank], strides[:rank])
        return Strided(source.base, source.offset, strides[rank:]), pattern

    def _broadcast(self, node: Node, shape: Sequence[int]) -> tuple[tuple[int, ...], Strided]:
        """(the strides of the node expanded to ``shape``, the node itself)"""
        source, node_shape = self.strided(node), value_of(node).shape
        strides = [0] * (len(shape) - len(node_shape))
        expanded = shape[len(strides) :]
        for size, target, stride in zip(node_shape, expanded, source.strides, strict=True):
            strides.append(0 if size == 1 and target != 1 else stride)
        return tuple(strides), source

    def _pattern(self, node: Node, sizes: Sequence[int], strides: Sequence[int]) -> RowPattern:
        """How the row axes of a view lie in memory, in terms of the block's row axes."""
        moving = [(i, s) for i, s in enumerate(strides) if sizes[i] != 1 and s != 0]
        if not moving:
            return RowPattern((0, 0), 0)
        first, last = moving[0][0], moving[-1][0]
        unit = expected = strides[last]
        for i in range(last, first - 1, -1):
            if sizes[i] != 1 and strides[i] != expected:
                raise refuse(node, "its rows are not evenly spaced in memory")
            expected *= sizes[i]
        start = self.axis(math.prod(sizes[:first]), node)
        stop = self.axis(math.prod(sizes[: last + 1]), node)
        return RowPattern((start, stop), unit)

    def last(self, axes: int) -> tuple[int, ...]:
        """The sizes of so many of the last row axes."""
        return self.dims[len(self.dims) - axes :]

    def axis(self, rows: int, node: Node) -> int:
        """The row axis before which the sizes of the row axes multiply to ``rows``."""
        for axis in range(len(self.dims) + 1):
            if math.prod(self.dims[:axis]) == rows:
                return axis
        raise refuse(node, "it splits the rows of the batch differently from the carries")


def before_reshape(node: Node) -> Node:
    """What a value was reshaped from: axes that are joined need not lie side by side in memory."""
    while node.target in _RESHAPES:
        node = node.args[0]
    return node


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
