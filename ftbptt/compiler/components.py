"""The recurrences of a loop, and when each node runs: the analysis behind loop distribution.

"Next state j reads state i" is a graph on the carries. Its strongly connected components are the
only true recurrences (Allen and Kennedy 1987). They run in topological order. The maps, which need
no carry, run before, between and after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx

from .adjoint import Loop
from .graphs import (
    Node,
    aten,
    inputs_of,
    is_getitem,
    is_tuple,
    needed_for,
    reachable_from,
    value_of,
)


@dataclass(frozen=True)
class Component:
    """A strongly connected component of the carries, number ``index`` in topological order.

    ``core`` are the nodes that its scan block must compute: those from its carries to its next
    carries, and what fusion moved there (``fused``). ``totals`` are the sums that it computes.
    """

    index: int
    carries: list[Node]
    next_carries: list[Node]
    recurrent: bool  # False: a single carry that does not read itself
    core: set[Node]
    fused: set[Node] = field(default_factory=set)
    totals: list[Node] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return 2 * self.index + 1

    @property
    def stage_after(self) -> int:
        """The first maps that can read its carries at every step."""
        return self.stage + 1


def is_map_stage(stage: int) -> bool:
    """Stages are numbered in the order they run: map 0, component 0, map 1, component 1, ..."""
    return stage % 2 == 0


def find_components(loop: Loop, order: list[Node]) -> list[Component]:
    """The components of the graph "next carry j reads carry i", each after those it reads."""
    reads = {carry: 1 << i for i, carry in enumerate(loop.carries)}  # a bit for each carry
    for node in order:
        mask = 0
        for arg in inputs_of(node):
            mask |= reads.get(arg, 0)
        reads[node] = mask
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(loop.carries)))
    for j, next_carry in enumerate(loop.next_carries):
        mask = reads.get(next_carry, 0)
        graph.add_edges_from((i, j) for i in range(len(loop.carries)) if mask >> i & 1)
    condensed = nx.condensation(graph)
    members = nx.get_node_attributes(condensed, "members")
    topological = nx.lexicographical_topological_sort(condensed, key=lambda c: min(members[c]))
    components = []
    for index, number in enumerate(topological):
        positions = sorted(members[number])
        carries = [loop.carries[i] for i in positions]
        next_carries = [loop.next_carries[i] for i in positions]
        recurrent = len(positions) > 1 or graph.has_edge(positions[0], positions[0])
        core = _core(loop, order, carries, next_carries) if recurrent else set()
        components.append(Component(index, carries, next_carries, recurrent, core))
    return components


def _core(
    loop: Loop, order: list[Node], carries: list[Node], next_carries: list[Node]
) -> set[Node]:
    """The nodes on a path from these carries to these next carries."""
    inputs = [*loop.invariants, *loop.sequences, *loop.carries]
    from_carry = reachable_from(carries, order) - set(loop.carries)
    core = from_carry & needed_for(next_carries, stop=inputs)
    return core | {u for n in core if is_tuple(n) for u in n.users if u in from_carry}


def assign_stages(order: list[Node], components: list[Component]) -> dict[Node, int]:
    """The stage of each node: its component's, or the earliest map that its inputs allow."""
    stage: dict[Node, int] = {}
    core_stage = {node: c.stage for c in components for node in c.core}
    carry_ready = {carry: c.stage_after for c in components for carry in c.carries}

    def ready(arg: Node) -> int:
        """The first map that can read a value."""
        if arg in carry_ready:
            return carry_ready[arg]
        made = stage.get(arg, 0)  # inputs of the loop are ready for the first
        return made if is_map_stage(made) else made + 1

    for node in order:
        if node in core_stage:
            stage[node] = core_stage[node]
        elif is_getitem(node) and node.args[0] in stage:
            stage[node] = stage[node.args[0]]  # in the same block as its operation
        else:
            stage[node] = max(map(ready, inputs_of(node)), default=0)
    return stage


_LINEAR = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default,
           aten.where.self}  # fmt: skip


def is_linear(component: Component) -> bool:
    """Whether its next carry is elementwise affine in its one carry."""
    if len(component.carries) > 1:
        return False
    (carry,), core = component.carries, component.core - component.fused
    inside = core | {carry}
    shape = value_of(carry).shape
    for node in core:
        if node.target not in _LINEAR or value_of(node).shape != shape:
            return False
        is_product = node.target in (aten.mul.Tensor, aten.div.Tensor)
        if is_product and sum(arg in inside for arg in node.args) != 1:
            return False
        if node.target is aten.div.Tensor and node.args[0] not in inside:
            return False
        if node.target is aten.where.self and node.args[0] in inside:
            return False
    return bool(core)
