"""``W @ h`` in a recurrence -> ``(h.T @ W.T).T``, for states of columns and for nodes of a graph.

A kernel holds the second operand of a product, and multiplies rows with it. A weight that a batch
shares (``A @ z`` with z ``[B, nodes, units]``) is multiplied with the rows of all at once, so that
its gradient is one GEMM too.
"""

from __future__ import annotations

from torch import fx

from ..graphs import Node, aten, join_axis, new_node, reachable_from, value_of

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
_RESHAPES = {aten.view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default}


def put_weights_second(graph: fx.Graph, invariants: int) -> set[Node]:
    """put_weights_second : graph of a step, how many of its inputs are invariant -> the columns

    Changes the products of what only depends on the first inputs, which are invariant, with what
    differs from step to step. Returns the latter: the nodes that it transposes.
    """
    inputs = graph.find_nodes(op="placeholder")
    varying = reachable_from(inputs[invariants:], graph.nodes)
    found: set[Node] = set()
    for product in list(graph.nodes):
        if product.target not in _PRODUCTS or product.kwargs:
            continue
        *bias, weight, columns = product.args
        if weight in varying or columns not in varying:
            continue
        with graph.inserting_before(product):
            result = _product(weight, columns)
            if bias:
                result = new_node(graph, aten.add.Tensor, result, *bias)
        product.replace_all_uses_with(result)
        varying.add(result)
        found |= {columns, *(columns.args[0] if columns.target is aten.cat.default else ())}
    graph.eliminate_dead_code()
    return found


def _product(weight: Node, columns: Node) -> Node:
    """``weight @ columns`` with the weight as the second operand."""
    graph, rows = columns.graph, _transposed(columns)
    shared = _shared(weight)
    if shared is None:  # one matrix, or one for each of a batch
        product = aten.bmm.default if value_of(weight).dim() == 3 else aten.mm.default
        return _transposed(new_node(graph, product, rows, _transposed(weight)))
    batch, count, length = value_of(rows).shape
    joined = new_node(graph, aten.reshape.default, rows, [batch * count, length])
    result = new_node(graph, aten.mm.default, joined, _transposed(shared))
    shape = [batch, count, value_of(result).shape[-1]]
    return _transposed(new_node(graph, aten.view.default, result, shape))


def _shared(weight: Node) -> Node | None:
    """The one matrix that a batch repeats, if it does."""
    batch, *shape = value_of(weight).shape
    if len(shape) == 1:
        return None
    if batch == 1:
        return new_node(weight.graph, aten.reshape.default, weight, shape)
    is_repeated = value_of(weight).stride(0) == 0
    while weight.target in _RESHAPES and value_of(weight).dim() > 2:
        weight = weight.args[0]
    return weight if is_repeated and list(value_of(weight).shape) == shape else None


def _transposed(x: Node) -> Node:
    """The last two axes swapped; of each part, where parts are joined along them."""
    axes = list(range(value_of(x).dim()))
    if x.target is aten.cat.default and (axis := join_axis(x)) >= len(axes) - 2:
        parts = [_transposed(part) for part in x.args[0]]
        return new_node(x.graph, aten.cat.default, parts, 2 * len(axes) - 3 - axis)
    axes[-2:] = axes[:-3:-1]
    return new_node(x.graph, aten.permute.default, x, axes)
