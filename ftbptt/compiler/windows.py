"""Windows of a reverse loop that run together: a sliding window in the gradient.

Each step's loss reaches back over the same number of steps, so there are about as many reverse
loops as steps. They differ only in the steps they read, so they run as one, with the windows as
one more axis of the carry. All that a reverse loop does is linear in the gradients: what the
recurrences of the windows hand back is added up step by step, and the rest (the parameters'
gradients among it) is done once for all windows, on the totals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import FakeTensorMode
from .adjoint import Loop
from .distribute import DistributedLoop, ScanBlock, ShiftBlock, distribute
from .graphs import Node, needed_for, value_of
from .program import RunScan
from .time_batching import for_any_length
from .trace import trace_function


class Block(NamedTuple):
    """Some windows that run at once, ``stride`` steps apart from each other.

    ``start`` is the first step of the first one, ``losses`` how many of a window's last steps have
    a loss.
    """

    start: int
    windows: int
    losses: int


@dataclass(frozen=True)
class Sliding:
    """Every ``stride`` steps a window begins to slide: its losses reach back ``length`` steps.

    The first windows begin before the segment does. Sequences are padded for that, with what is
    read there of no meaning: no gradient comes back from it.
    """

    length: int
    stride: int

    def blocks(self, first: int, steps: int, count: int) -> list[Block]:
        """The windows whose losses are at the steps from ``first`` on, up to ``count`` at once."""
        whole = (steps - first) // self.stride
        found = []
        for w in range(0, whole, count):
            start = first + (w + 1) * self.stride - self.length
            found.append(Block(start, min(count, whole - w), self.stride))
        rest = steps - first - whole * self.stride
        if rest:
            found.append(Block(steps - self.length, 1, rest))
        return found

    def padded(self, sequence: Tensor, count: int) -> Tensor:
        """``[K, ...]`` with room for ``count`` windows at its first and at its last step."""
        last = len(sequence) - 1
        behind = len(sequence) + count * self.stride + self.length
        at = torch.arange(1 - self.length, behind, device=sequence.device)
        return sequence.index_select(0, at.clamp(0, last))

    def part(self, padded: Tensor, block: Block, count: int) -> Tensor:
        """The steps of a padded sequence that ``count`` windows from a block's first on read."""
        return padded.narrow(
            0, block.start + self.length - 1, self.length + (count - 1) * self.stride
        )

    def side_by_side(self, part: Tensor) -> Tensor:
        """The steps of windows as ``[length, windows, ...]``: a view of them, nothing is copied."""
        return part.unfold(0, self.length, self.stride).movedim(-1, 0)

    def with_loss(self, d_out: Tensor, block: Block, count: int) -> Tensor:
        """The gradient of a padded output, ``[length, windows, ...]``, where it has one."""
        own = d_out.new_zeros((self.length, count, *d_out.shape[1:]))
        given = self.side_by_side(self.part(d_out, block, count))
        where = slice(self.length - block.losses, None), slice(block.windows)
        own[where] = given[where]
        return own

    def add(self, total: Tensor, block: Block, own: Tensor) -> None:
        """Adds what each window has at its steps, ``[length, windows, ...]``, to a padded total."""
        for i in range(self.length):
            at = block.start + self.length - 1 + i
            steps = total[at : at + (block.windows - 1) * self.stride + 1 : self.stride]
            steps += own[i, : block.windows]


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
    """Runs the loop's scan blocks on so many windows at once: values are ``[windows, ...]``."""
    wide = {id(b): _widened(b, windows) for b in loop.blocks if isinstance(b, ScanBlock)}

    def run(block: ScanBlock, *given: Any) -> Any:
        return run_scan(wide[id(block)], *given)

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
