"""Loop fusion: work after a recurrence is done inside it, where that moves fewer bytes.

Distribution takes out of a loop everything that can leave it. Where the loop is one kernel, work on
values that the kernel has in registers is cheaper inside (Kennedy and McKinley 1993): for example
the normalized activations that layer norm saves, instead of their inputs. What to do inside is a
minimum cut between the loop and the work that has to stay outside. The weights are the bytes that
one writes and the other reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx

from .graphs import Node, aten, inputs_of, nbytes, value_of


@dataclass(frozen=True)
class Fusion:
    """What a backend's loops can take in.

    ``expand(graph)`` replaces operations by others that kernels have. ``operation(node)``: whether
    a kernel can compute it, given its operands; ``rows(scan block, reverse)``: the leading axes
    that its kernel computes in parallel, None if it has no kernel.
    """

    expand: Callable[[fx.Graph], None]
    operation: Callable[[Node], bool]
    rows: Callable[[Any, bool], tuple[int, ...] | None]


def keeps_rows(node: Node, rows: Sequence[int]) -> bool:
    """Whether the leading axes of the node's value are still the batch axes ``rows``.

    They may be one axis, as in the batch of a product.
    """
    shape = value_of(node).shape
    for n in range(1 if rows else 0, len(shape) + 1):
        if math.prod(shape[:n]) == math.prod(rows):
            moves = node.target is aten.permute.default
            return not moves or list(node.args[1][:n]) == list(range(n))
    return False


def fused_nodes(
    inside: set[Node],
    after: Iterable[Node],
    can_move: Callable[[Node], bool],
    read_elsewhere: Callable[[Node], bool],
    stored: set[Node],
) -> tuple[set[Node], float]:
    """fused_nodes : values of a loop, nodes that read them -> (those to compute in it, bytes moved)

    ``read_elsewhere``: whether nodes other than ``after`` read a value. ``stored`` are values that
    are written to memory in any case, so that only reading them costs.

    In the cut's graph a value is an edge from "in" (computed) to "out" (in memory); cutting it
    costs its bytes. On the loop's side of the cut, "in" means: computed in the loop.
    """
    after = list(after)
    candidates = inside | set(after)
    graph = nx.DiGraph()
    graph.add_node("loop")
    graph.add_node("outside")
    values: set[Node] = set()
    for node in after:
        values.add(node)
        if not can_move(node):
            graph.add_edge((node, "in"), "outside", capacity=math.inf)
        for arg in inputs_of(node):
            if arg in candidates:
                values.add(arg)
                # Outside, the node needs the argument in memory; inside, computed there too.
                graph.add_edge((arg, "out"), (node, "in"), capacity=math.inf)
                graph.add_edge((node, "in"), (arg, "in"), capacity=math.inf)
    for value in values:
        cost = nbytes(value) * (1 if value in stored else 2)  # read, or written and read
        graph.add_edge((value, "in"), (value, "out"), capacity=cost)
        if value in inside:
            graph.add_edge("loop", (value, "in"), capacity=math.inf)
        if read_elsewhere(value):
            graph.add_edge((value, "out"), "outside", capacity=math.inf)
    moved_bytes, (fused, _) = nx.minimum_cut(graph, "loop", "outside")
    return {node for node in after if (node, "in") in fused}, moved_bytes
