"""A chunk as a module that takes chunks is called by hand: autograd, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._layout import broadcast_rows
from .._trees import tree_leaves, tree_map
from ..training.chunk import Chunk, TimeAxes

Tree = Any


class Forward(NamedTuple):
    """The loss with its graph, the output it was made of, the state after, and one within."""

    loss: Tensor
    out: Tree
    state: Tree
    kept: Tree


@dataclass
class EagerChunk:
    """``model(x) -> (out, state)`` where there is no state yet, else ``model(x, state)``.

    One call for the chunk, but where rows restart and where a state is to be kept.
    """

    model: nn.Module
    loss: Callable[[Tree, Tree], Tensor]
    dim: int
    initial: Tree
    row_axis: Callable[[Tensor], int]
    autocast: torch.dtype | None

    def forward(
        self, chunk: Chunk, state: Tree, keep: int | None, *, each_step: bool = False
    ) -> Forward:
        """The chunk; ``keep`` is a step before which the state is wanted."""
        device = next((t.device.type for t in tree_leaves(chunk.x) if isinstance(t, Tensor)), "cpu")
        cast = nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)
        with cast:
            parts = self._parts(chunk, keep, each_step)
            if not parts:
                out, state = self._call(chunk.x, state)
                return Forward(self.loss(out, chunk.y), out, state, None)
            outs: list[Tree] = []
            kept, axes = None, TimeAxes(self.dim, self.dim)
            for start, stop in zip(parts, [*parts[1:], axes.steps(chunk)], strict=True):
                part = axes.cut(chunk, start, stop)
                state = self._restarted(state, part)
                if start == keep:  # a row that restarts here does so again in the next window
                    kept = state
                out, state = self._call(part.x, state)
                outs.append(out)
            out = tree_map(lambda *leaves: torch.cat(leaves, self.dim), *outs)
            return Forward(self.loss(out, chunk.y), out, state, kept)

    def _call(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        out, state = self.model(x) if state is None else self.model(x, state)
        return out, state

    def _parts(self, chunk: Chunk, keep: int | None, each_step: bool) -> list[int]:
        """The steps where a call starts; none for one call of the whole."""
        starts = set() if keep is None else {0, keep}
        if each_step:
            starts |= set(range(TimeAxes(self.dim).steps(chunk)))
        if chunk.reset is not None:
            flags = chunk.reset
            if flags.dim() > 1:
                flags = flags.movedim(self.dim, 0).flatten(1).any(1)
            starts |= {0, *flags.nonzero().flatten().tolist()}
        return sorted(starts)

    def _restarted(self, state: Tree, part: Chunk) -> Tree:
        """The state before the first step of a part."""
        if state is None or part.reset is None:
            return state
        flags = part.reset if part.reset.dim() < 2 else part.reset.movedim(self.dim, 0)
        start = tree_map(torch.zeros_like, state) if self.initial is None else self.initial
        return broadcast_rows(torch.where, flags[0], start, state, self.row_axis)


def reads_leaf(found: Forward) -> bool:
    """Whether the loss depends on a parameter in another way than through the output."""
    outs = {leaf.grad_fn for leaf in tree_leaves(found.out) if isinstance(leaf, Tensor)}
    seen, left = set(outs), [found.loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # where a gradient goes into a leaf
            return True
        left += [following for following, _ in node.next_functions]
    return False
