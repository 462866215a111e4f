"""Runs a chunk eagerly, as a training loop without this package would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..._autograd_graph import leaves_behind
from ..._trees import Tree, tree_leaves, tree_map
from ...contract.as_step import as_step
from ...contract.layout import Layout, where_rows
from ...contract.step import Step
from ...training.data.chunk import Chunk, TimeAxes


class Forward(NamedTuple):
    """The loss and ``out`` with their graph, the state after the chunk, and the one saved in it."""

    loss: Tensor
    out: Tree
    state: Tree
    saved: Tree


@dataclass
class EagerChunk:
    """Calls ``model(x) -> (out, state)``, or ``model(x, state)`` if there is a state.

    Makes one call per chunk, plus one at each step where rows are reset or a state is saved.
    """

    model: nn.Module
    loss: Callable[[Tree, Tree], Tensor]
    dim: int
    initial: Tree
    autocast: torch.dtype | None

    def forward(
        self, chunk: Chunk, state: Tree, save_at: int | None, *, each_step: bool = False
    ) -> Forward:
        """Runs the chunk; ``save_at``: the step before which the state is saved.

        ``each_step``: make one call per step.
        """
        device = _device(chunk)
        cast = nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)
        with cast:
            starts = self._call_starts(chunk, save_at, each_step)
            if not starts:
                out, state = self._call(chunk.x, state)
                return Forward(self.loss(out, chunk.y), out, state, None)
            outs: list[Tree] = []
            saved = None
            for start, stop in zip(starts, [*starts[1:], self._axes.steps(chunk)], strict=True):
                part = self._axes.cut(chunk, start, stop)
                state = self._reset_rows(state, part)
                if start == save_at:  # resets at this step are repeated in the next window
                    saved = state
                out, state = self._call(part.x, state)
                outs.append(out)
            out = tree_map(lambda *leaves: torch.cat(leaves, self.dim), *outs)
            return Forward(self.loss(out, chunk.y), out, state, saved)

    def autocast_dtype(self, chunk: Chunk) -> torch.dtype | None:
        """The dtype of autocast, this trainer's or the caller's; None if it is off."""
        device = _device(chunk)
        if self.autocast is None and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.autocast

    def _call(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        out, state = self.model(x) if state is None else self.model(x, state)
        return out, state

    def _call_starts(self, chunk: Chunk, save_at: int | None, each_step: bool) -> list[int]:
        """The steps at which a call starts; empty for a single call of the full chunk."""
        starts = set() if save_at is None else {0, save_at}
        if each_step:
            starts |= set(range(self._axes.steps(chunk)))
        if chunk.reset is not None:
            flags = chunk.reset
            if flags.dim() > 1:
                flags = flags.movedim(self.dim, 0).flatten(1).any(1)
            starts |= {0, *flags.nonzero().flatten().tolist()}
        return sorted(starts)

    def _reset_rows(self, state: Tree, part: Chunk) -> Tree:
        """The state before the first step of ``part``, with the rows reset that restart there."""
        if state is None or part.reset is None:
            return state
        flags = part.reset if part.reset.dim() < 2 else part.reset.movedim(self.dim, 0)
        start = tree_map(torch.zeros_like, state) if self.initial is None else self.initial
        return where_rows(flags[0], start, state, self._row_axis)

    def _row_axis(self, leaf: Tensor) -> int:
        return 0 if self._step is None else self._step.row_axis(leaf)

    @cached_property
    def _axes(self) -> TimeAxes:
        return TimeAxes.of(Layout(self.dim))

    @cached_property
    def _step(self) -> Step | None:
        """The model as a step, which knows where its state has its rows; None if it is none."""
        try:
            return as_step(self.model, sequence=True, batch_first=self.dim == 1)
        except (TypeError, ValueError):
            return None


def _device(chunk: Chunk) -> str:
    return next((t.device.type for t in tree_leaves(chunk.x) if isinstance(t, Tensor)), "cpu")


def loss_reads_parameters(forward: Forward) -> bool:
    """Whether the loss depends on a parameter other than through the output."""
    outs = [leaf for leaf in tree_leaves(forward.out) if isinstance(leaf, Tensor)]
    return bool(leaves_behind([forward.loss], other_than_through=outs))
