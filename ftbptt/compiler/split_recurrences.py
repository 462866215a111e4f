"""A reverse loop in two: its recurrences, and the rest, which has none: for all steps at once.

So the rest can be done once for many windows (see ``sliding_window``), or in parts, with some
gradients ready before others (``segment.early_gradients``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .adjoint import Loop
from .blocks import DistributedLoop, ScanBlock, ShiftBlock
from .distribute import distribute
from .graphs import Node, needed_for


@dataclass(frozen=True)
class SplitLoop:
    """A loop in two, which run one after the other.

    ``recurrences`` reads the loop's sequences number ``reads`` and stacks its results. ``rest``
    takes all sequences of the loop and these results, and sums what the loop does.
    """

    recurrences: DistributedLoop
    reads: list[int]
    rest: DistributedLoop


def split_recurrences(loop: Loop) -> SplitLoop:
    """split_recurrences : reverse loop -> SplitLoop"""
    recurrent: set[Node] = set()  # the results of the recurrences
    for block in distribute(loop).blocks:
        if isinstance(block, ScanBlock):
            recurrent |= {*block.carries, *block.next_carries, *block.emits}
        elif isinstance(block, ShiftBlock):
            recurrent.add(block.carry)
    read = needed_for(loop.summed, stop=[*loop.sequences, *loop.invariants, *recurrent])
    boundary = [node for node in loop.graph.nodes if node in read & recurrent]
    recurrences = distribute(replace(loop, stacked=boundary, summed=[]))
    inputs: set[Node] = set(boundary)
    for block in recurrences.blocks:
        inputs |= {block.source} if isinstance(block, ShiftBlock) else set(block.sequences)
    reads = [i for i, node in enumerate(loop.sequences) if node in inputs]
    recurrences.loop.sequences = [loop.sequences[i] for i in reads]
    sequences = [*loop.sequences, *boundary]
    rest = replace(loop, sequences=sequences, carries=[], next_carries=[], stacked=[])
    return SplitLoop(recurrences, reads, distribute(rest))
