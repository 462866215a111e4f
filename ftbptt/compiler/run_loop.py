"""Runs the blocks of a distributed loop in order, all steps of each: plain torch, for any K."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._interrupt import uninterrupted
from .blocks import DistributedLoop, MapBlock, ScanBlock, ShiftBlock
from .graphs import Node
from .loop_values import LoopValues


class ScanResult(NamedTuple):
    """All steps of a scan block: its carries after the last one, ``[K, ...]`` of each emit.

    ``histories`` are ``[K + 1, ...]``, or None for a carry without one. Index t is the carry before
    step t in a forward loop; in a reverse loop index t + 1 is the carry that enters step t.
    """

    finals: list[Tensor]
    histories: list[Tensor | None]
    emits: list[Tensor]
    totals: Sequence[Tensor] = ()


# Runs a scan block: (block, invariants, sequences [K, ...], carries, steps). A backend need not
# know more of a loop than this.
RunScan = Callable[[ScanBlock, list[Tensor], list[Tensor], list[Tensor], Any], ScanResult]


class ChunkInputs(NamedTuple):
    """What consecutive steps of a loop read."""

    invariants: Sequence[Tensor]
    sequences: Sequence[Tensor]  # [K, ...]
    carries: Sequence[Tensor]

    def flat(self) -> list[Tensor]:
        return [tensor for group in self for tensor in group]


def run_loop(
    distributed: DistributedLoop,
    run_scan: RunScan,
    inputs: ChunkInputs,
    steps: Any,
    windows: int = 0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """run_loop : a loop's inputs -> (final carries, stacked values [K, ...], summed values)

    With ``windows`` > 0 as many loops run side by side: the sequences are ``[K, windows, ...]``,
    the carries ``[windows, ...]``.
    """
    loop = distributed.loop
    values = LoopValues(
        steps,
        windows,
        dict(zip(loop.invariants, inputs.invariants, strict=True)),
        dict(zip(loop.sequences, inputs.sequences, strict=True)),
    )
    start = dict(zip(loop.carries, inputs.carries, strict=True))
    if distributed.hoisted is not None:
        hoisted = distributed.hoisted(*inputs.invariants)
        values.invariants.update(zip(distributed.hoisted_nodes, hoisted, strict=True))
    for block in distributed.blocks:
        if isinstance(block, MapBlock):
            _run_map(block, values)
        elif isinstance(block, ShiftBlock):
            _run_shift(block, values, start[block.carry], loop.reverse)
        else:
            _run_recurrence(block, run_scan, values, start)
    finals = [values.finals[carry] for carry in loop.carries]
    stacked = [values.sequence(node) for node in loop.stacked]
    return finals, stacked, distributed.sums.evaluate(values)


def _run_map(block: MapBlock, values: LoopValues) -> None:
    steps, windows = values.steps, values.windows
    invariants = [values.invariants[node] for node in block.invariants]
    sequences = [values.sequences[node] for node in block.sequences]
    if windows:  # their steps are one long sequence
        sequences = [sequence.flatten(0, 1) for sequence in sequences]
        steps = steps * windows
    dims = (None,) * len(invariants) + (0,) * len(sequences)
    if not sequences:  # random numbers only: vmap needs something to batch over
        sequences, dims = [torch.empty(steps, 0)], (*dims, 0)
        function: Callable[..., Any] = lambda *args: block.batched(*args[:-1])  # noqa: E731
    else:
        function = block.batched
    with uninterrupted():  # torch's transforms do not survive Ctrl-C
        results = torch.func.vmap(function, dims, randomness="different")(*invariants, *sequences)
    if windows:
        results = [result.unflatten(0, (-1, windows)) for result in results]
    values.sequences.update(zip(block.outputs, results, strict=True))


def _run_shift(block: ShiftBlock, values: LoopValues, start: Tensor, reverse: bool) -> None:
    source, start = values.sequence(block.source), start.unsqueeze(0)
    if reverse:
        values.sequences[block.carry] = torch.cat([source[1:], start])
        values.finals[block.carry] = source[0].clone()
    else:
        values.sequences[block.carry] = torch.cat([start, source[:-1]])
        values.finals[block.carry] = source[-1].clone()


def _run_recurrence(
    block: ScanBlock,
    run_scan: RunScan,
    values: LoopValues,
    start: dict[Node, Tensor],
) -> None:
    invariants = [values.invariant(node) for node in block.invariants]
    sequences = [values.sequences[node] for node in block.sequences]
    carries = [start[carry] for carry in block.carries]
    result = run_scan(block, invariants, sequences, carries, values.steps)
    values.sequences.update(zip(block.emits, result.emits, strict=True))
    values.totals.update(zip(block.totals, result.totals, strict=True))
    for carry, next_carry, final, history in zip(
        block.carries, block.next_carries, result.finals, result.histories, strict=True
    ):
        values.finals[carry] = final
        if history is not None:
            first, last = history[:-1], history[1:]  # the first and the last K of K + 1
            values.sequences[carry] = last if block.reverse else first
            if next_carry is not carry:
                values.sequences[next_carry] = first if block.reverse else last
