"""Loop -> blocks: loop distribution (Allen and Kennedy 1987) on the graph of one step.

Each true recurrence (see ``components``) becomes a scan block, with only the nodes on a path from
its carries to its next carries. Everything else is in map blocks, batched over time. A carry that
never feeds itself is a shift of a sequence: no loop at all.
"""

from __future__ import annotations

from .adjoint import Loop
from .blocks import DistributedLoop
from .components import assign_stages, find_components
from .fusion import Fusion, at_every_step, fuse
from .graphs import (
    VIEWS,
    Node,
    aten,
    extract,
    is_outer_product,
    is_tuple,
    needed_for,
    varying_with,
)
from .make_blocks import CONSTANTS, Schedule, make_blocks
from .time_axis.reduction import time_sums
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
    sums = time_sums(loop.summed, varying, set(inputs))
    results = [*loop.next_carries, *loop.stacked, *sums.sequences()]
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
                schedule, sums = fuse(schedule, component, sums, fusion)
    blocks = make_blocks(schedule, at_every_step(schedule, sums))
    module = extract(loop.invariants, hoisted, loop.graph) if hoisted else None
    return DistributedLoop(loop, hoisted, module, blocks, sums)


def _is_heavy(node: Node, inputs: list[Node]) -> bool:
    """Work on invariants that a block should not repeat: not a view, not a constant."""
    light = VIEWS | CONSTANTS
    return any(n.target not in light and n not in inputs for n in needed_for([node], stop=inputs))
