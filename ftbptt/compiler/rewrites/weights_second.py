"""``W @ h`` -> ``(h.T @ W.T).T``, in a step whose values are columns, ``[units, rows]``.

A kernel holds the second operand of a product, and multiplies rows with it.
"""

from __future__ import annotations

from torch import fx

from ..graphs import Node, aten, is_transpose, join_axis, new_node, reachable_from, value_of

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def put_weights_second(graph: fx.Graph, invariants: int) -> set[Node]:
    """put_weights_second : graph of a step, how many of its inputs are invariant -> the columns

    Returns what weights, which only depend on the first inputs, were multiplied with. Changes
    nothing where other products read what differs from step to step, as those of ``A @ z @ W`` for
    the nodes of a graph, in which the columns are no rows of a batch.
    """
    inputs = graph.find_nodes(op="placeholder")
    varying = reachable_from(inputs[invariants:], graph.nodes)
    products = [
        node
        for node in graph.nodes
        if node.target in _PRODUCTS and not varying.isdisjoint(node.args[-2:])
    ]
    if not all(_is_of_columns(product, varying) for product in products):
        return set()
    found: set[Node] = set()
    for product in products:
        *bias, weight, columns = product.args
        with graph.inserting_before(product):
            rows = new_node(graph, aten.mm.default, _transposed(columns), _transposed(weight))
            result = _transposed(rows)
            if bias:
                result = new_node(graph, aten.add.Tensor, result, *bias)
        product.replace_all_uses_with(result)
        found |= {columns, *(columns.args[0] if columns.target is aten.cat.default else ())}
    graph.eliminate_dead_code()
    return found


def put_weights_second_in_gradients(graph: fx.Graph, invariants: int) -> None:
    """put_weights_second_in_gradients : joint graph, how many of its inputs are invariant -> None

    Of a transposed operand autograd writes the gradient ``(W @ d.T).T``, which is ``d @ W.T``.
    """
    varying = reachable_from(graph.find_nodes(op="placeholder")[invariants:], graph.nodes)
    for node in list(graph.nodes):
        if not (is_transpose(node) and node.args[0].target is aten.mm.default):
            continue
        weight, rows = node.args[0].args
        if weight not in varying and is_transpose(rows):
            with graph.inserting_before(node):
                product = new_node(graph, aten.mm.default, rows.args[0], _transposed(weight))
            node.replace_all_uses_with(product)
            varying.add(product)


def _is_of_columns(product: Node, varying: set[Node]) -> bool:
    is_matrix = product.target is not aten.bmm.default and not product.kwargs
    return is_matrix and product.args[-2] not in varying


def _transposed(x: Node) -> Node:
    """The transpose of a matrix; of each part, where it is joined."""
    if x.target is aten.cat.default and all(value_of(part).dim() == 2 for part in x.args[0]):
        parts = [_transposed(part) for part in x.args[0]]
        return new_node(x.graph, aten.cat.default, parts, 1 - join_axis(x))
    return new_node(x.graph, aten.permute.default, x, [1, 0])
