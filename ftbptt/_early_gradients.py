"""The reverse loop in parts: some gradients can be sent while others are still being computed.

First the recurrences of all layers, then the gradients of each part, GEMMs over all steps mostly.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ._output import EarlyGradients
from ._programs import Programs
from .compiler.distribute import distribute
from .compiler.plan import Plan


def can_hand_over(plan: Plan) -> bool:
    """Whether gradients are ready one after the other: not where something is done to all."""
    prepared = plan.preparation is not None and plan.preparation.finish is not None
    return not (prepared or plan.sliding or plan.reverse.loop.stacked)


def reverse_in_parts(
    programs: Programs,
    early: EarlyGradients,
    loss: Tensor,
    invariants: list[Tensor],
    sequences: list[Tensor],
    d_carries: list[Tensor],
    later: list[Tensor],
) -> list[Tensor]:
    """The first chunk of a segment, the last to be run in reverse: the gradients of all.

    ``later`` are those of the chunks after it; none if there are none.
    """
    plan, loop = programs.plan, programs.windowed
    reads = [sequences[i] for i in loop.reads]
    everything = sequences
    if reads:
        handed_back = programs.run_chunk("alone", loop.alone, invariants, reads, d_carries)
        everything = [*sequences, *handed_back[len(d_carries) :]]
    trained = plan.loops.trained_invariants
    places = {leaf: i for i, leaf in enumerate(trained)}
    sums: dict[int, Tensor] = {}

    def add(part: tuple[int, ...]) -> None:
        name, own = ("part", part), loop.together
        if name not in programs.functions:  # which is made of it
            own = distribute(replace(own.loop, summed=[own.loop.summed[i] for i in part]))
        found = programs.run_chunk(name, own, invariants, everything, [])
        for i, grad in zip(part, found, strict=True):
            sums[i] = later[i] + grad if later else grad

    for leaves in early.parts:
        add(tuple(places[leaf] for leaf in leaves if leaf in places))
        zeros = torch.zeros_like
        params = [invariants[leaf] for leaf in leaves]
        early.ready(
            loss,
            [
                sums[places[leaf]] if leaf in places else zeros(param)
                for leaf, param in zip(leaves, params, strict=True)
            ],
        )
    rest = tuple(i for i in range(len(trained)) if i not in sums)
    if rest:
        add(rest)
    return [sums[i] for i in range(len(trained))]
