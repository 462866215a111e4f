"""A schedule -> blocks: which nodes each block computes, what it reads and what it returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .adjoint import Loop
from .blocks import Block, MapBlock, ScanBlock, ShiftBlock
from .components import Component, is_linear, is_map_stage
from .graphs import CHEAP, VIEWS, Node, aten, extract, inputs_of, is_tuple, nbytes, needed_for
from .time_axis.batching import for_any_length

# A block makes them where it reads them.
CONSTANTS = {aten.full.default, aten.scalar_tensor.default}


@dataclass(frozen=True)
class Schedule:
    """Where each node of a loop runs."""

    loop: Loop
    order: list[Node]  # the nodes to compute at each step, in graph order
    varying: set[Node]  # what differs from step to step, the loop's inputs included
    hoisted: list[Node]
    components: list[Component]
    stage: dict[Node, int]


def make_blocks(schedule: Schedule, results: set[Node]) -> list[Block]:
    """The blocks in the order they run. ``results``: values that are read at every step."""
    read_at_every_step = set(results)
    recurrences: list[ScanBlock | ShiftBlock] = []
    for component in schedule.components:
        if component.recurrent:
            block = scan_block(schedule, component, results)
            read_at_every_step |= set(block.sequences)
            recurrences.append(block)
        else:
            (carry,), (source,) = component.carries, component.next_carries
            recurrences.append(ShiftBlock(carry, source))
    maps: dict[int, list[Node]] = {}
    for node in schedule.order:
        if is_map_stage(schedule.stage[node]):
            maps.setdefault(schedule.stage[node], []).append(node)
    # A map all of whose values moved into a loop has nothing left to do. So build the maps from
    # the last to the first: then it is known what later ones read.
    blocks: list[Block] = []
    for stage in reversed(range(2 * len(recurrences) + 1)):
        if not is_map_stage(stage):
            blocks.append(recurrences[stage // 2])
            continue
        nodes = maps.get(stage, [])
        outputs = [n for n in nodes if n in read_at_every_step and not is_tuple(n)]
        if outputs:
            map_block = _map_block(schedule, outputs, set(nodes))
            read_at_every_step |= set(map_block.sequences)
            blocks.append(map_block)
    for scan in recurrences:
        if isinstance(scan, ScanBlock):
            pairs = zip(scan.carries, scan.next_carries, strict=True)
            scan.history = [not read_at_every_step.isdisjoint(pair) for pair in pairs]
    return blocks[::-1]


def scan_block(schedule: Schedule, component: Component, results: set[Node]) -> ScanBlock:
    """The component's block, but for its ``history``. ``results``: see :func:`make_blocks`."""
    core, carries, next_carries = component.core, component.carries, component.next_carries
    body = _sink(schedule, core, set(carries))
    outside = {arg for n in body for arg in inputs_of(n)} - body - set(carries)
    sequences = [n for n in _in_graph_order(schedule, outside) if n in schedule.varying]

    def is_read_outside(node: Node) -> bool:
        return any(user in schedule.stage and user not in core for user in node.users)

    emits = [
        n
        for n in schedule.order
        if n in core
        and n not in next_carries
        and not is_tuple(n)
        and (n in results or is_read_outside(n))
    ]
    # A view of a parameter is made once, before the loop, so that a backend can lay it out well.
    read = {a for n in body for a in inputs_of(n)} | set(next_carries)
    fixed = read - schedule.varying
    invariants = _in_graph_order(schedule, {n for n in fixed if n.target not in CONSTANTS})
    module = extract(
        [*invariants, *sequences, *carries],
        [*next_carries, *emits, *component.totals],
        schedule.loop.graph,
    )
    return ScanBlock(
        carries,
        next_carries,
        invariants,
        sequences,
        emits,
        history=[],
        linear=is_linear(component),
        module=module,
        totals=component.totals,
        reverse=schedule.loop.reverse,
    )


def _sink(schedule: Schedule, core: set[Node], carries: set[Node]) -> set[Node]:
    """The core, and cheap work of maps that only feeds it, where that reads no more bytes."""
    body = set(core)
    while nodes := _to_sink(schedule, body, carries):
        body.update(nodes)
    return body


def _to_sink(schedule: Schedule, body: set[Node], carries: set[Node]) -> list[Node]:
    """Cheap work that the body reads, and that itself reads no more than it gives; or nothing."""
    varying = schedule.varying
    read = {a for n in body for a in inputs_of(n) if a in varying} - body - carries
    # Those of the same inputs together, such as all chunks of one value.
    by_inputs: dict[frozenset[Node], list[Node]] = {}
    for node in sorted(read, key=lambda n: n.name):
        if node.target in CHEAP | VIEWS and is_map_stage(schedule.stage.get(node, 1)):
            inputs = frozenset(a for a in inputs_of(node) if a in varying) - read
            by_inputs.setdefault(inputs, []).append(node)
    for inputs, nodes in by_inputs.items():
        if sum(map(nbytes, inputs)) <= sum(map(nbytes, nodes)):
            return nodes
    return []


def _map_block(schedule: Schedule, outputs: list[Node], stage_nodes: set[Node]) -> MapBlock:
    """The block that computes ``outputs``, from those of the stage's nodes that they need."""
    body, stack = set(), list(outputs)
    while stack:
        node = stack.pop()
        if node in stage_nodes and node not in body:
            body.add(node)
            stack.extend(inputs_of(node))
    outside = {arg for n in body for arg in inputs_of(n)} - body
    sequences = [n for n in _in_graph_order(schedule, outside) if n in schedule.varying]
    invariants = _invariants(schedule, body)
    module = extract([*invariants, *sequences], outputs, schedule.loop.graph)
    return MapBlock(invariants, sequences, outputs, module, for_any_length(module))


def _in_graph_order(schedule: Schedule, nodes: set[Node]) -> list[Node]:
    return [n for n in schedule.loop.graph.nodes if n in nodes]


def _invariants(schedule: Schedule, nodes: Iterable[Node]) -> list[Node]:
    """The parameters and hoisted values that a map reads; it makes views of them itself."""
    stop = {*schedule.loop.invariants, *schedule.hoisted}
    read = needed_for(
        [a for n in nodes for a in [n, *inputs_of(n)] if a not in schedule.varying], stop
    )
    return _in_graph_order(schedule, read & stop)
