"""What the forward loop keeps for the reverse loop: a minimum cut, weighted by bytes.

The reverse loop reads values of the forward one. Each can be kept, or computed again from kept
ones. The cheapest set to keep is a minimum cut between what is known anyway (parameters, inputs)
and what the reverse loop reads (as in Chen et al. 2016, and AOTAutograd's min-cut partitioner).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import networkx as nx

from .graphs import (
    CHEAP,
    VIEWS,
    Node,
    inputs_of,
    is_getitem,
    is_random,
    is_tuple,
    nbytes,
    needed_for,
)


def values_to_save(
    wanted: Iterable[Node],
    known: set[Node],
    carried: set[Node],
    free: set[Node],
    *,
    recompute: bool,
) -> list[Node]:
    """values_to_save : forward values read in reverse, known ones, carried state -> kept values

    ``free`` are values that are kept anyway; those that are read are among the kept ones.

    ``recompute=False`` computes only views and cheap elementwise operations again;
    ``recompute=True`` everything but the carried state and random numbers.
    """
    wanted = list(wanted)
    graph = nx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    known = known | free
    stack, seen = list(wanted), set()
    for node in stack:
        if node not in known:
            graph.add_edge((node, "out"), "sink", capacity=math.inf)
    while stack:
        node = stack.pop()
        if node in seen or node in known:
            continue
        seen.add(node)
        # A view is saved as what it looks at, if that costs the same.
        cost = math.inf if is_tuple(node) else nbytes(node) + (0.5 if node.target in VIEWS else 0)
        graph.add_edge((node, "in"), (node, "out"), capacity=cost)
        again = recompute or node.target in CHEAP or node.target in VIEWS
        if node in carried or is_random(node) or not (again or is_getitem(node)):
            if is_tuple(node):
                for user in node.users:
                    graph.add_edge("source", (user, "in"), capacity=math.inf)
            else:
                graph.add_edge("source", (node, "in"), capacity=math.inf)
        for arg in inputs_of(node):
            if arg not in known:
                graph.add_edge((arg, "out"), (node, "in"), capacity=math.inf)
                stack.append(arg)
    _, (reachable, _) = nx.minimum_cut(graph, "source", "sink")
    cut = [node for node in seen if (node, "in") in reachable and (node, "out") not in reachable]
    return cut + list(free & needed_for(wanted, stop=[*known, *cut]))
