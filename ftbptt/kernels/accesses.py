"""What a node of a step is for one row of the batch, and how one value reads another.

The rows of a batch never meet inside a recurrence, so a kernel sees one row at a time: a value is
its *features*, what is left of its shape behind the rows. A view computes nothing; it is an offset
and strides into the features of the value it looks at, found by doing the view on an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._compat import is_view_of
from ..compiler.graphs import VIEWS, Node, value_of
from .expressions import refuse


@dataclass(frozen=True)
class Strided:
    """A node as a view of the memory of another: ``base[offset + sum(index * strides)]``."""

    base: Node
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class RowPattern:
    """Where a row finds its part of a tensor: at ``row // after % count * unit`` elements.

    ``after`` and ``count`` are ranges of the row axes, whose sizes are known when the kernel runs:
    the axes behind the part's own, and its own. No axes of its own: the same for all rows.
    """

    own: tuple[int, int]
    unit: int


class RowView:
    """The rows of a block: its leading axes ``dims``, and what each node is for one of them."""

    def __init__(self, dims: Sequence[int]) -> None:
        self.dims = tuple(n for n in dims if n != 1)
        self.total = math.prod(dims)
        self._strided: dict[Node, Strided] = {}

    def rank(self, node: Node) -> int:
        """How many leading axes of the node's value are the rows."""
        shape = value_of(node).shape
        for rank in range(len(shape) + 1):
            if math.prod(shape[:rank]) == self.total:
                return rank
        raise refuse(node, f"its value of shape {list(shape)} has no row for each of the batch")

    def features(self, node: Node) -> tuple[int, ...]:
        return tuple(value_of(node).shape[self.rank(node) :])

    def size(self, node: Node) -> int:
        return math.prod(self.features(node))

    def strided(self, node: Node) -> Strided:
        """The node as a strided view of something computed, or of an input."""
        if node not in self._strided:
            self._strided[node] = self._make_strided(node)
        return self._strided[node]

    def _make_strided(self, node: Node) -> Strided:
        shape = value_of(node).shape
        if node.op != "call_function" or node.target not in VIEWS:
            return Strided(node, 0, contiguous(shape))
        seen = self.strided(node.args[0])
        source = value_of(node.args[0])
        memory = torch.empty(value_of(seen.base).numel(), device="meta", dtype=source.dtype)
        before = memory.as_strided(source.shape, seen.strides, seen.offset)
        after = node.target(before, *node.args[1:], **node.kwargs)
        if not is_view_of(after, memory):
            raise refuse(node, "a reshape that has to move its data")
        return Strided(seen.base, int(after.storage_offset()), tuple(after.stride()))

    def features_of(self, node: Node, shape: Sequence[int], rank: int) -> Strided:
        """The node broadcast to ``shape``, whose first ``rank`` axes are the rows, for one row.

        The strides are those of the axes behind. The node's base is a computed value or a carry,
        which has each row's features in one piece.
        """
        strides, seen = self._broadcast(node, shape)
        size = self.size(seen.base)
        whole = RowPattern((0, len(self.dims)), size if self.dims else 0)
        if self._pattern(node, shape[:rank], strides[:rank]) != whole:
            raise refuse(node, "it mixes rows of the batch")
        inner = strides[rank:]
        last = seen.offset + sum((n - 1) * s for n, s in zip(shape[rank:], inner, strict=True))
        if last >= max(size, 1):
            raise refuse(node, "it reads another row of the batch")
        return Strided(seen.base, seen.offset, inner)

    def input_of(self, node: Node, shape: Sequence[int], rank: int) -> tuple[Strided, RowPattern]:
        """As ``features_of`` for an input of the block, which a row may share with others."""
        strides, seen = self._broadcast(node, shape)
        pattern = self._pattern(node, shape[:rank], strides[:rank])
        return Strided(seen.base, seen.offset, strides[rank:]), pattern

    def _broadcast(self, node: Node, shape: Sequence[int]) -> tuple[tuple[int, ...], Strided]:
        seen, own = self.strided(node), value_of(node).shape
        strides = [0] * (len(shape) - len(own))
        for size, wanted, stride in zip(own, shape[len(strides) :], seen.strides, strict=True):
            strides.append(0 if size == 1 and wanted != 1 else stride)
        return tuple(strides), seen

    def _pattern(self, node: Node, sizes: Sequence[int], strides: Sequence[int]) -> RowPattern:
        """How the row axes of a view lie in memory, in terms of the block's own row axes."""
        moving = [(i, s) for i, s in enumerate(strides) if sizes[i] != 1 and s != 0]
        if not moving:
            return RowPattern((0, 0), 0)
        first, last = moving[0][0], moving[-1][0]
        unit = expected = strides[last]
        for i in range(last, first - 1, -1):
            if sizes[i] != 1 and strides[i] != expected:
                raise refuse(node, "its rows do not lie one after the other")
            expected *= sizes[i]
        start = self.axis(math.prod(sizes[:first]), node)
        stop = self.axis(math.prod(sizes[: last + 1]), node)
        return RowPattern((start, stop), unit)

    def axis(self, rows: int, node: Node) -> int:
        """The row axis before which there are ``rows`` combinations of axes."""
        for axis in range(len(self.dims) + 1):
            if math.prod(self.dims[:axis]) == rows:
                return axis
        raise refuse(node, "it splits the rows of the batch in another way")


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape with its elements in order."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
