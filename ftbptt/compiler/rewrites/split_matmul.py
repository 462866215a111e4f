"""``cat([x, h]) @ W`` in a recurrence -> ``x @ W_x + h @ W_h``, so that x's part can leave it.

A product is in the loop if any part of its operand is. Split into the parts on the carry's cycle
and the others, the others are batched over time like any input.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import networkx as nx
from torch import fx

from ..graphs import Node, aten, contains_parts_unchanged, inputs_of, join_axis, new_node, value_of


def split_products(module: fx.GraphModule, carries: int) -> fx.GraphModule:
    """split_products : step graph ``(..., *carries) -> [..., *next carries]`` -> the same, split"""
    graph = module.graph
    cycles = _Cycles(graph, carries)
    for product in list(graph.nodes):
        if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs:
            continue
        on_cycle = cycles.through(product)
        parts = _column_parts(product)
        inside = {arg: bool(cycles.reads[arg] & on_cycle) for arg in [*parts, *product.args]}
        weight = product.args[-1]
        if len({inside[part] for part in parts}) == 2 and not inside[weight]:
            total = _split(graph, product, parts, inside)
            cycles.reads[total] = cycles.reads[product]  # another product may read it
    graph.eliminate_dead_code()
    module.recompile()
    return module


class _Cycles:
    """Which carries each node depends on within a step, and which it reaches in later steps.

    Sets hold the positions of carries: ``reads`` by node what it depends on, ``feeds`` by node the
    next carries that depend on it, ``later`` by carry those it reaches, itself included.
    """

    def __init__(self, graph: fx.Graph, count: int) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.carries = inputs[len(inputs) - count :]
        results = graph.output_node().args[0]
        self.next_carries = list(results[len(results) - count :])
        self.reads: dict[Node, set[int]] = {}
        for node in graph.nodes:
            carry = {self.carries.index(node)} if node in self.carries else set()
            self.reads[node] = carry.union(*(self.reads[arg] for arg in inputs_of(node)))
        steps = nx.DiGraph()
        steps.add_nodes_from(range(count))
        steps.add_edges_from(
            (i, j) for j, after in enumerate(self.next_carries) for i in self.reads[after]
        )
        self.later = {i: nx.descendants(steps, i) | {i} for i in range(count)}
        self.feeds: dict[Node, set[int]] = {node: set() for node in graph.nodes}
        for node in reversed(graph.nodes):
            self.feeds[node] |= {j for j, after in enumerate(self.next_carries) if after is node}
            for arg in inputs_of(node):
                if node.op != "output":
                    self.feeds[arg] |= self.feeds[node]

    def through(self, node: Node) -> set[int]:
        """The carries on a cycle through the node."""
        reached: set[int] = set().union(*(self.later[j] for j in self.feeds[node]))
        return self.reads[node] & reached


_RESHAPES = {aten.reshape.default, aten.view.default, aten.unsqueeze.default}


def _column_parts(product: Node) -> Sequence[Node]:
    """What is concatenated along the columns of the product's left operand, if anything is."""
    operand = product.args[-2]
    width = value_of(operand).shape[-1]
    while operand.target in _RESHAPES and value_of(operand.args[0]).shape[-1:] == (width,):
        operand = operand.args[0]
    if operand.target is not aten.cat.default or not contains_parts_unchanged(operand):
        return []
    return operand.args[0] if join_axis(operand) == value_of(operand).dim() - 1 else []


def _split(graph: fx.Graph, product: Node, parts: Sequence[Node], inside: dict[Node, bool]) -> Node:
    """The sum of a product for each run of parts; those inside the recurrence are added last."""
    *bias, operand, weight = product.args
    runs = [list(run) for _, run in groupby(parts, inside.__getitem__)]
    call = partial(new_node, graph)

    def columns(run: Sequence[Node]) -> Node:
        joined = call(aten.cat.default, list(run), -1) if len(run) > 1 else run[0]
        shape = [value_of(operand).shape[0], value_of(joined).shape[-1]]
        return call(aten.reshape.default, joined, shape)

    with graph.inserting_before(product):
        # Split a transposed weight before the transpose: each part's gradient is then contiguous.
        transposed = weight.target is aten.t.default or (
            weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]
        )
        sizes = [sum(value_of(part).shape[-1] for part in run) for run in runs]
        source = weight.args[0] if transposed else weight
        pieces = call(aten.split_with_sizes.default, source, sizes, int(transposed))
        terms = [(inside[term], term) for term in bias]
        for i, run in enumerate(runs):
            piece = call(operator.getitem, pieces, i)
            piece = call(aten.t.default, piece) if transposed else piece
            terms.append((inside[run[0]], call(aten.mm.default, columns(run), piece)))
        total, *rest = [term for _, term in sorted(terms, key=lambda term: term[0])]
        for term in rest:
            total = call(aten.add.Tensor, total, term)
    product.replace_all_uses_with(total)
    return total
