"""The reverse loop in parts, so that gradients can be sent while others are being computed.

The recurrences of all layers come first, then the gradients of each part: mostly GEMMs over all
steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._callers_code import callers_code
from ..compiler.distribute import distribute
from ..compiler.plan import Plan
from ..compiler.run_loop import ChunkInputs
from ..contract.output import EarlyGradients
from .programs import Programs


def can_hand_over(plan: Plan) -> bool:
    """Whether gradients are ready one after another: not where a later step changes them all."""
    return not (plan.finish or plan.sliding or plan.loops.reverse.stacked)


def hand_over(early: EarlyGradients, loss: Tensor, grads: list[Tensor]) -> None:
    """Of a segment that was run whole."""
    for part in early.parts:
        _hand_over(early, loss, [grads[i] for i in part])


def _hand_over(early: EarlyGradients, loss: Tensor, part: list[Tensor]) -> None:
    with callers_code():
        early.ready(loss, part)


def reverse_in_parts(
    programs: Programs,
    early: EarlyGradients,
    loss: Tensor,
    invariants: list[Tensor],
    sequences: list[Tensor],
    d_carries: list[Tensor],
    later: list[Tensor],
) -> list[Tensor]:
    """The gradients of a segment, from its first chunk, which is the last in reverse.

    ``later`` are the sums over the chunks after it; empty if there are none.
    """
    plan, split = programs.plan, programs.split_reverse
    reads = [sequences[i] for i in split.reads]
    if reads:
        given = ChunkInputs(invariants, reads, d_carries)
        results = programs.run_chunk("recurrences", split.recurrences, given)
        sequences = [*sequences, *results[len(d_carries) :]]
    trained = plan.loops.trained_invariants
    index_of = {leaf: i for i, leaf in enumerate(trained)}
    sums: dict[int, Tensor] = {}

    def add(part: tuple[int, ...]) -> None:
        name, part_loop = ("part", part), split.rest
        if name not in programs.functions:  # else the built program is called, not the loop
            summed = [part_loop.loop.summed[i] for i in part]
            part_loop = distribute(replace(part_loop.loop, summed=summed))
        grads = programs.run_chunk(name, part_loop, ChunkInputs(invariants, sequences, []))
        for i, grad in zip(part, grads, strict=True):
            sums[i] = later[i] + grad if later else grad

    for leaves in early.parts:
        add(tuple(index_of[leaf] for leaf in leaves if leaf in index_of))
        grads = [
            sums[index_of[leaf]] if leaf in index_of else torch.zeros_like(invariants[leaf])
            for leaf in leaves
        ]
        _hand_over(early, loss, grads)
    rest = tuple(i for i in range(len(trained)) if i not in sums)
    if rest:
        add(rest)
    return [sums[i] for i in range(len(trained))]
