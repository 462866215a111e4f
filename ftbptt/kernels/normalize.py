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
from ..compiler.gemms import MOST_VECTORS
from ..compiler.graphs import VIEWS, Node, aten, join_axis, value_of
from .accesses import RowView
from .expressions import Unsupported, is_constant, is_elementwise, reduced_axes, refuse
from .row_order import RowOrder, is_same_everywhere, new_meta_node


class NormalForm(NamedTuple):
    """A block's step with fewer kinds of nodes.

    ``emit_orders``: where the rows of an emit are not its first axes, the order of its axes in
    which the graph returns it, with the rows first.
    """

    graph: fx.Graph
    emit_orders: list[list[int] | None]


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
            if node.target in _PRODUCTS and node.args[1] in weights:
                if not (heads_are_rows and _put_heads_last(node, order.rows)):
                    _put_rows_first(node, order.rows)
            elif node.target in _PRODUCTS:
                _replace_product(node, rows)
            elif node.op == "call_function" and node not in totals:
                order.put_first(node)
    results, first_emit = list(output.args[0]), len(block.carries)
    emits = results[first_emit : first_emit + len(block.emits)]
    emit_orders = [order.order_of(node) for node in emits]
    with graph.inserting_before(output):
        for i, emit_order in enumerate(emit_orders, first_emit):
            if emit_order is not None:
                results[i] = new_meta_node(graph, aten.permute.default, results[i], emit_order)
    output.args = (results,)
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if is_elementwise(node) and not is_constant(node):
            _push_views(node, rows, weights)
    graph.eliminate_dead_code()
    return NormalForm(graph, emit_orders)


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


_PRODUCTS = (aten.mm.default, aten.bmm.default)


def is_small_product(node: Node) -> bool:
    """Whether it is a product that a kernel can compute for the matrices of each row."""
    if node.target not in _PRODUCTS or value_of(node).dtype.is_complex:
        return False
    (n, k), m = value_of(node.args[0]).shape[-2:], value_of(node).shape[-1]
    return min(n, k, m) <= MOST_VECTORS


def _put_rows_first(node: Node, rows: RowView) -> None:
    """A product of several vectors of each row with a weight: ``[rows, vectors, k]``.

    They were ``[rows * vectors, k]`` with one weight, or ``[groups * vectors, rows of a group, k]``
    with a weight for each vector, of each group of rows.
    """
    graph, (a, weight) = node.graph, node.args
    shape, n = list(value_of(a).shape), value_of(node).shape[-1]
    vectors, rest = divmod(math.prod(shape[:-1]), max(rows.total, 1))
    if vectors <= 1 or rest or not rows.shape:  # without rows, BLAS is faster
        return
    by_vector = _split_by_vector(a, vectors, rows)
    first = a if by_vector is None else new_meta_node(graph, *_swapped(by_vector))
    first = new_meta_node(graph, aten.reshape.default, first, [rows.total, vectors, shape[-1]])
    try:
        rows.strided(first)
    except (Unsupported, ValueError):  # the latter while K is a symbol
        raise refuse(node, "the vectors of a row are not side by side in memory") from None
    product = graph.call_function(node.target, (first, weight))
    product.meta["val"] = value_of(node).new_empty(rows.total, vectors, n, device="meta")
    # Shapes do not tell, for as many rows as vectors.
    product.meta["by_vector"] = by_vector is not None
    result = product
    if by_vector is not None:
        groups, _, of_group, _ = value_of(by_vector).shape
        result = new_meta_node(graph, aten.view.default, product, [groups, of_group, vectors, n])
        result = new_meta_node(graph, *_swapped(result))
    _replace_reshaped(node, result)


def _replace_reshaped(node: Node, result: Node) -> None:
    """Replaces a product by a result of another shape."""
    for user in list(node.users):  # they may split what the product had joined
        if user.target is aten.reshape.default:
            shape = list(value_of(user).shape)
            user.replace_all_uses_with(new_meta_node(node.graph, user.target, result, shape))
    shape = list(value_of(node).shape)
    node.replace_all_uses_with(new_meta_node(node.graph, aten.reshape.default, result, shape))


