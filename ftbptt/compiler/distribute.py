"""Loop -> blocks: loop distribution (Allen and Kennedy 1987) on the graph of one step.

Each true recurrence (see ``components``) becomes a scan block, with only the nodes on a path from
its carries to its next carries. Everything else is in map blocks, batched over time. A carry that
never feeds itself is a shift of a sequence: no loop at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .adjoint import Loop
from .blocks import DistributedLoop
from .components import Component, assign_stages, find_components
from .fusion import Fusion, fused_nodes, keeps_rows
from .graphs import (
    GEMMS,
    VIEWS,
    Node,
    aten,
    extract,
    is_outer_product,
    is_tuple,
    needed_for,
    varying_with,
)
from .make_blocks import CONSTANTS, Schedule, make_blocks, scan_block
from .time_axis.reduction import BatchSum, Term, time_sum
from .tracing.trace import TRACING


def distribute(loop: Loop, fusion: Fusion | None = None) -> DistributedLoop:
    """distribute : Loop, what its scan blocks can take in -> DistributedLoop

    A 3-layer LSTM becomes three scan blocks, with the input GEMM of each layer in a map between.
    Rewrites operations of the loop's graph, which other loops share, by others of equal results.
    """
    with TRACING:  # not while another thread reads or rewrites the graph
        return _distribute(loop, fusion)


def _distribute(loop: Loop, fusion: Fusion | None) -> DistributedLoop:
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
    schedule = Schedule(loop, order, varying, hoisted, components, stage)
    if fusion is not None:
        for component in components:
            if component.recurrent:
                schedule, sums = _fuse(schedule, component, sums, fusion)
    blocks = make_blocks(schedule, _at_every_step(schedule, sums))
    module = extract(loop.invariants, hoisted, loop.graph) if hoisted else None
    return DistributedLoop(loop, hoisted, module, blocks, sums)


def _read_by(sums: Iterable[Term]) -> list[Node]:
    """What the sums read at every step."""
    return [node for total in sums for term in total.terms() for node in term.sequences()]


def _batch_sums(schedule: Schedule, sums: Iterable[Term]) -> list[BatchSum]:
    """Those that a loop can return summed over the steps: no step reads them."""
    terms = (term for total in sums for term in total.terms())
    return [
        term
        for term in terms
        if isinstance(term, BatchSum) and not any(u in schedule.stage for u in term.node.users)
    ]


def _at_every_step(schedule: Schedule, sums: list[Term]) -> set[Node]:
    """Values that must exist as a sequence, whichever block computes them."""
    shifted = {c.next_carries[0] for c in schedule.components if not c.recurrent}
    return {*schedule.loop.stacked, *shifted, *_read_by(sums)}


def _fuse(
    schedule: Schedule, component: Component, sums: list[Term], fusion: Fusion
) -> tuple[Schedule, list[Term]]:
    """Moves into a recurrence what it can take in of the map after it, and of the sums.

    Returns the schedule and the sums as they are if there is nothing to move, or if the backend
    cannot make one kernel of the result.
    """
    loop = schedule.loop

    def rows_of(schedule: Schedule, component: Component, sums: list[Term]) -> Any:
        block = scan_block(schedule, component, _at_every_step(schedule, sums))
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
    schedule: Schedule, component: Component, sums: list[Term], fusion: Fusion, rows: Sequence[int]
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
    schedule: Schedule, component: Component, sums: list[Term], moved: set[Node]
) -> tuple[Schedule, Component, list[Term]]:
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
    light = VIEWS | CONSTANTS
    return any(n.target not in light and n not in inputs for n in needed_for([node], stop=inputs))
