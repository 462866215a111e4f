"""Products of matrices in a form that kernels have: of the vectors of each row with a weight.

Einsums, batched products and the gradients of both have their rows and vectors at any axes. A
product of matrices that each row has for itself becomes a sum of elementwise products.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..compiler.gemms import MOST_VECTORS
from ..compiler.graphs import Node, aten, value_of
from .accesses import RowView, before_reshape
from .expressions import Unsupported, refuse
from .row_order import Axes, RowOrder, new_meta_node

PRODUCTS = (aten.mm.default, aten.bmm.default)


def rewrite_product(
    node: Node, weights: Sequence[Node], order: RowOrder, *, heads_are_rows: bool
) -> None:
    """Rewrites a product, if a kernel does not have it as it is, and can have it in another form.

    ``heads_are_rows``: see ``normalize``.
    """
    first, second = node.args
    if second in weights:
        if not (heads_are_rows and _put_heads_last(node, order.rows)):
            _put_rows_first(node, order.rows)
    elif not _replace_product(node, order.rows) and first in weights and not heads_are_rows:
        _put_weight_second(node, order)


def is_small_product(node: Node) -> bool:
    """Whether it is a product that a kernel can compute for the matrices of each row."""
    if node.target not in PRODUCTS or value_of(node).dtype.is_complex:
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
    first = before_reshape(a) if by_vector is None else new_meta_node(graph, *_swapped(by_vector))
    first = _with_vectors(node, first, [rows.total, vectors, shape[-1]], rows)
    product = graph.call_function(node.target, (first, weight))
    product.meta["val"] = value_of(node).new_empty(rows.total, vectors, n, device="meta")
    # Shapes do not tell, for as many rows as vectors.
    product.meta["by_vector"] = by_vector is not None
    result = product
    if by_vector is not None:
        groups, _, of_group, _ = value_of(by_vector).shape
        result = new_meta_node(graph, aten.view.default, product, [groups, of_group, vectors, n])
        result = new_meta_node(graph, *_swapped(result))
    _replace_reshaped(node, result, rows)


def _put_weight_second(node: Node, order: RowOrder) -> None:
    """A weight times columns, such as those of a graph's nodes, as ``[rows, columns, k] @ W.T``.

    They were ``[rows, k, columns of a row]``, or ``[k, columns]`` with those of all rows.
    """
    graph, rows, (weight, columns) = node.graph, order.rows, node.args
    *batch, n, _ = value_of(node).shape
    is_one = node.target is aten.mm.default or batch == [1] or value_of(weight).stride(0) == 0
    found = _find_columns(columns, order) if is_one and rows.shape else None
    if found is None:
        return
    source, row_axes, terms = found
    shape, k = value_of(source).shape, value_of(columns).shape[-2]
    others = [axis for axis in range(len(shape)) if axis not in (*terms, *row_axes)]
    axes = [*row_axes, *others]
    first = new_meta_node(graph, aten.permute.default, source, [*axes, *terms])
    vectors = math.prod(shape) // (rows.total * k)
    first = _with_vectors(node, first, [rows.total, vectors, k], rows)
    product = graph.call_function(node.target, (first, weight))
    product.meta["val"] = value_of(node).new_empty(rows.total, vectors, n, device="meta")
    product.meta |= {"by_vector": False, "transposed": True}
    # Back to the axes of the source, but for n in place of those of k.
    result = new_meta_node(graph, aten.view.default, product, [*(shape[a] for a in axes), n])
    left = sorted(axes)
    places = [axes.index(axis) for axis in left]
    places.insert(sum(axis < terms.start for axis in left), len(axes))
    _replace_reshaped(node, new_meta_node(graph, aten.permute.default, result, places), rows)


def _find_columns(columns: Node, order: RowOrder) -> tuple[Node, Axes, range] | None:
    """(what was reshaped to the columns or they themselves, its axes of rows, those of k)"""
    *batch, k, m = value_of(columns).shape
    start, stop = math.prod(batch), math.prod(batch) * k
    source = columns
    while stop * m:  # of no numbers, no axis shows where it lies
        shape = value_of(source).shape
        ends = list(accumulate(shape, operator.mul, initial=1))
        row_axes = order.row_axes(source, len(shape))
        if row_axes is not None and start in ends and stop in ends:
            terms = range(ends.index(start), ends.index(stop))
            return (source, row_axes, terms) if set(terms).isdisjoint(row_axes) else None
        if before_reshape(source) is source:
            break
        source = source.args[0]
    return None


def _with_vectors(product: Node, source: Node, shape: list[int], rows: RowView) -> Node:
    """The source as ``[rows, vectors, k]``, of which a kernel reads the vectors of a row."""
    first = new_meta_node(product.graph, aten.reshape.default, source, shape)
    try:
        rows.strided(first)
    except (Unsupported, ValueError):  # the latter while K is a symbol
        raise refuse(product, "the vectors of a row are not side by side in memory") from None
    return first


def _replace_reshaped(node: Node, result: Node, rows: RowView) -> None:
    """Replaces a product by a result of another shape."""
    graph = node.graph

    def reshaped(like: Node) -> Node:
        shape = list(value_of(like).shape)
        view = new_meta_node(graph, aten.reshape.default, result, shape)
        try:
            rows.strided(view)
        except (Unsupported, ValueError):
            copy = new_meta_node(graph, aten.clone.default, result)
            view = new_meta_node(graph, aten.reshape.default, copy, shape)
        return view

    for user in list(node.users):  # they may split what the product had joined
        if user.target is aten.reshape.default:
            user.replace_all_uses_with(reshaped(user))
    node.replace_all_uses_with(reshaped(node))


def _swapped(node: Node) -> tuple[Any, ...]:
    return aten.permute.default, node, [0, 2, 1, 3]


def _put_heads_last(node: Node, rows: RowView) -> bool:
    """A product with a weight for each of the last row axes, such as heads: ``[rows, k]``.

    It was ``[groups * heads, rows of a group and head, k]``. Whether it was one.
    """
    graph, (a, weight) = node.graph, node.args
    if node.target is not aten.bmm.default or not rows.total:
        return False
    source = before_reshape(a)
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
        _replace_reshaped(node, new_meta_node(graph, *_swapped(result)), rows)
        return True
    return False


def _split_by_vector(a: Node, vectors: int, rows: RowView) -> Node | None:
    """``a`` as ``[groups, vectors, rows of a group, k]``, where each vector has its own weight."""
    shape, k = value_of(a).shape[:-1], value_of(a).shape[-1]
    source = before_reshape(a)
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


def _replace_product(node: Node, rows: RowView) -> bool:
    """``a @ b`` as a sum of elementwise products, if each row has small matrices of its own.

    Whether it has.
    """
    graph, value = node.graph, value_of(node)
    count = value.shape[0] if value.dim() == 3 else 1
    if not rows.total or count % rows.total or not is_small_product(node):
        return False
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
    return True
