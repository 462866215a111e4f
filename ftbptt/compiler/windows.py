"""Windows of a reverse loop that run together: a sliding window in the gradient.

Each step's loss reaches back over the same number of steps, so there are about as many reverse
loops as steps. They differ only in the steps they read, so they run as one, with the windows as
one more axis of the carry. All that a reverse loop does is linear in the gradients: what the
recurrences of the windows hand back is added up step by step, and the rest (the parameters'
gradients among it) is done once for all windows, on the totals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._compat import FakeTensorMode
from .adjoint import Loop
from .distribute import DistributedLoop, ScanBlock, ShiftBlock, distribute
from .graphs import Node, needed_for, value_of
from .program import RunScan
from .timebatch import for_any_length
from .trace import trace_function


@dataclass(frozen=True)
class Sliding:
    """Every ``stride`` steps a window begins to slide: its losses reach back ``length`` steps."""

    length: int
    stride: int

    def windows(self, steps: int) -> list[tuple[int, int]]:
        """(first step, behind the last) of the losses of each window of a segment."""
        return [(a, min(a + self.stride, steps)) for a in range(0, steps, self.stride)]

    def add(self, total: Tensor, windows: list[tuple[int, int]], own: Tensor) -> None:
        """Adds what each window has at its steps, ``[length * windows, ...]``, to ``[K, ...]``."""
        steps = own.unflatten(0, (self.length, -1))
        starts = [max(0, end - self.length) for _, end in windows]
        count = len(windows)
        if count > 1 and starts == list(range(starts[0], starts[0] + count)):
            for i in range(self.length):
                total[starts[0] + i : starts[0] + i + count] += steps[i, :count]
            return
        for w, start in enumerate(starts):  # the last may be longer than there are steps
            total[start : start + self.length] += steps[: len(total) - start, w]

    def gather(
        self, windows: list[tuple[int, int]], steps: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """(index of the step, whether its loss counts), each ``[length * windows]``, by step first.

        Early windows have fewer steps: theirs come first, and behind them are some without a loss,
        which hand back no gradient.
        """
        first, end = torch.tensor(windows, device=device).t()
        start = (end - self.length).clamp(min=0)
        step = start + torch.arange(self.length, device=device).unsqueeze(1)
        counts = (step >= first) & (step < end)
        return step.clamp(max=steps - 1).flatten(), counts.flatten()

    def sequences(
        self, windows: list[tuple[int, int]], sequences: list[Tensor], d_outs: list[Tensor]
    ) -> list[Tensor]:
        """What a reverse loop over these windows reads, ``[length * windows, ...]``."""
        given = [*sequences, *d_outs]
        if not given:
            return []
        at, counts = self.gather(windows, given[0].shape[0], given[0].device)
        gathered = [sequence.index_select(0, at) for sequence in sequences]
        if d_outs:
            counted = counts.nonzero().squeeze(1)  # most steps of a window have no loss
            read = at[counted]
            for d_out in d_outs:
                own = d_out.new_zeros((len(at), *d_out.shape[1:]))
                gathered.append(own.index_copy_(0, counted, d_out.index_select(0, read)))
        return gathered


@dataclass(frozen=True)
class WindowedLoop:
    """A reverse loop in two: the recurrences of each window, and what is linear in their results.

    ``alone`` reads ``reads`` of the loop's sequences and stacks what ``together``, a loop without a
    recurrence, takes as sequences behind all of the loop's own.
    """

    alone: DistributedLoop
    reads: list[int]
    together: DistributedLoop


def split_windows(loop: Loop) -> WindowedLoop:
    """split_windows : reverse loop -> WindowedLoop"""
    handed_back: set[Node] = set()
    for block in distribute(loop).blocks:
        if isinstance(block, ScanBlock):
            handed_back |= {*block.carries, *block.next_carries, *block.emits}
        elif isinstance(block, ShiftBlock):
            handed_back.add(block.carry)
    read = needed_for(loop.summed, stop=[*loop.sequences, *loop.invariants, *handed_back])
    boundary = [node for node in loop.graph.nodes if node in read & handed_back]
    alone = distribute(replace(loop, stacked=boundary, summed=[]))
    inputs: set[Node] = set(boundary)
    for block in alone.blocks:
        inputs |= {block.source} if isinstance(block, ShiftBlock) else set(block.sequences)
    reads = [i for i, node in enumerate(loop.sequences) if node in inputs]
    alone.loop.sequences = [loop.sequences[i] for i in reads]
    sequences = [*loop.sequences, *boundary]
    together = replace(loop, sequences=sequences, carries=[], next_carries=[], stacked=[])
    return WindowedLoop(alone, reads, distribute(together))


def on_windows(run_scan: RunScan, loop: DistributedLoop, windows: int) -> RunScan:
    """Runs the loop's scan blocks on so many windows at once; sequences as in ``run_loop``."""
    wide = {id(b): _widened(b, windows) for b in loop.blocks if isinstance(b, ScanBlock)}

    def run(
        block: ScanBlock,
        invariants: list[Tensor],
        sequences: list[Tensor],
        carries: list[Tensor],
        steps: Any,
        reverse: bool,
    ) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
        own = [sequence.unflatten(0, (steps // windows, windows)) for sequence in sequences]
        finals, histories, emits = run_scan(
            wide[id(block)], invariants, own, carries, steps // windows, reverse
        )
        flat = [None if history is None else history.flatten(0, 1) for history in histories]
        return finals, flat, [emit.flatten(0, 1) for emit in emits]

    return run


def _widened(block: ScanBlock, windows: int) -> ScanBlock:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    n_inv, n_carries = len(block.invariants), len(block.carries)
    with mode:
        examples = [
            torch.empty(
                (*(() if i < n_inv else (windows,)), *value_of(node).shape),
                dtype=value_of(node).dtype,
                device=value_of(node).device,
            )
            for i, node in enumerate((*block.invariants, *block.sequences, *block.carries))
        ]
    dims = (None,) * n_inv + (0,) * (len(examples) - n_inv)
    module = trace_function(
        torch.func.vmap(for_any_length(block.module), dims), examples, mode, functional=True
    )
    placeholders = module.graph.find_nodes(op="placeholder")
    results = list(module.graph.output_node().args[0])
    n = n_inv + len(block.sequences)
    return replace(
        block,
        carries=placeholders[n:],
        next_carries=results[:n_carries],
        invariants=placeholders[:n_inv],
        sequences=placeholders[n_inv:n],
        emits=results[n_carries:],
        module=module,
    )
