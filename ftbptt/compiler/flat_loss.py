"""The caller's loss as a function of flat lists of tensors, with time as axis 0."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._trees import Tree, TreeSpec, tree_unflatten
from ..contract.layout import Layout
from ..contract.loss import segment_loss
from .signature import Leaf, Recipe, Signature, with_autocast

# What a loss with a parameter of its own is told.
PARAMETERS_IN_LOSS = (
    "A loss has no parameters: compute with it in the step, whose out the loss gets, or detach it."
)


class FlatLoss:
    """``(*outs, *ys, *mask) -> [loss]`` of one sequence or batch, without the axes of vmap.

    ``outs``: the outputs of a step, fake. ``leaves`` are those of the arguments.
    """

    def __init__(
        self, recipe: Recipe, signature: Signature, out_spec: TreeSpec, outs: Sequence[Tensor]
    ) -> None:
        self.recipe, self.signature, self.out_spec = recipe, signature, out_spec
        self._layout = Layout(signature.time_dim)
        batched = (True,) * len(signature.levels)
        has_mean_axis = signature.mean_axis is not None
        shapes = [o.shape[1:] if has_mean_axis else o.shape for o in outs]
        self.outs = [
            Leaf(tuple(shape), o.dtype, o.device, batched, has_mean_axis)
            for shape, o in zip(shapes, outs, strict=True)
        ]
        mask = [] if signature.mask is None else [signature.mask]
        self.leaves = [*self.outs, *signature.y, *mask]
        self.axes = signature.axes(self.leaves)

    def __call__(self, *args: Tensor) -> list[Tensor]:
        recipe, s = self.recipe, self.signature
        out, y = self.trees(args)
        mask = args[-1] if s.mask is not None else None
        if mask is not None and mask.dim() >= 2:
            mask = self._layout.time_back(mask)
        with with_autocast(s.autocast):
            return [segment_loss(recipe.loss, out, y, mask, s.time_dim, recipe.context)]

    def trees(self, args: Sequence[Tensor]) -> tuple[Tree, Tree]:
        """What the loss is called with: ``(out, y)``."""
        n_out, n_y, y_spec = len(self.outs), len(self.signature.y), self.signature.specs.y
        out = tree_unflatten(list(args[:n_out]), self.out_spec)
        y = None if y_spec is None else tree_unflatten(list(args[n_out : n_out + n_y]), y_spec)
        return self._layout.time_back(out), None if y is None else self._layout.time_back(y)
