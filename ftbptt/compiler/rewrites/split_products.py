"""``cat([x, h]) @ W`` in a recurrence -> ``x @ W_x + h @ W_h``, so that x's part can leave it.

A product is in the loop if any part of its operand is. Split into the parts on the carry's cycle
and the others, the others are batched over time like any input. A convolution of concatenated
channels is such a product too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import networkx as nx
from torch import fx

from ..graphs import Node, aten, contains_parts_unchanged, inputs_of, join_axis, new_node, value_of

_Terms = list[tuple[bool, Node]]  # each with whether it is inside the recurrence


def split_products(module: fx.GraphModule, carries: int) -> fx.GraphModule:
    """split_products : step graph ``(..., *carries) -> [..., *next carries]`` -> the same, split"""
    graph = module.graph
    cycles = _Cycles(graph, carries)
    for product in list(graph.nodes):
        if product.target not in _RULES or product.kwargs:
            continue
        rule = _RULES[product.target]
        on_cycle = cycles.through(product)
        parts = rule.parts(product)
        inside = {arg: bool(cycles.reads[arg] & on_cycle) for arg in [*parts, *inputs_of(product)]}
        is_mixed = len({inside[part] for part in parts}) == 2
        if is_mixed and not inside[product.args[rule.weight]]:
            with graph.inserting_before(product):
                total = _sum(graph, rule.terms(product, parts, inside))
            product.replace_all_uses_with(total)
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


def _sum(graph: fx.Graph, terms: _Terms) -> Node:
    """The sum of terms; those inside the recurrence (true) are added last."""
    total, *rest = [term for _, term in sorted(terms, key=lambda term: term[0])]
    for term in rest:
        total = new_node(graph, aten.add.Tensor, total, term)
    return total


def _runs(parts: Sequence[Node], inside: dict[Node, bool]) -> list[list[Node]]:
    """The neighbouring parts that are alike."""
    return [list(run) for _, run in groupby(parts, inside.__getitem__)]


def _pieces(
    graph: fx.Graph, weight: Node, axis: int, runs: list[list[Node]], part_axis: int
) -> list[Node]:
    """The weight's share of each run of parts."""
    sizes = [sum(value_of(part).shape[part_axis] for part in run) for run in runs]
    pieces = new_node(graph, aten.split_with_sizes.default, weight, sizes, axis)
    return [new_node(graph, operator.getitem, pieces, i) for i in range(len(runs))]


def _joined(graph: fx.Graph, run: list[Node], axis: int) -> Node:
    return new_node(graph, aten.cat.default, run, axis) if len(run) > 1 else run[0]


# -- products of matrices ------------------------------------------------------------------------

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


def _column_terms(product: Node, parts: Sequence[Node], inside: dict[Node, bool]) -> _Terms:
    """A product for each run of columns, and the bias."""
    graph = product.graph
    *bias, operand, weight = product.args
    # Split a transposed weight before the transpose: each part's gradient is then contiguous.
    is_transposed = weight.target is aten.t.default or (
        weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]
    )
    source, axis = (weight.args[0], 1) if is_transposed else (weight, 0)
    terms = [(inside[term], term) for term in bias]
    runs = _runs(parts, inside)
    for run, piece in zip(runs, _pieces(graph, source, axis, runs, -1), strict=True):
        columns = _joined(graph, run, -1)
        shape = [value_of(operand).shape[0], value_of(columns).shape[-1]]
        rows = new_node(graph, aten.reshape.default, columns, shape)
        factor = new_node(graph, aten.t.default, piece) if is_transposed else piece
        terms.append((inside[run[0]], new_node(graph, aten.mm.default, rows, factor)))
    return terms


# -- convolutions ----------------------------------------------------------------------------------


def _channel_parts(product: Node) -> Sequence[Node]:
    """What is concatenated along the channels of a convolution's input, if anything is."""
    x, groups = product.args[0], product.args[-1]
    is_join = x.target is aten.cat.default and contains_parts_unchanged(x) and join_axis(x) == 1
    return x.args[0] if is_join and groups == 1 else []


def _channel_terms(product: Node, parts: Sequence[Node], inside: dict[Node, bool]) -> _Terms:
    """A convolution for each run of channels; one of them adds the bias."""
    graph = product.graph
    _, weight, bias, *options = product.args
    is_transposed = options[3]
    bias_inside = bias is not None and inside[bias]
    terms: _Terms = []
    runs = _runs(parts, inside)
    for run, piece in zip(runs, _pieces(graph, weight, 1 - is_transposed, runs, 1), strict=True):
        own_bias = None
        if inside[run[0]] == bias_inside:
            own_bias, bias = bias, None
        channels = _joined(graph, run, 1)
        value = new_node(graph, product.target, channels, piece, own_bias, *options)
        terms.append((inside[run[0]], value))
    return terms


class _Rule(NamedTuple):
    """How a product is split: its parts, the terms for them, and which argument is the weight."""

    parts: Callable[[Node], Sequence[Node]]
    terms: Callable[[Node, Sequence[Node], dict[Node, bool]], _Terms]
    weight: int


_RULES = {
    aten.mm.default: _Rule(_column_parts, _column_terms, weight=-1),
    aten.addmm.default: _Rule(_column_parts, _column_terms, weight=-1),
    aten.convolution.default: _Rule(_channel_parts, _channel_terms, weight=1),
}
