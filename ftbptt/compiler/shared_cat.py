"""Values that lie joined in memory once: what is part of a larger join is read from there.

The gradients of a GRU's gates are joined for the input's weight; those of two of its gates, too,
for the state's weight. Apart, they would be written several times, and joined by another pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch import fx

from .graphs import Node, aten, inputs_of, joins_as_they_are, needed_for, new_node, value_of


def share_joins(graph: fx.Graph, carried: Iterable[Node]) -> None:
    """share_joins : graph x next carries -> nothing; its joins share memory where they can

    Changes the graph. What the loop itself reads of a single value stays as it is.
    """
    carried = list(carried)
    joins = graph.find_nodes(op="call_function", target=aten.cat.default)
    joins = [join for join in joins if joins_as_they_are(join)]
    joins.sort(key=lambda join: len(join.args[0]), reverse=True)
    for i, large in enumerate(joins):
        before, in_loop = needed_for([large]), needed_for(carried)
        all_in_loop = in_loop.issuperset(large.args[0])
        for small in joins[i + 1 :]:
            at = _place(small, large)
            if at is None or small in before or (small in in_loop and not all_in_loop):
                continue
            for inside in (True, False):  # each reads a view of its own
                users = [user for user in small.users if (user in in_loop) == inside]
                _replace(graph, small, users, large, at, len(small.args[0]))
        in_loop = needed_for(carried)
        if large in in_loop:
            for at, part in enumerate(large.args[0]):
                users = [user for user in part.users if user not in in_loop | before]
                _replace(graph, part, users, large, at, 1)
    _sort(graph)


def _dim(join: Node) -> int:
    dim = join.args[1] if len(join.args) > 1 else 0
    return int(dim) % value_of(join).dim()


def _place(small: Node, large: Node) -> int | None:
    """Where the parts of a join stand among those of a larger one, one after the other."""
    few, many = small.args[0], large.args[0]
    if len(few) < len(many) and _dim(small) == _dim(large):
        for at in range(len(many) - len(few) + 1):
            if many[at : at + len(few)] == few:
                return at
    return None


def _replace(
    graph: fx.Graph, node: Node, users: list[Node], join: Node, at: int, count: int
) -> None:
    """These users read ``node`` as parts of ``join``, from ``at`` on; a result stays as it is."""
    users = [user for user in users if user.op != "output"]
    if not users:
        return
    dim, parts = _dim(join), join.args[0]
    start = sum(value_of(part).shape[dim] for part in parts[:at])
    size = sum(value_of(part).shape[dim] for part in parts[at : at + count])
    with graph.inserting_after(join):
        view = new_node(graph, aten.slice.Tensor, join, dim, start, start + size)
    for user in users:
        user.replace_input_with(node, view)


def _sort(graph: fx.Graph) -> None:
    """Each node behind what it reads, otherwise as before."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = nx.DiGraph()
    found.add_nodes_from(place)
    found.add_edges_from((arg, node) for node in place for arg in inputs_of(node))
    last = graph.output_node()
    for node in nx.lexicographical_topological_sort(found, key=place.__getitem__):
        if node is not last:
            last.prepend(node)
