"""Windows of a reverse loop that run together: a sliding window in the gradient.

Each step's loss reaches back over the same number of steps, so there are about as many reverse
loops as steps. They differ only in the steps they read, so they run as one, with the windows as
one more axis of the carry; what needs no carry, and the sums, see the steps of all windows as one
long sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._compat import FakeTensorMode
from .distribute import DistributedLoop, ScanBlock
from .graphs import value_of
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
        steps, device = sequences[0].shape[0], sequences[0].device
        at, counts = self.gather(windows, steps, device)
        gathered = [sequence.index_select(0, at) for sequence in sequences]
        for d_out in d_outs:
            own = d_out.index_select(0, at)
            gathered.append(torch.where(counts.reshape(-1, *(1,) * (own.dim() - 1)), own, 0))
        return gathered


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
