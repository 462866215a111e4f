"""What the forward loop saves for the reverse loop: a minimum cut, weighted by bytes.

The reverse loop reads values of the forward loop. Each can be saved, or recomputed from saved ones.
The cheapest set to save is a minimum cut between what is known anyway (parameters, inputs) and what
the reverse loop reads (as in Chen et al. 2016, and AOTAutograd's min-cut partitioner).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import networkx as nx

from .graphs import (
    CHEAP,
    VIEWS,
    Node,
    compared_with_extremes,
    inputs_of,
    is_getitem,
    is_random,
    is_tuple,
    nbytes,
    needed_for,
)


def values_to_save(
    read: Iterable[Node],
    known: set[Node],
    carried: set[Node],
    free: set[Node],
    *,
    recompute: bool,
) -> list[Node]:
    """values_to_save : forward values read in reverse, known values, carries -> values to save

    ``free`` are values that are in memory anyway; those of them that are read are in the result.
    With ``recompute=False`` only views and cheap elementwise operations are recomputed, but not
    what is compared with a maximum that is saved; with ``recompute=True`` everything but the
    carries and random numbers.

    In the cut's graph a value is an edge from "in" (can be computed) to "out" (can be read);
    cutting it means to save it, and costs its bytes.
    """
    read = list(read)
    graph = nx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    known = known | free
    stack, seen = list(read), set()
    users = (user for node in needed_for(read) for user in (node, *node.users))
    compared = compared_with_extremes(users)
    for node in read:
        if node not in known:
            graph.add_edge((node, "out"), "sink", capacity=math.inf)
    while stack:
        node = stack.pop()
        if node in seen or node in known:
            continue
        seen.add(node)
        # If a view and its base cost the same, the base is saved.
        cost = math.inf if is_tuple(node) else nbytes(node) + (0.5 if node.target in VIEWS else 0)
        graph.add_edge((node, "in"), (node, "out"), capacity=cost)
        cheap = node.target in CHEAP or node.target in VIEWS or is_getitem(node)
        cheap = cheap and node not in compared
        if node in carried or is_random(node) or not (recompute or cheap):
            # Not recomputed; of an operation with several results, its getitems are saved.
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
    return cut + list(free & needed_for(read, stop=[*known, *cut]))
