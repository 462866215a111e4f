"""Puts the rows of the batch first in values that have them elsewhere, as those of einsum have.

Where the rows are in a value shows in its strides. An operation on values that have them at other
axes becomes the operation on permuted views; what reads its result reads a permuted view of it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.graphs import Node, aten, join_axis, value_of
from .accesses import RowView
from .expressions import REDUCTIONS, Unsupported, is_constant, is_elementwise, reduced_axes


def new_meta_node(graph: fx.Graph, target: Any, *args: Any) -> Node:
    """A new node, with the shape, strides and dtype of its value."""
    node = graph.call_function(target, args)

    def empty(arg: Node) -> Tensor:
        value = value_of(arg)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    node.meta["val"] = target(*fx.node.map_arg(args, empty))
    return node


def is_same_everywhere(operand: Node) -> bool:
    """Whether an elementwise operation reads one number of it, whatever its view of the others.

    A tensor without axes stays one: by that, torch has it take the dtype of those with axes.
    """
    return is_constant(operand) or value_of(operand).dim() == 0


Axes = tuple[int, ...]


class RowOrder:
    """Where the rows are in the nodes of a graph. ``shared``: inputs that all rows share."""

    def __init__(self, rows: RowView, shared: Container[Node]) -> None:
        self.rows, self.shared = rows, shared

    def put_first(self, node: Node) -> None:
        """Rewrites an elementwise operation, a reduction or a join, if its rows are elsewhere."""
        indexed = node  # what has the axes that the operation goes over
        if node.target is aten.cat.default:
            operands, rewrite = node.args[0], _permute_join
        elif node.target in REDUCTIONS and len(node.args) > 1:
            operands, rewrite, indexed = [node.args[0]], _permute_reduction, node.args[0]
        elif is_elementwise(node) and not is_constant(node):
            operands = [arg for arg in node.all_input_nodes if not is_constant(arg)]
            rewrite = _permute_elementwise
        else:
            return
        shape = list(value_of(indexed).shape)
        if (axes := self._moved_axes(operands, shape)) is not None:
            rewrite(node, shape, axes)

    def order_of(self, node: Node) -> list[int] | None:
        """The order of its axes that puts the rows of a value first; None if they are."""
        shape = value_of(node).shape
        axes = self._moved_axes([node], shape)
        return None if axes is None else _rows_first(axes, len(shape))

    def _moved_axes(self, operands: Sequence[Node], shape: Sequence[int]) -> Axes | None:
        """The axes of ``shape`` that are the rows of the operands, broadcast to it.

        None if these are the first axes, or if the operands do not agree, or do not show it.
        """
        found = {self.row_axes(node, len(shape)) for node in operands} - {None}
        axes = found.pop() if len(found) == 1 else None
        if axes is None or axes == tuple(a for a, n in enumerate(shape) if n != 1)[: len(axes)]:
            return None
        return axes

    def row_axes(self, node: Node, dims: int) -> Axes | None:
        """The axes that are the node's rows, in their order, counted as in ``dims`` axes.

        None if it does not show, or if all rows share the node.
        """
        try:
            strided = self.rows.strided(node)
            expected_unit = self.rows.size(strided.base)
        except Unsupported:
            return None
        if strided.base in self.shared:
            return None
        shape, strides = value_of(node).shape, strided.strides
        # A step along a row axis goes over all features of a row.
        axes = [a for a, n in enumerate(shape) if n != 1 and strides[a] >= expected_unit > 0]
        axes.sort(key=strides.__getitem__, reverse=True)
        expected = expected_unit
        for axis in reversed(axes):
            if strides[axis] != expected:
                return None
            expected *= shape[axis]
        if expected != expected_unit * self.rows.total:
            return None
        return tuple(axis + dims - len(shape) for axis in axes)


def _rows_first(axes: Axes, dims: int) -> list[int]:
    return [*axes, *(axis for axis in range(dims) if axis not in axes)]


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes a permutation; of some of the axes, the one that sorts them."""
    return sorted(range(len(order)), key=order.__getitem__)


def _permute_elementwise(node: Node, shape: list[int], axes: Axes) -> None:
    graph, order = node.graph, _rows_first(axes, len(shape))

    def permuted(arg: Node) -> Node:
        if is_same_everywhere(arg):
            return arg
        if list(value_of(arg).shape) != shape:
            arg = new_meta_node(graph, aten.expand.default, arg, shape)
        return new_meta_node(graph, aten.permute.default, arg, order)

    args = fx.node.map_arg(node.args, permuted)
    _replace(node, args, [shape[axis] for axis in order], inverse(order))


def _permute_join(node: Node, shape: list[int], axes: Axes) -> None:
    order = _rows_first(axes, len(shape))
    parts = [new_meta_node(node.graph, aten.permute.default, part, order) for part in node.args[0]]
    result_shape = [shape[axis] for axis in order]
    _replace(node, (parts, order.index(join_axis(node))), result_shape, inverse(order))


def _permute_reduction(node: Node, shape: list[int], axes: Axes) -> None:
    (source, dims, *others), order = node.args, _rows_first(axes, len(shape))
    keep, is_list = bool(others and others[0]), not isinstance(dims, int)
    reduced = reduced_axes(node)
    if not set(reduced).isdisjoint(axes):
        return
    permuted = new_meta_node(node.graph, aten.permute.default, source, order)
    new_dims = [order.index(dim) for dim in reduced]
    left = [axis for axis in order if keep or axis not in reduced]
    result_shape = [1 if axis in reduced else shape[axis] for axis in left]
    args = (permuted, new_dims if is_list else new_dims[0], *others)
    _replace(node, args, result_shape, inverse(left))


def _replace(node: Node, args: Any, shape: list[int], back: list[int]) -> None:
    """Replaces the node by its operation on ``args``, whose result has this shape, permuted."""
    result = node.graph.call_function(node.target, args, node.kwargs)
    result.meta["val"] = value_of(node).new_empty(shape, device="meta")
    node.replace_all_uses_with(new_meta_node(node.graph, aten.permute.default, result, back))
