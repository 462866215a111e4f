"""``einsum("nm,bmh->bnh", A, h)`` -> ``A @ h``, where A is the same at every step.

torch makes one product of it, with the rows of the batch beside each other as columns or as rows:
``A @ [m, b * h]``, or ``[b * h, m] @ A.T`` for ``"bmh,nm->bnh"``. A kernel computes one product
after another, of A and the matrix of each row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import fx

from ..gemms import MOST_VECTORS
from ..graphs import Node, aten, new_node, reachable_from, value_of

# Of a larger matrix the one product takes less time on a CPU, of which a library computes more at a
# time. With the matrix as the first operand, and as the second, for which more is copied.
_MOST_NUMBERS_FIRST, _MOST_NUMBERS_SECOND = 2000, 4500


def multiply_matrix_of_each_row(graph: fx.Graph, invariants: int, first_state: int) -> None:
    """multiply_matrix_of_each_row : graph of a step -> None

    The first inputs are invariant, those from ``first_state`` on the state. A product of the input
    alone leaves the recurrence, where one for all steps is best.
    """
    inputs = graph.find_nodes(op="placeholder")
    varying = reachable_from(inputs[invariants:], graph.nodes)
    of_state = reachable_from(inputs[first_state:], graph.nodes)
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        first, second = product.args
        if value_of(first).shape[0] != 1 or value_of(first).dtype.is_complex:
            continue
        with graph.inserting_before(product):
            if first not in varying and second in of_state:
                _replace(product, first, second, is_first=True)
            elif second not in varying and first in of_state:
                _replace(product, second, first, is_first=False)
    graph.eliminate_dead_code()


class _Sizes(NamedTuple):
    """Of the product of a shared matrix ``[results, terms]`` and one of each row."""

    rows: list[int]
    terms: int
    columns: int
    results: int


def _replace(product: Node, shared: Node, joined: Node, is_first: bool) -> None:
    """``joined``: the axis to sum over and all others as one axis, in either order."""
    graph = product.graph
    source, order = _before_joining(joined)
    shape = value_of(source).shape
    order = [axis for axis in order if shape[axis] != 1]
    if len(order) < 3:
        return
    summed = order.pop(0 if is_first else -1)
    *rows, columns = order
    results, terms = value_of(shared).shape[1:][:: 1 if is_first else -1]
    sizes = _Sizes([shape[axis] for axis in rows], terms, shape[columns], results)
    # As it was before it was permuted: rows of the batch, then the rows and columns of a matrix.
    is_matrix_of_each_row = shape[summed] == terms and max(rows) < summed < columns
    if not is_matrix_of_each_row or not _is_small(sizes, is_first):
        return
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    by_row = new_node(graph, aten.permute.default, source, [*ones, *rows, summed, columns])
    count = math.prod(sizes.rows)
    by_row = new_node(graph, aten.reshape.default, by_row, [count, terms, sizes.columns])
    if not is_first:
        shared = new_node(graph, aten.permute.default, shared, [0, 2, 1])
    shared = new_node(graph, aten.expand.default, shared, [count, results, terms])
    result = new_node(graph, aten.bmm.default, shared, by_row)
    split = [*sizes.rows, results, sizes.columns]
    result = new_node(graph, aten.reshape.default, result, split)
    *of_rows, of_results, of_columns = range(len(split))
    others = [*of_rows, of_columns]
    back = [of_results, *others] if is_first else [*others, of_results]
    result = new_node(graph, aten.permute.default, result, back)
    for user in list(product.users):  # what splits the joined axes reads them as they were
        if user.target is aten.reshape.default:
            user.replace_input_with(product, result)
    if product.users:
        joined_shape = list(value_of(product).shape)
        product.replace_all_uses_with(
            new_node(graph, aten.reshape.default, result, joined_shape),
            lambda user: user.target is not aten.reshape.default,
        )


def _is_small(sizes: _Sizes, is_first: bool) -> bool:
    """Whether a kernel computes it, in less time than the product of all rows."""
    most = _MOST_NUMBERS_FIRST if is_first else _MOST_NUMBERS_SECOND
    is_for_kernel = min(sizes.terms, sizes.columns, sizes.results) <= MOST_VECTORS
    return is_for_kernel and sizes.results * sizes.terms <= most


def _before_joining(joined: Node) -> tuple[Node, list[int]]:
    """The value that was permuted before its axes were joined, and the order of its axes."""
    value = joined
    for view in (aten.reshape.default, aten.clone.default):
        value = value.args[0] if value.target is view else value
    order = list(range(value_of(value).dim()))
    while value.target is aten.permute.default:
        axes = value.args[1]
        order = [axes[axis] % len(axes) for axis in order]
        value = value.args[0]
    return value, order
