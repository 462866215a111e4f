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
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
from torch import fx

from .blocks import ScanBlock
from .components import Component
from .gemms import GEMMS
from .graphs import Node, aten, inputs_of, nbytes, value_of
from .make_blocks import Schedule, scan_block
from .time_axis.reduction import BatchSum, TimeSums


@dataclass(frozen=True)
class Fusion:
    """What a backend's loops can take in.

    ``expand(graph)`` replaces operations by others that kernels have. ``operation(node)``: whether
    a kernel can compute it, given its operands; ``rows(scan block)``: the leading axes that
    its kernel computes in parallel, None if it has no kernel.
    """

    expand: Callable[[fx.Graph], None]
    operation: Callable[[Node], bool]
    rows: Callable[[ScanBlock], tuple[int, ...] | None]


def _batch_sums(schedule: Schedule, sums: TimeSums) -> list[BatchSum]:
    """Those that a loop can return summed over the steps: no step reads them."""
    return [
        term
        for term in sums.terms.values()
        if isinstance(term, BatchSum) and not any(u in schedule.stage for u in term.node.users)
    ]


def at_every_step(schedule: Schedule, sums: TimeSums) -> set[Node]:
    """Values that must exist as a sequence, whichever block computes them."""
    shifted = {c.next_carries[0] for c in schedule.components if not c.recurrent}
    return {*schedule.loop.stacked, *shifted, *sums.sequences()}


def fuse(
    schedule: Schedule, component: Component, sums: TimeSums, fusion: Fusion
) -> tuple[Schedule, TimeSums]:
    """fuse : Schedule, one of its recurrences, sums -> both, with what was moved into it

    Moves into a recurrence what it can take in of the map after it, and of the sums.

    Returns the schedule and the sums as they are if there is nothing to move, or if the backend
    cannot make one kernel of the result.
    """

    def rows_of(schedule: Schedule, component: Component, sums: TimeSums) -> Any:
        block = scan_block(schedule, component, at_every_step(schedule, sums))
        block.history = [True] * len(component.carries)  # at most: what is read is not yet known
        return fusion.rows(block)

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
    schedule: Schedule, component: Component, sums: TimeSums, fusion: Fusion, rows: Sequence[int]
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

    stored = at_every_step(schedule, sums.with_totals(totals))
    return fused_nodes(inside, [*map_after, *totals], can_move, read_elsewhere, stored)


def _with_moved(
    schedule: Schedule, component: Component, sums: TimeSums, moved: set[Node]
) -> tuple[Schedule, Component, TimeSums]:
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
    return fused_schedule, fused_component, sums.with_totals(totals)


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
