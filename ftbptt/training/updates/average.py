"""The moving average of the parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..._trees import Tree, differentiable, tree_flatten, tree_leaves, tree_unflatten


class MovingAverage:
    """``average = decay * average + (1 - decay) * params``, which begins at the first ``params``.

    At least in float32: in 16 bits, what a decay near 1 adds would be rounded away.
    """

    def __init__(self, params: Tree, decay: float) -> None:
        self._move = get_ema_multi_avg_fn(decay)
        self.leaves = [_wide(leaf).clone() for leaf in _averaged(params)]

    def update(self, params: Tree) -> None:
        """Moves it towards the parameters as they are now."""
        if self.leaves:
            now = [_wide(leaf) for leaf in _averaged(params)]
            self._move(self.leaves, now, 0)

    def like(self, params: Tree) -> Tree:
        """In the structure and the dtypes of the parameters."""
        leaves, spec = tree_flatten(params)
        average = iter(self.leaves)
        return tree_unflatten(
            [next(average).to(leaf.dtype) if differentiable(leaf) else leaf for leaf in leaves],
            spec,
        )

    def load(self, leaves: list[Tensor]) -> None:
        """Goes on from the leaves of another."""
        for own, value in zip(self.leaves, leaves, strict=True):
            own.copy_(value)


def _averaged(params: Tree) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(params) if differentiable(leaf)]


def _wide(leaf: Tensor) -> Tensor:
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32))
