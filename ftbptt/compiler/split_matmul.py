"""``cat([x, h]) @ W`` in a recurrence -> ``x @ W_x + h @ W_h``, so that x's part can leave it.

A product belongs to the loop as a whole if one part of its operand does. Split into the parts on
the carry's own cycle and the others, the others are batched over time like any input.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import networkx as nx
from torch import fx

from .graphs import Node, aten, inputs_of, joins_as_they_are, new_node, value_of


def split_products(module: fx.GraphModule, carries: int) -> fx.GraphModule:
    """split_products : step graph ``(..., *carries) -> [..., *next carries]`` -> the same, split"""
    graph = module.graph
    cycles = _Cycles(graph, carries)
    for product in list(graph.nodes):
        if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs:
            continue
        on_cycle = cycles.through(product)
        joined = _joined_columns(product)
        inside = {arg: bool(cycles.reads[arg] & on_cycle) for arg in [*joined, *product.args]}
        if len({inside[part] for part in joined}) == 2 and not inside[product.args[-1]]:
            total = _split(graph, product, joined, inside)
            cycles.reads[total] = cycles.reads[product]  # another product may read it
    graph.eliminate_dead_code()
    module.recompile()
    return module


class _Cycles:
    """Which carries each node reads in its step, and which of them it reaches in later steps."""

    def __init__(self, graph: fx.Graph, count: int) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.carries = inputs[len(inputs) - count :]
        results = graph.output_node().args[0]
        self.afters = list(results[len(results) - count :])
        self.reads: dict[Node, set[int]] = {}
        for node in graph.nodes:
            own = {self.carries.index(node)} if node in self.carries else set()
            self.reads[node] = own.union(*(self.reads[arg] for arg in inputs_of(node)))
        steps = nx.DiGraph()
        steps.add_nodes_from(range(count))
        steps.add_edges_from(
            (i, j) for j, after in enumerate(self.afters) for i in self.reads[after]
        )
        self.later = {i: nx.descendants(steps, i) | {i} for i in range(count)}
        self.feeds: dict[Node, set[int]] = {node: set() for node in graph.nodes}
        for node in reversed(graph.nodes):
            self.feeds[node] |= {j for j, after in enumerate(self.afters) if after is node}
            for arg in inputs_of(node):
                if node.op != "output":
                    self.feeds[arg] |= self.feeds[node]

    def through(self, node: Node) -> set[int]:
        """The carries on a cycle through the node."""
        reached: set[int] = set().union(*(self.later[j] for j in self.feeds[node]))
        return self.reads[node] & reached


_RESHAPES = {aten.reshape.default, aten.view.default, aten.unsqueeze.default}


def _joined_columns(product: Node) -> Sequence[Node]:
    """What lies side by side in the product's left operand."""
    rows = product.args[-2]
    width = value_of(rows).shape[-1]
    while rows.target in _RESHAPES and value_of(rows.args[0]).shape[-1:] == (width,):
        rows = rows.args[0]
    if rows.target is not aten.cat.default or not joins_as_they_are(rows):
        return []
    dim = rows.args[1] if len(rows.args) > 1 else 0
    return rows.args[0] if dim % value_of(rows).dim() == value_of(rows).dim() - 1 else []


def _split(
    graph: fx.Graph, product: Node, joined: Sequence[Node], inside: dict[Node, bool]
) -> Node:
    """One product for each run of parts; those inside the recurrence are added last."""
    *bias, rows, weight = product.args
    runs = [list(run) for _, run in groupby(joined, inside.__getitem__)]
    call = partial(new_node, graph)

    def columns(run: Sequence[Node]) -> Node:
        whole = call(aten.cat.default, list(run), -1) if len(run) > 1 else run[0]
        return call(
            aten.reshape.default, whole, [value_of(rows).shape[0], value_of(whole).shape[-1]]
        )

    with graph.inserting_before(product):
        # Of a transposed weight, the weight itself: the gradient of each part is then contiguous.
        flipped = weight.target is aten.t.default or (
            weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]
        )
        sizes = [sum(value_of(part).shape[-1] for part in run) for run in runs]
        source = weight.args[0] if flipped else weight
        pieces = call(aten.split_with_sizes.default, source, sizes, int(flipped))
        terms = [(inside[own], own) for own in bias]
        for i, run in enumerate(runs):
            piece = call(operator.getitem, pieces, i)
            piece = call(aten.t.default, piece) if flipped else piece
            terms.append((inside[run[0]], call(aten.mm.default, columns(run), piece)))
        total, *rest = [term for _, term in sorted(terms, key=lambda term: term[0])]
        for term in rest:
            total = call(aten.add.Tensor, total, term)
    product.replace_all_uses_with(total)
    return total
