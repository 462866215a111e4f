"""Shared memory of concatenations: what is part of a larger one is read from there.

The gradients of a GRU's three gates are concatenated for the input's weight, and those of two of
them for the state's weight. Without sharing they would be written several times.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch import fx

from ..graphs import (
    Node,
    aten,
    contains_parts_unchanged,
    inputs_of,
    join_axis,
    needed_for,
    new_node,
    value_of,
)


def share_joins(graph: fx.Graph, carried: Iterable[Node]) -> None:
    """share_joins : graph, next carries -> None; makes its ``cat``s views of larger ones

    Changes the graph. Reads of single values that belong to the loop stay.
    """
    carried = list(carried)
    joins = graph.find_nodes(op="call_function", target=aten.cat.default)
    joins = [join for join in joins if contains_parts_unchanged(join)]
    joins.sort(key=lambda join: len(join.args[0]), reverse=True)
    for i, large in enumerate(joins):
        before, in_loop = needed_for([large]), needed_for(carried)
        all_in_loop = in_loop.issuperset(large.args[0])
        for small in joins[i + 1 :]:
            first = _first_part(small, large)
            if first is None or small in before or (small in in_loop and not all_in_loop):
                continue
            for inside in (True, False):  # separate views, so that the loop keeps only its part
                users = [user for user in small.users if (user in in_loop) == inside]
                _replace(graph, small, users, large, first, len(small.args[0]))
        in_loop = needed_for(carried)
        if large in in_loop:
            for i, part in enumerate(large.args[0]):
                users = [user for user in part.users if user not in in_loop | before]
                _replace(graph, part, users, large, i, 1)
    _sort(graph)


def _first_part(small: Node, large: Node) -> int | None:
    """The index in ``large`` from which on its parts are those of ``small``, if there is one."""
    few, many = small.args[0], large.args[0]
    if len(few) < len(many) and join_axis(small) == join_axis(large):
        for i in range(len(many) - len(few) + 1):
            if many[i : i + len(few)] == few:
                return i
    return None


def _replace(
    graph: fx.Graph, node: Node, users: list[Node], join: Node, first: int, count: int
) -> None:
    """Lets ``users`` read ``node`` as ``count`` parts of ``join``; results of the graph stay."""
    users = [user for user in users if user.op != "output"]
    if not users:
        return
    dim, parts = join_axis(join), join.args[0]
    start = sum(value_of(part).shape[dim] for part in parts[:first])
    size = sum(value_of(part).shape[dim] for part in parts[first : first + count])
    with graph.inserting_after(join):
        view = new_node(graph, aten.slice.Tensor, join, dim, start, start + size)
    for user in users:
        user.replace_input_with(node, view)


def _sort(graph: fx.Graph) -> None:
    """Moves each node after what it reads, and keeps the order otherwise."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    dependencies = nx.DiGraph()
    dependencies.add_nodes_from(position)
    dependencies.add_edges_from((arg, node) for node in position for arg in inputs_of(node))
    output = graph.output_node()
    for node in nx.lexicographical_topological_sort(dependencies, key=position.__getitem__):
        if node is not output:
            output.prepend(node)
