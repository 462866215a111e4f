"""The loss of a segment: what ``loss(out, y)`` returns, averaged over the valid steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .._trees import Tree, tree_map

Loss = Callable[[Tree, Tree], Tensor]


class MaskMismatch(ValueError):
    """The loss of a step and row, and the mask, are of different shapes."""


def segment_loss(
    loss: Loss, out: Tree, y: Tree, mask: Tensor | None, time_dim: int, context: int = 0
) -> Tensor:
    """segment_loss : loss, out[K, ...], y[K, ...], mask[K] or [K, B] or None -> scalar

    A scalar loss is returned as it is. A loss per step, ``[K]`` or ``[K, B]``, is averaged over
    the steps where ``mask`` is true; no valid step at all gives 0. ``time_dim`` is where time is
    in a 2-d loss. The first ``context`` steps are left out of everything.
    """
    if context:
        out, y = (without_first(tree, context, time_dim) for tree in (out, y))
        if mask is not None:
            mask = without_first(mask, context, time_dim if mask.dim() > 1 else 0)
    value = loss(out, y)
    if not isinstance(value, Tensor):
        if isinstance(value, (float, torch.SymFloat)):  # the latter while it is traced
            raise TypeError(
                "loss: expected loss(out, y) to return a tensor, found float, which has no "
                "gradient. Return the tensor itself, without float() or .item()."
            )
        raise TypeError(
            f"loss: expected loss(out, y) to return a tensor, found {type(value).__name__}. Return "
            "the loss alone; other values, such as metrics, can be made of out, which the segment "
            "returns."
        )
    if not value.dtype.is_floating_point:
        raise TypeError(
            f"loss: expected loss(out, y) to return a real floating point tensor, found "
            f"{value.dtype}. Convert it inside the loss."
        )
    if value.dim() == 0:
        if mask is not None:
            raise ValueError(
                "mask: a scalar loss cannot be masked, since it has already mixed the steps. "
                "Return one value per step and row, [K] or [K, B] (reduction='none'), and the "
                "engine averages over the valid ones."
            )
        return value
    if value.dim() > 2:
        raise ValueError(
            f"loss: expected a scalar, or one value per step and row of shape [K] or [K, B], "
            f"found shape {list(value.shape)}. Reduce the last axes inside the loss."
        )
    if mask is None:
        return value.mean()
    if mask.dim() > value.dim():
        raise ValueError(
            f"loss: mask is {list(mask.shape)}, one value per step and row, but loss(out, y) has "
            f"shape {list(value.shape)}: it has already mixed the rows. Return [K, B]."
        )
    shape = mask.shape
    if mask.dim() < value.dim():
        mask = mask.unsqueeze(1 - time_dim)
    if any(m not in (1, v) for m, v in zip(mask.shape, value.shape, strict=True)):
        raise MaskMismatch(
            f"loss: loss(out, y) has shape {list(value.shape)}, but mask has {list(shape)}. Return "
            "one value per step and row, as the mask has them."
        )
    valid, dtype = mask.expand_as(value), value.dtype
    # float16 ends at 65504, which a sum or a number of steps may be beyond.
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.where(valid, value, torch.zeros_like(value)).sum(dtype=wide)
    return (total / valid.sum().clamp(min=1).to(wide)).to(dtype)


def without_first(tree: Tree, steps: int, time_dim: int) -> Tree:
    """The sequences of a tree without their first steps."""
    if tree is None:  # no target
        return None
    return tree_map(lambda leaf: leaf[(slice(None),) * time_dim + (slice(steps, None),)], tree)


def of_first(loss: Loss) -> Loss:
    """The loss of the first part of a step's output, where that has got more parts."""
    return partial(_loss_of_first, loss)  # which can be pickled, if the loss can


def _loss_of_first(loss: Loss, out: Tree, y: Tree) -> Tensor:
    return loss(out[0], y)
