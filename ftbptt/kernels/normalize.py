"""A block's graph -> an equivalent graph with fewer kinds of nodes, as input for ``lower``.

Means and variances become sums; ``stack`` and the scatters become ``cat``; a product of matrices
that each row has for itself becomes a sum of elementwise products. A view of an elementwise result
becomes the elementwise operation on views, so that the gates of an LSTM are slices of a product,
and the tensor of all gates is never stored.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._compat.running import is_view_of
from ..compiler.blocks import ScanBlock
from ..compiler.graphs import VIEWS, Node, aten, join_axis, value_of
from .accesses import RowView, before_reshape
from .expressions import is_constant, is_elementwise, reduced_axes, refuse
from .products import PRODUCTS, rewrite_product
from .row_order import RowOrder, inverse, is_same_everywhere, new_meta_node
from .rowloop import EmitLayout


class NormalForm(NamedTuple):
    """A block's step with fewer kinds of nodes, and how it returns the emits: their rows first."""

    graph: fx.Graph
    emit_layouts: list[EmitLayout]


def normalize(block: ScanBlock, rows: RowView, *, heads_are_rows: bool = False) -> NormalForm:
    """normalize : a block x its rows -> NormalForm, of a copy of the block's graph

    ``heads_are_rows``: whether a weight may vary along the last row axes.
    """
    graph = copy.deepcopy(block.module.graph)
    for node in list(graph.nodes):
        if node.target in _REPLACEMENTS:
            with graph.inserting_before(node):
                _REPLACEMENTS[node.target](node)
    graph.eliminate_dead_code()
    weights = graph.find_nodes(op="placeholder")[: len(block.invariants)]
    order = RowOrder(RowView(rows.shape), weights)
    output = graph.output_node()
    totals = output.args[0][len(output.args[0]) - len(block.totals) :]
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target in PRODUCTS:
                rewrite_product(node, weights, order, heads_are_rows=heads_are_rows)
            elif node.op == "call_function" and node not in totals:
                operation = _cast_first(node)
                with graph.inserting_before(operation.next):
                    order.put_first(operation)
    results, emit_layouts = list(output.args[0]), []
    with graph.inserting_before(output):
        for i in range(len(block.carries), len(block.carries) + len(block.emits)):
            results[i], layout = _rows_first(results[i], order)
            emit_layouts.append(layout)
    output.args = (results,)
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if is_elementwise(node) and not is_constant(node):
            _push_views(node, rows, weights)
    graph.eliminate_dead_code()
    return NormalForm(graph, emit_layouts)


def _cast_first(node: Node) -> Node:
    """A cast, as of autocast, of what its operand was reshaped from: rows show there."""
    if node.target is not aten._to_copy.default:
        return node
    source = before_reshape(node.args[0])
    if source is node.args[0]:
        return node
    cast = node.graph.call_function(node.target, (source,), node.kwargs)
    cast.meta["val"] = value_of(node).new_empty(value_of(source).shape, device="meta")
    shape = list(value_of(node).shape)
    node.replace_all_uses_with(new_meta_node(node.graph, aten.reshape.default, cast, shape))
    return cast


def _rows_first(emit: Node, order: RowOrder) -> tuple[Node, EmitLayout]:
    """The emit as a kernel writes it, and how: before a reshape that joins its rows to others."""
    source = before_reshape(emit)
    axes = order.order_of(source)
    if axes is not None:
        emit = new_meta_node(emit.graph, aten.permute.default, source, axes)
        return emit, EmitLayout(tuple(value_of(emit).shape), tuple(inverse(axes)))
    emit = _with_rows(emit, order.rows)
    shape = tuple(value_of(emit).shape)
    return emit, EmitLayout(shape, tuple(range(len(shape))))


