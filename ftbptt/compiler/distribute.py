"""Loop -> blocks: loop distribution (Allen and Kennedy 1987) on the graph of one step.

Each true recurrence (see ``components``) becomes a scan block, with only the nodes on a path from
its carries to its next carries. Everything else is in map blocks, batched over time. A carry that
never feeds itself is a shift of a sequence: no loop at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .adjoint import Loop
from .components import Component, assign_stages, find_components, is_linear, is_map_stage
from .fusion import Fusion, fused_nodes, keeps_rows
from .graphs import (
    CHEAP,
    GEMMS,
    VIEWS,
    Node,
    aten,
    extract,
    inputs_of,
    is_outer_product,
    is_tuple,
    nbytes,
    needed_for,
    skip_identities,
    varying_with,
)
from .time_axis.batching import for_any_length
from .time_axis.reduction import BatchSum, Term, time_sum
from .tracing.trace import TRACING


@dataclass
class MapBlock:
    """A block without a carry: all K steps in one batched call.

    ``module(*invariants, *sequences) -> [*outputs]`` is one step of it, and ``batched`` the same
    in operations that vmap well over time.
    """

    invariants: list[Node]
    sequences: list[Node]
    outputs: list[Node]
    module: fx.GraphModule
    batched: fx.GraphModule


@dataclass(eq=False)
class ScanBlock:
    """A true recurrence: K dependent steps.

    ``module(*invariants, *sequences, *carries) -> [*next carries, *emits]`` is one step of it.
    ``history`` flags the carries whose value at every step is read elsewhere. ``linear``: the next
    carry is elementwise affine in the carry. ``totals``, which follow the emits in the module, are
    sums over the batch that are returned summed over the steps.
    """

    carries: list[Node]
    next_carries: list[Node]
    invariants: list[Node]
    sequences: list[Node]
    emits: list[Node]
    history: list[bool]
    linear: bool
    module: fx.GraphModule
    totals: list[Node] = field(default_factory=list)


@dataclass
class ShiftBlock:
    """A carry that is a value of the previous step (a delay line): its sequence is a shift."""

    carry: Node
    source: Node


Block = MapBlock | ScanBlock | ShiftBlock
# A block makes them where it reads them.
_CONSTANTS = {aten.full.default, aten.scalar_tensor.default}


@dataclass
class DistributedLoop:
    """A loop as blocks in the order they run, and the sums over its steps.

    ``hoisted(*invariants) -> values of hoisted_nodes`` runs once, before the blocks.
    """

    loop: Loop
    hoisted_nodes: list[Node]
    hoisted: fx.GraphModule | None
    blocks: list[Block]
    sums: list[Term]


@dataclass(frozen=True)
class _Schedule:
    """Where each node of a loop runs."""

    loop: Loop
    order: list[Node]  # the nodes to compute at each step, in graph order
    varying: set[Node]  # what differs from step to step, the loop's inputs included
    hoisted: list[Node]
    components: list[Component]
    stage: dict[Node, int]


def distribute(loop: Loop, fusion: Fusion | None = None) -> DistributedLoop:
    """distribute : Loop, what its scan blocks can take in -> DistributedLoop

    A 3-layer LSTM becomes three scan blocks, with the input GEMM of each layer in a map between.
    Rewrites operations of the loop's graph, which other loops share, by others of equal results.
    """
    with TRACING:  # not while another thread reads or rewrites the graph
        return _distribute(loop, fusion)


def _distribute(loop: Loop, fusion: Fusion | None) -> DistributedLoop:
    skip_identities(loop.graph)
    if fusion is not None:
        fusion.expand(loop.graph)
    inputs = [*loop.invariants, *loop.sequences, *loop.carries]
    varying = varying_with([*loop.sequences, *loop.carries], loop.graph)
    # First, since it adds nodes (transposes) to the graph and to ``varying``.
    sums = [time_sum(node, varying, set(inputs)) for node in loop.summed]
    results = [*loop.next_carries, *loop.stacked, *_read_by(sums)]
    needed = needed_for(results, stop=inputs)
    # Results of an operation with several are read through getitem, also where none is needed.
    needed |= {
        u for n in needed if is_tuple(n) for u in n.users if any(v in needed for v in u.users)
    }
    computed = needed - set(inputs)
    order = [n for n in loop.graph.nodes if n in computed]
    for node in order:
        if is_outer_product(node):
            node.target = aten.mul.Tensor
    hoisted = [n for n in order if n not in varying and _is_heavy(n, inputs)]
    hoisted = [n for n in hoisted if n in results or any(u in varying for u in n.users)]
    order = [n for n in order if n in varying]
    components = find_components(loop, order)
    stage = assign_stages(order, components)
    schedule = _Schedule(loop, order, varying, hoisted, components, stage)
    if fusion is not None:
        for component in components:
            if component.recurrent:
                schedule, sums = _fuse(schedule, component, sums, fusion)
    blocks = _make_blocks(schedule, _at_every_step(schedule, sums))
    module = extract(loop.invariants, hoisted, loop.graph) if hoisted else None
    return DistributedLoop(loop, hoisted, module, blocks, sums)


def _read_by(sums: Iterable[Term]) -> list[Node]:
    """What the sums read at every step."""
    return [node for total in sums for term in total.terms() for node in term.sequences()]


def _batch_sums(schedule: _Schedule, sums: Iterable[Term]) -> list[BatchSum]:
    """Those that a loop can return summed over the steps: no step reads them."""
    terms = (term for total in sums for term in total.terms())
    return [
        term
        for term in terms
        if isinstance(term, BatchSum) and not any(u in schedule.stage for u in term.node.users)
    ]


def _at_every_step(schedule: _Schedule, sums: list[Term]) -> set[Node]:
    """Values that must exist as a sequence, whichever block computes them."""
    shifted = {c.next_carries[0] for c in schedule.components if not c.recurrent}
    return {*schedule.loop.stacked, *shifted, *_read_by(sums)}


def _fuse(
    schedule: _Schedule, component: Component, sums: list[Term], fusion: Fusion
) -> tuple[_Schedule, list[Term]]:
    """Moves into a recurrence what it can take in of the map after it, and of the sums.

    Returns the schedule and the sums as they are if there is nothing to move, or if the backend
    cannot make one kernel of the result.
    """
    loop = schedule.loop

    def rows_of(schedule: _Schedule, component: Component, sums: list[Term]) -> Any:
        block = _scan_block(schedule, component, _at_every_step(schedule, sums))
        block.history = [True] * len(component.carries)  # at most: what is read is not yet known
        return fusion.rows(block, loop.reverse)

    rows = rows_of(schedule, component, sums)
    if rows is None:
        return schedule, sums
    # Of fewer axes as rows, there are more sums that a row can take.
    lengths = range(len(rows), min(len(rows), 1) - 1, -1)
    choices = [_movable(schedule, component, sums, fusion, rows[:n]) for n in lengths]
    for n, (moved, _) in sorted(
        zip(lengths, choices, strict=True), key=lambda choice: choice[1][1]
    ):
        if not moved:
            break
        fused = _with_moved(schedule, component, sums, moved)
        if rows_of(*fused) == rows[:n]:
            return fused[0], fused[2]
    return schedule, sums


def _movable(
    schedule: _Schedule, component: Component, sums: list[Term], fusion: Fusion, rows: Sequence[int]
) -> tuple[set[Node], float]:
    """(what is best done inside the recurrence, the bytes that are moved then)"""
    stage = schedule.stage
    inside = {*component.core, *component.carries, *component.next_carries}
    map_after = [n for n in schedule.order if stage[n] == component.stage_after]
    summed_here = {*inside, *map_after}
    totals = {term.node for term in _batch_sums(schedule, sums) if term.summed in summed_here}
    readers = {*component.core, *map_after, *totals}

    def can_move(node: Node) -> bool:
        if node.target in GEMMS and node.args[1] not in schedule.varying:
            return False  # with a weight: one GEMM over all steps
        return node in totals or (fusion.operation(node) and keeps_rows(node, rows))

    def read_elsewhere(node: Node) -> bool:
        return any(user in stage and user not in readers for user in node.users)

    stored = _at_every_step(schedule, [term.with_totals(totals) for term in sums])
    return fused_nodes(inside, [*map_after, *totals], can_move, read_elsewhere, stored)


def _with_moved(
    schedule: _Schedule, component: Component, sums: list[Term], moved: set[Node]
) -> tuple[_Schedule, Component, list[Term]]:
    """The schedule with these nodes in the recurrence, the recurrence, and the sums left."""
    graph = schedule.loop.graph
    totals = {term.node for term in _batch_sums(schedule, sums)} & moved
    fused_component = replace(
        component,
        core=component.core | (moved - totals),
        fused=moved,
        totals=[n for n in graph.nodes if n in totals],
    )
    components = list(schedule.components)
    components[component.index] = fused_component
    fused_schedule = replace(
        schedule,
        components=components,
        stage=schedule.stage | dict.fromkeys(moved - totals, component.stage),
    )
    return fused_schedule, fused_component, [term.with_totals(totals) for term in sums]


def _is_heavy(node: Node, inputs: list[Node]) -> bool:
    """Work on invariants that a block should not repeat: not a view, not a constant."""
    light = VIEWS | _CONSTANTS
    return any(n.target not in light and n not in inputs for n in needed_for([node], stop=inputs))


def _make_blocks(schedule: _Schedule, results: set[Node]) -> list[Block]:
    """The blocks in the order they run. ``results``: values that are read at every step."""
    read_at_every_step = set(results)
    recurrences: list[ScanBlock | ShiftBlock] = []
    for component in schedule.components:
        if component.recurrent:
            block = _scan_block(schedule, component, results)
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


def _scan_block(schedule: _Schedule, component: Component, results: set[Node]) -> ScanBlock:
    """The component's block, but for its ``history``. ``results``: see :func:`_make_blocks`."""
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
    invariants = _in_graph_order(schedule, {n for n in fixed if n.target not in _CONSTANTS})
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
    )


def _sink(schedule: _Schedule, core: set[Node], carries: set[Node]) -> set[Node]:
    """The core, and cheap work of maps that only feeds it, where that reads no more bytes."""
    body = set(core)
    while nodes := _to_sink(schedule, body, carries):
        body.update(nodes)
    return body


def _to_sink(schedule: _Schedule, body: set[Node], carries: set[Node]) -> list[Node]:
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


def _map_block(schedule: _Schedule, outputs: list[Node], stage_nodes: set[Node]) -> MapBlock:
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


def _in_graph_order(schedule: _Schedule, nodes: set[Node]) -> list[Node]:
    return [n for n in schedule.loop.graph.nodes if n in nodes]


def _invariants(schedule: _Schedule, nodes: Iterable[Node]) -> list[Node]:
    """The parameters and hoisted values that a map reads; it makes views of them itself."""
    stop = {*schedule.loop.invariants, *schedule.hoisted}
    read = needed_for(
        [a for n in nodes for a in [n, *inputs_of(n)] if a not in schedule.varying], stop
    )
    return _in_graph_order(schedule, read & stop)
