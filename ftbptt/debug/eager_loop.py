"""The plain loop in eager torch, called as a segment is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._trees import Tree, differentiable, tree_leaves, tree_map, tree_unflatten
from ..compiler.signature import Recipe
from ..contract.layout import InDimsLayout, Layout
from ..contract.output import SegmentOutput
from ..contract.reference import reference_segment
from ..contract.step import Step
from ..segment.make_segment import check_made
from ..segment.train_segment import TrainSegment


def check_defined(train_segment: TrainSegment) -> None:
    """Raises TypeError for what is no segment, and ValueError for one that is no plain loop."""
    check_made(train_segment)
    for option, is_used in (
        ("taps", train_segment.tapped),
        ("window", train_segment.recipe.window is not None),
    ):
        if is_used:
            raise ValueError(
                f"train_segment: was made with {option}=, which the plain loop does not have. "
                "Compare the same segment without it."
            )


@dataclass(frozen=True)
class EagerLoop:
    """The reference loop, called with a segment's arguments.

    ``state_dim``: the axis of the sequences (``in_dims``) in the state; None if they share one.
    """

    recipe: Recipe
    layout: Layout
    state_dim: int | None
    reset: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        train_segment: TrainSegment,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        reset: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[EagerLoop, Tree]:
        """The loop, and the state that it starts from."""
        plan, groups = train_segment.plan(params, state, x, y, reset=reset, mask=mask)
        layout = train_segment.layout(x)
        state_dim = layout.state_dim if isinstance(layout, InDimsLayout) else None
        if state is None:  # start where the segment does: the plan has resolved the initial state
            state, state_dim = tree_unflatten(groups["state"], plan.signature.specs.state), None
            reset = layout.flags_back(groups["reset"][0]) if groups["reset"] else None
        return cls(train_segment.recipe, layout, state_dim, reset, mask), state

    def steps(self, x: Tree) -> int:
        return int(tree_leaves(x)[0].shape[self.layout.x_time])

    def run(self, step: Step, params: Tree, state: Tree, x: Tree, y: Tree) -> SegmentOutput:
        """Runs the loop; with ``in_dims`` once for each sequence, and averages the results."""
        layout, initial_state = self.layout, self.recipe.initial_state
        if initial_state is not None and not callable(initial_state):
            initial_state = tree_map(lambda a, like: a.to(like.dtype), initial_state, state)

        def run_sequence(state: Tree, x: Tree, y: Tree, reset: Tree, mask: Tree) -> SegmentOutput:
            return reference_segment(
                step, self.recipe.loss, params, state, x, y, reset=reset, mask=mask,
                time_dim=layout.time_dim, initial_state=initial_state, context=self.recipe.context,
            )  # fmt: skip

        arguments = (state, x, y, self.reset, self.mask)
        if not isinstance(layout, InDimsLayout):
            return run_sequence(*arguments)
        of_flags = (None if f is None else layout.flag_axes(f.dim())[1] for f in arguments[3:])
        dims = (self.state_dim, layout.x_dim, layout.y_dim, *of_flags)
        count = tree_leaves(x)[0].shape[layout.x_dim]
        outputs = [
            run_sequence(
                *(_select(tree, dim, i) for tree, dim in zip(arguments, dims, strict=True))
            )
            for i in range(count)
        ]
        grads, states, losses, outs = zip(*outputs, strict=True)
        return SegmentOutput(
            tree_map(_mean, *grads),
            tree_map(lambda *leaves: torch.stack(leaves, layout.state_dim or 0), *states),
            torch.stack(losses).mean(),
            tree_map(lambda *leaves: torch.stack(leaves, layout.x_dim), *outs),
        )


def _mean(*leaves: Tensor) -> Tensor:
    """The mean of gradients; of integers, which have none, their zeros in their dtype."""
    return torch.stack(leaves).sum(0) / len(leaves) if differentiable(leaves[0]) else leaves[0]


def _select(tree: Tree, dim: int | None, i: int) -> Tree:
    if tree is None or dim is None:
        return tree
    return tree_map(lambda leaf: leaf.select(dim, i), tree)