def _with_rows(emit: Node, rows: RowView) -> Node:
    """The emit with its rows apart, where a view has joined them to the axis after them."""
    shape = list(value_of(emit).shape)
    before = list(accumulate(shape, operator.mul, initial=1))
    if rows.has_rows(emit) or not rows.total or 0 in shape:
        return emit
    for axis, size in enumerate(shape):
        part, rest = divmod(rows.total, before[axis])
        if not rest and not size % part:
            apart = [*shape[:axis], part, size // part, *shape[axis + 1 :]]
            return new_meta_node(emit.graph, aten.view.default, emit, apart)
    return emit


def _reduced(node: Node) -> tuple[list[int], int]:
    """(the axes that the node reduces, the number of elements in them)"""
    axes, shape = reduced_axes(node), value_of(node.args[0]).shape
    return axes, math.prod(shape[d] for d in axes)


def _mean_of(x: Node, axes: list[int], count: int, keep: bool) -> Node:
    total = new_meta_node(x.graph, aten.sum.dim_IntList, x, axes, keep)
    return new_meta_node(x.graph, aten.mul.Tensor, total, 1.0 / count)


def _replace_mean(node: Node) -> None:
    axes, count = _reduced(node)
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if node.kwargs.get("dtype") is not None or count == 0:
        raise refuse(node, "a mean with a dtype argument, or of no elements")
    node.replace_all_uses_with(_mean_of(node.args[0], axes, count, keep))


def _variance(node: Node) -> tuple[Node, Node]:
    """(variance, mean), in two passes like torch's."""
    graph, x = node.graph, node.args[0]
    axes, count = _reduced(node)
    correction = node.kwargs.get("correction")
    correction = 1 if correction is None else correction
    keep = node.kwargs.get("keepdim", False)
    if count <= correction:
        raise refuse(node, "a variance of too few elements")
    broadcast_mean = _mean_of(x, axes, count, True)
    deviation = new_meta_node(graph, aten.sub.Tensor, x, broadcast_mean)
    square = new_meta_node(graph, aten.mul.Tensor, deviation, deviation)
    total = new_meta_node(graph, aten.sum.dim_IntList, square, axes, keep)
    variance = new_meta_node(graph, aten.mul.Tensor, total, 1.0 / (count - correction))
    mean = broadcast_mean if keep else new_meta_node(graph, aten.squeeze.dims, broadcast_mean, axes)
    return variance, mean


def _replace_var(node: Node) -> None:
    node.replace_all_uses_with(_variance(node)[0])


def _replace_var_mean(node: Node) -> None:
    parts = _variance(node)
    for user in list(node.users):
        user.replace_all_uses_with(parts[user.args[1]])


def _replace_stack(node: Node) -> None:
    dim = join_axis(node)
    parts = [new_meta_node(node.graph, aten.unsqueeze.default, part, dim) for part in node.args[0]]
    node.replace_all_uses_with(_joined(parts, dim, value_of(node)))


def _replace_slice_scatter(node: Node) -> None:
    args = dict(zip(("input", "src", "dim", "start", "end", "step"), node.args, strict=False))
    base, src, step = args["input"], args["src"], args.get("step", 1)
    shape = list(value_of(base).shape)
    dim = args.get("dim", 0) % len(shape)
    size = shape[dim]
    start = _index(args.get("start"), size, 0)
    end = max(start, _index(args.get("end"), size, size))  # as of an empty slice
    if step == 1:
        node.replace_all_uses_with(_with_slice(base, src, dim, start, end))
        return
    groups = size // step
    if size % step or len(range(start, end, step)) != groups:
        raise refuse(node, "a slice with a step that does not divide the axis")
    # One element of each group of neighbours, along an axis of its own.
    grouped = [*shape[:dim], groups, step, *shape[dim + 1 :]]
    base = new_meta_node(node.graph, aten.view.default, base, grouped)
    src = new_meta_node(node.graph, aten.unsqueeze.default, src, dim + 1)
    result = _with_slice(base, src, dim + 1, start, start + 1)
    node.replace_all_uses_with(new_meta_node(node.graph, aten.view.default, result, shape))


def _index(index: int | None, size: int, default: int) -> int:
    """A bound of a slice as an index from 0 to ``size``."""
    index = default if index is None else index
    return min(max(index + size if index < 0 else index, 0), size)


def _with_slice(base: Node, src: Node, dim: int, start: int, end: int) -> Node:
    """``base`` with ``src`` in place of its slice ``start:end``."""
    size = value_of(base).shape[dim]
    parts = [src]
    if start > 0:
        parts.insert(0, new_meta_node(src.graph, aten.slice.Tensor, base, dim, 0, start))
    if end < size:
        parts.append(new_meta_node(src.graph, aten.slice.Tensor, base, dim, end, size))
    return _joined(parts, dim, value_of(base))


def _joined(parts: list[Node], dim: int, like: Tensor) -> Node:
    """The parts, which may be of other dtypes, as a value of this shape and dtype."""
    cat = parts[0].graph.call_function(aten.cat.default, (parts, dim))
    cat.meta["val"] = like.new_empty(like.shape, device="meta")
    return cat


def _replace_view_as_real(node: Node) -> None:
    """The parts of complex numbers, which are put side by side only if they are read so."""
    graph, last = node.graph, value_of(node).dim() - 1
    parts = [
        new_meta_node(graph, part, node.args[0]) for part in (aten.real.default, aten.imag.default)
    ]
    for user in list(node.users):
        if user.target is aten.select.int and user.args[1] % (last + 1) == last:
            user.replace_all_uses_with(parts[user.args[2]])
    parts = [new_meta_node(graph, aten.unsqueeze.default, part, last) for part in parts]
    node.replace_all_uses_with(_joined(parts, last, value_of(node)))


def _replace_view_as_complex(node: Node) -> None:
    parts = [new_meta_node(node.graph, aten.select.int, node.args[0], -1, part) for part in (0, 1)]
    node.replace_all_uses_with(new_meta_node(node.graph, aten.complex.default, *parts))


_REPLACEMENTS: dict[Any, Callable[[Node], None]] = {
    aten.stack.default: _replace_stack,
    aten.slice_scatter.default: _replace_slice_scatter,
    aten.mean.dim: _replace_mean,
    aten.mean.default: _replace_mean,
    aten.var.correction: _replace_var,
    aten.var_mean.correction: _replace_var_mean,
    aten.view_as_real.default: _replace_view_as_real,
    aten.view_as_complex.default: _replace_view_as_complex,
}


def _push_views(node: Node, rows: RowView, weights: Sequence[Node]) -> None:
    """Moves the views of an elementwise node from its result to its operands.

    Only if nothing is computed twice, and the rows stay first, for a node with a value per row. A
    node that all rows share (such as the negation of a shared flag) is always moved, towards the
    nodes that read it.
    """
    has_rows = rows.has_rows(node)
    views = [user for user in node.users if user.op == "call_function" and user.target in VIEWS]
    distinct = {(v.target, str(v.args[1:]), str(v.kwargs)): v for v in views}
    work_after = sum(value_of(v).numel() for v in distinct.values())
    work_before = value_of(node).numel()
    if has_rows and (len(views) < len(node.users) or work_after > work_before):
        return
    order = RowOrder(RowView(rows.shape), weights)
    if has_rows and any(order.order_of(view) is not None for view in views):
        return
    for view in views:
        with node.graph.inserting_before(view):
            pushed = _on_views(node, view)
        if pushed is not None:
            view.replace_all_uses_with(pushed)
            node.graph.erase_node(view)
    if not node.users:  # at once, so that it no longer counts as a user of its operands
        node.graph.erase_node(node)


def _on_views(node: Node, view: Node) -> Node | None:
    """``view(op(a, b))`` as ``op(view(a), view(b))``; None if an operand has no such view."""
    graph, shape = node.graph, list(value_of(node).shape)

    def view_of(arg: Node) -> Node:
        if not is_same_everywhere(arg):
            if list(value_of(arg).shape) != shape:
                arg = new_meta_node(graph, aten.expand.default, arg, shape)
            return new_meta_node(graph, view.target, arg, *view.args[1:])
        return arg

    if view.kwargs or not all(_can_view(arg, view, shape) for arg in node.all_input_nodes):
        return None
    pushed = graph.call_function(node.target, fx.node.map_arg(node.args, view_of), node.kwargs)
    value = value_of(view)
    pushed.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return pushed


def _can_view(arg: Node, view: Node, shape: list[int]) -> bool:
    """Whether the view can be applied to this operand without a copy."""
    if is_same_everywhere(arg):
        return True
    value = value_of(arg)
    memory = torch.empty_strided(value.shape, value.stride(), device="meta")
    try:
        return is_view_of(view.target(memory.expand(shape), *view.args[1:]), memory)
    except (RuntimeError, ValueError):
        return False
