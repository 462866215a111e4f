"""Runs the blocks of a distributed loop in order, all steps of each: plain torch, for any K."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._interrupt import uninterrupted
from .distribute import DistributedLoop, MapBlock, ScanBlock, ShiftBlock
from .graphs import Node

# Runs a scan block: (block, invariants, sequences [K, ...], carries, steps, reverse) -> (final
# carries, histories [K + 1, ...] or None for each carry, [*emits [K, ...], *totals]). Index t of a
# history is the carry before step t in a forward loop; in a reverse loop index t + 1 is the carry
# that enters step t. A backend need not know more of a loop than this.
RunScan = Callable[
    [ScanBlock, list[Tensor], list[Tensor], list[Tensor], Any, bool],
    tuple[list[Tensor], list[Tensor | None], list[Tensor]],
]


@dataclass
class _Values:
    """The values of a running loop by node; sequences have the steps as axis 0."""

    invariant: dict[Node, Tensor]
    sequence: dict[Node, Tensor]
    final: dict[Node, Tensor]
    total: dict[Node, Tensor]


def run_loop(
    distributed: DistributedLoop,
    run_scan: RunScan,
    invariants: Sequence[Tensor],
    sequences: Sequence[Tensor],
    carries: Sequence[Tensor],
    steps: Any,
    windows: int = 0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """run_loop : a loop's inputs -> (final carries, stacked values [K, ...], summed values)

    With ``windows`` > 0 as many loops run side by side: the sequences are ``[K, windows, ...]``,
    the carries ``[windows, ...]``.
    """
    loop = distributed.loop
    values = _Values(
        dict(zip(loop.invariants, invariants, strict=True)),
        dict(zip(loop.sequences, sequences, strict=True)),
        {},
        {},
    )
    start = dict(zip(loop.carries, carries, strict=True))
    if distributed.hoisted is not None:
        hoisted = distributed.hoisted(*invariants)
        values.invariant.update(zip(distributed.hoisted_nodes, hoisted, strict=True))
    leading_axes = (steps, windows) if windows else (steps,)

    def sequence(node: Node) -> Tensor:
        if node not in values.sequence:  # the same at every step
            value = _invariant(node, values)
            values.sequence[node] = value.expand(*leading_axes, *value.shape)
        return values.sequence[node]

    for block in distributed.blocks:
        if isinstance(block, MapBlock):
            _run_map(block, values, steps, windows)
        elif isinstance(block, ShiftBlock):
            source = sequence(block.source)
            _run_shift(block, values, start[block.carry], loop.reverse, source)
        else:
            _run_recurrence(block, run_scan, values, start, steps, loop.reverse)

    def invariant(node: Node) -> Tensor:
        return _invariant(node, values)

    def total(node: Node) -> Tensor:
        if node not in values.total:
            values.total[node] = sequence(node).sum(0)
        return values.total[node]

    finals = [values.final[carry] for carry in loop.carries]
    stacked = [sequence(node) for node in loop.stacked]
    sums = [term.evaluate(sequence, total, invariant, steps) for term in distributed.sums]
    return finals, stacked, sums


def _invariant(node: Node, values: _Values) -> Tensor:
    """The value of an invariant; a view of a parameter, or a constant, is computed here."""
    if node not in values.invariant:

        def operand(arg: Node) -> Tensor:
            return _invariant(arg, values)

        args = torch.fx.node.map_arg(node.args, operand)
        kwargs = torch.fx.node.map_arg(node.kwargs, operand)
        values.invariant[node] = node.target(*args, **kwargs)
    return values.invariant[node]


def _run_map(block: MapBlock, values: _Values, steps: Any, windows: int) -> None:
    invariants = [values.invariant[node] for node in block.invariants]
    sequences = [values.sequence[node] for node in block.sequences]
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
    values.sequence.update(zip(block.outputs, results, strict=True))


def _run_shift(
    block: ShiftBlock, values: _Values, start: Tensor, reverse: bool, source: Tensor
) -> None:
    start = start.unsqueeze(0)
    if reverse:
        values.sequence[block.carry] = torch.cat([source[1:], start])
        values.final[block.carry] = source[0].clone()
    else:
        values.sequence[block.carry] = torch.cat([start, source[:-1]])
        values.final[block.carry] = source[-1].clone()


def _run_recurrence(
    block: ScanBlock,
    run_scan: RunScan,
    values: _Values,
    start: dict[Node, Tensor],
    steps: Any,
    reverse: bool,
) -> None:
    invariants = [_invariant(node, values) for node in block.invariants]
    sequences = [values.sequence[node] for node in block.sequences]
    carries = [start[carry] for carry in block.carries]
    finals, histories, emits = run_scan(block, invariants, sequences, carries, steps, reverse)
    values.sequence.update(zip(block.emits, emits, strict=False))
    values.total.update(zip(block.totals, emits[len(block.emits) :], strict=True))
    for carry, next_carry, final, history in zip(
        block.carries, block.next_carries, finals, histories, strict=True
    ):
        values.final[carry] = final
        if history is not None:
            first, last = history[:-1], history[1:]  # the first and the last K of K + 1
            values.sequence[carry] = last if reverse else first
            if next_carry is not carry:
                values.sequence[next_carry] = first if reverse else last
