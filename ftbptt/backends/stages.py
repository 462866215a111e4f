"""A step as stages: compiled functions, and between them the matrix products.

In one compiled function Inductor has a product write to memory of its own and copies the result to
where the step wants it, and likewise what a product reads: a third of all bytes that the reverse
step of an LSTM moves on a GPU. Here products and functions write to where their results belong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..compiler.graphs import (
    VIEWS,
    Node,
    aten,
    compared_with_extremes,
    contains_parts_unchanged,
    extract,
    inputs_of,
    is_getitem,
    is_random,
    join_axis,
    value_of,
)

_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
}


class Part(NamedTuple):
    """A tensor of the memory, or of its ranges (axis, first, length), each of the one before."""

    place: int
    ranges: tuple[tuple[int, int, int], ...] = ()

    def of(self, memory: Sequence[Tensor]) -> Tensor:
        tensor = memory[self.place]
        for axis, first, length in self.ranges:
            tensor = tensor.narrow(axis, first, length)
        return tensor


@dataclass(frozen=True)
class Operand:
    """What a product reads: a view of a part of the memory, by these operations."""

    part: Part
    views: list[Node]

    def of(self, memory: Sequence[Tensor]) -> Tensor:
        tensor = self.part.of(memory)
        for view in self.views:
            tensor = view.target(tensor, *view.args[1:], **view.kwargs)
        return tensor


@dataclass(frozen=True)
class Product:
    function: Callable[..., Tensor]
    operands: list[Operand]
    target: Part


@dataclass(frozen=True)
class Stage:
    """``module(*inputs) -> [*results for the targets]``, and then products."""

    module: fx.GraphModule
    inputs: list[Part]
    targets: list[Part]
    products: list[Product]

    def arguments(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """Of ``function``: the inputs of the module, and its targets."""
        return [part.of(memory) for part in (*self.inputs, *self.targets)]

    def function(self, *arguments: Tensor) -> list[Tensor]:
        """The module, whose results are written to the targets. Also returns these."""
        count = len(self.inputs)
        inputs, targets = arguments[:count], arguments[count:]
        for target, result in zip(targets, self.module(*inputs), strict=True):
            target.copy_(result)
        return list(targets)

    def run(self, memory: Sequence[Tensor], function: Callable[..., list[Tensor]]) -> None:
        """``function``: the stage's own, or the same compiled."""
        if self.targets:
            function(*self.arguments(memory))
        for product in self.products:
            operands = [operand.of(memory) for operand in product.operands]
            product.function(*operands, out=product.target.of(memory))


class Stages:
    """The stages of a step, in the order they run, on a memory of tensors.

    It begins with the inputs of the step, then the targets of its results, then ``scratch``.
    """

    def __init__(self, graph: fx.Graph) -> None:
        inputs = list(graph.find_nodes(op="placeholder"))
        outputs: list[Node] = list(graph.output_node().args[0])
        self._stage = _stages(graph)
        self._compared = compared_with_extremes(graph.nodes)
        self._part = {node: Part(i) for i, node in enumerate(inputs)}
        self.scratch: list[Node] = []
        self._first_scratch = len(inputs) + len(outputs)
        # What the function of a stage writes, and where.
        self._results: dict[int, list[tuple[Node, Part]]] = defaultdict(list)
        for place, node in enumerate(outputs, len(inputs)):
            self._put(node, Part(place))
        products: dict[int, list[Product]] = defaultdict(list)
        for node in filter(_is_product, graph.nodes):
            self._keep(node)
            operands = [self._operand(arg) for arg in node.args]
            product = Product(_PRODUCTS[node.target], operands, self._part[node])
            products[self._stage[node]].append(product)
        last = max((*self._results, *products), default=0)
        stages = [self._make(i, graph, products[i]) for i in range(last, -1, -1)]
        self.stages = stages[::-1]

    def _put(self, node: Node, part: Part) -> None:
        """Has the node's value written to a part of the memory.

        The parts of a ``cat`` each on its own: Inductor computes one for every element of it, with
        all that its parts have in common.
        """
        if node in self._part:  # a copy
            self._results[self._stage[node] + _is_product(node)].append((node, part))
            return
        self._part[node] = part
        if node.target is aten.cat.default and contains_parts_unchanged(node):
            axis, first = join_axis(node), 0
            for piece in node.args[0]:
                length = value_of(piece).shape[axis]
                # A part may be a ``cat`` as well, of which this is where its own parts go.
                self._put(piece, Part(part.place, (*part.ranges, (axis, first, length))))
                first += length
        elif not _is_product(node):
            self._results[self._stage[node]].append((node, part))

    def _keep(self, node: Node) -> None:
        """Gives the node's value a place in memory."""
        if node not in self._part:
            self.scratch.append(node)
            self._put(node, Part(self._first_scratch + len(self.scratch) - 1))

    def _operand(self, node: Node) -> Operand:
        views: list[Node] = []
        while node.target in VIEWS:
            views.insert(0, node)
            node = node.args[0]
        self._keep(node)
        return Operand(self._part[node], views)

    def _make(self, number: int, graph: fx.Graph, products: list[Product]) -> Stage:
        """A stage, made after those that come later, and so need its results."""
        nodes = [node for node, _ in self._results[number]]
        inputs = list(dict.fromkeys(self._inputs(number, nodes)))
        parts = [self._part[node] for node in inputs]
        targets = [part for _, part in self._results[number]]
        return Stage(extract(inputs, nodes, graph), parts, targets, products)

    def _inputs(self, number: int, results: list[Node]) -> Iterator[Node]:
        """What a stage reads. What is cheap it computes again, rather than read it, but not what
        is compared with a maximum: in 16 bits only what was written is rounded as that is.
        """
        seen, stack = set[Node](), list(results)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            is_earlier = self._stage[node] < number
            if is_earlier and (node in self._compared or not _is_cheap(node)):
                self._keep(node)
            if node.op == "placeholder" or (node in self._part and is_earlier):
                yield node
            else:
                stack.extend(inputs_of(node))


def _stages(graph: fx.Graph) -> dict[Node, int]:
    """The stage in which each node is computed.

    A product in the first one possible. Anything else in the first one that needs it, so that one
    kernel computes what is read together.
    """
    first: dict[Node, int] = {}
    for node in graph.nodes:
        first[node] = max((first[arg] + _is_product(arg) for arg in inputs_of(node)), default=0)
    stages = dict(first)
    for node in reversed(graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        if users and not _is_product(node):
            stages[node] = min(stages[user] for user in users)
        # Several results are written where they are computed: together they have no memory.
        stages |= dict.fromkeys(filter(is_getitem, users), stages[node])
    return stages


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS


def _is_cheap(node: Node) -> bool:
    """Whether its value is computed as fast as it is read from memory."""
    is_elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return (is_elementwise and not is_random(node)) or node.target in VIEWS
