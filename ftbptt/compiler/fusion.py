"""Loop fusion: what follows a recurrence is done in it, where that hands on fewer bytes.

Distribution takes everything out of a loop that need not be there. Where the loop is one kernel,
work on what it has at hand is cheaper inside (Kennedy and McKinley 1993): the normalised
activations that layer norm saves, say, in place of what they are made of. What to do inside is
a minimum cut between the loop and the work that has to stay outside, weighted by the bytes that
are written by the one and read by the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from .graphs import Node, aten, inputs_of, nbytes, value_of


@dataclass(frozen=True)
class Fusion:
    """What loops of a kind can take in: ``operation(node)``, and ``loop(scan block, reverse)``."""

    operation: Callable[[Node], bool]
    loop: Callable[[Any, bool], bool]


def keeps_rows(node: Node, rows: Sequence[int]) -> bool:
    """Whether the leading axes of the node's value are still those of the loop's rows."""
    n = len(rows)
    moves = node.target is aten.permute.default and list(node.args[1][:n]) != list(range(n))
    return not moves and tuple(value_of(node).shape[:n]) == tuple(rows)


def fused_nodes(
    inside: set[Node],
    behind: Iterable[Node],
    can_move: Callable[[Node], bool],
    read_elsewhere: Callable[[Node], bool],
    kept: set[Node],
) -> set[Node]:
    """fused_nodes : values of a loop, nodes that could follow -> those to do in the loop

    ``read_elsewhere``: whether others than ``behind`` read a value; ``kept`` are values that are in
    memory in any case, so that only reading them costs.
    """
    behind = list(behind)
    own = inside | set(behind)
    graph = nx.DiGraph()
    graph.add_node("loop")
    graph.add_node("outside")
    values: set[Node] = set()
    for node in behind:
        values.add(node)
        if not can_move(node):
            graph.add_edge((node, "in"), "outside", capacity=math.inf)
        for arg in inputs_of(node):
            if arg in own:
                values.add(arg)
                graph.add_edge((arg, "out"), (node, "in"), capacity=math.inf)
                graph.add_edge((node, "in"), (arg, "in"), capacity=math.inf)
    for value in values:
        cost = nbytes(value) * (1 if value in kept else 2)
        graph.add_edge((value, "in"), (value, "out"), capacity=cost)
        if value in inside:
            graph.add_edge("loop", (value, "in"), capacity=math.inf)
        if read_elsewhere(value):
            graph.add_edge((value, "out"), "outside", capacity=math.inf)
    _, (fused, _) = nx.minimum_cut(graph, "loop", "outside")
    return {node for node in behind if (node, "in") in fused}