def _swapped(node: Node) -> tuple[Any, ...]:
    return aten.permute.default, node, [0, 2, 1, 3]


def _put_heads_last(node: Node, rows: RowView) -> bool:
    """A product with a weight for each of the last row axes, such as heads: ``[rows, k]``.

    It was ``[groups * heads, rows of a group and head, k]``. Whether it was one.
    """
    graph, (a, weight) = node.graph, node.args
    if node.target is not aten.bmm.default or not rows.total:
        return False
    source = a.args[0] if a.target is aten.reshape.default else a
    batch, of_group, k = value_of(a).shape
    for trailing in range(1, len(rows.dims) + 1):
        heads = math.prod(rows.last(trailing))
        groups, rest = divmod(batch, heads)
        if rest or batch * of_group != rows.total:
            continue
        split = new_meta_node(graph, aten.reshape.default, source, [groups, heads, of_group, k])
        try:
            strides = rows.strided(split).strides
        except Unsupported:
            continue
        # Shapes do not tell, for as many heads as rows.
        if strides[2] != heads * strides[1] or (groups > 1 and strides[0] != of_group * strides[2]):
            continue
        first = new_meta_node(graph, *_swapped(split))
        first = new_meta_node(graph, aten.reshape.default, first, [rows.total, k])
        product = graph.call_function(node.target, (first, weight))
        n = value_of(node).shape[-1]
        product.meta["val"] = value_of(node).new_empty(rows.total, n, device="meta")
        product.meta["trailing"] = trailing
        result = new_meta_node(graph, aten.view.default, product, [groups, of_group, heads, n])
        _replace_reshaped(node, new_meta_node(graph, *_swapped(result)))
        return True
    return False


def _split_by_vector(a: Node, vectors: int, rows: RowView) -> Node | None:
    """``a`` as ``[groups, vectors, rows of a group, k]``, where each vector has its own weight."""
    shape, k = value_of(a).shape[:-1], value_of(a).shape[-1]
    source = a.args[0] if a.target is aten.reshape.default else a
    for groups in accumulate((1, *rows.shape), operator.mul):
        of_group = rows.total // max(groups, 1)
        if list(shape) != [groups * vectors, of_group]:
            continue
        split = new_meta_node(a.graph, aten.reshape.default, source, [groups, vectors, of_group, k])
        # It may also be ``[rows, vectors, k]``, with a weight for each group of rows.
        by_group = groups * vectors in accumulate(rows.shape, operator.mul)
        strides = rows.strided(split).strides
        if not by_group or strides[1] < strides[2]:
            return split
    return None


def _replace_product(node: Node, rows: RowView) -> None:
    """``a @ b`` as a sum of elementwise products, if each row has matrices of its own."""
    graph, value = node.graph, value_of(node)
    count = value.shape[0] if value.dim() == 3 else 1
    if not rows.total or count % rows.total or not is_small_product(node):
        return
    # A row may have several matrices, such as one for each of its heads.
    lead = [rows.total, count // rows.total]

    def of_rows(matrix: Node) -> Node:
        return new_meta_node(
            graph, aten.view.default, matrix, [*lead, *value_of(matrix).shape[-2:]]
        )

    a = new_meta_node(graph, aten.unsqueeze.default, of_rows(node.args[0]), 3)
    b = new_meta_node(graph, aten.transpose.int, of_rows(node.args[1]), 2, 3)
    b = new_meta_node(graph, aten.unsqueeze.default, b, 2)
    products = new_meta_node(graph, aten.mul.Tensor, a, b)
    result = new_meta_node(graph, aten.sum.dim_IntList, products, [4])
    node.replace_all_uses_with(new_meta_node(graph, aten.view.default, result, list(value.shape)))


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
