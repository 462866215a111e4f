"""Variants of a segment that windows need: states from within, a scaled loss, another context."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._trees import Tree, tree_leaves
from ..contract.layout import InDimsLayout, Layout
from ..contract.loss import Loss
from ..segment.train_segment import TrainSegment
from .data.chunk import Chunk

# Each variant is compiled, so it lives as long as the segment that it was made from.
_variants: WeakKeyDictionary[TrainSegment, dict[Any, TrainSegment]] = WeakKeyDictionary()


def variant(
    train_segment: TrainSegment, *, states: bool, scaled: bool, context: int
) -> TrainSegment:
    """A variant of a segment, made once, or the segment itself if it already is that.

    ``states``: ``out`` becomes ``(out, states)``, with the state before each step. ``scaled``:
    ``y`` becomes what :func:`with_scale` makes. What a variant returns is never overwritten,
    whatever ``reuse_output`` was.
    """
    key = (states, scaled, context)
    if key == (False, False, train_segment.context) and not train_segment.reuses_output:
        return train_segment
    variants = _variants.setdefault(train_segment, {})
    if key not in variants:
        loss = _scaled if scaled else None
        variants[key] = train_segment.variant(states=states, loss=loss, context=context)
    return variants[key]


def _scaled(loss: Loss) -> Loss:
    """The loss, with a gradient times the factor of a gradient scaler, which comes with ``y``.

    At least in float32: an overflow must appear in the gradients, where the scaler looks for it.
    """

    def scaled_loss(out: Tree, y: tuple[Tree, Tensor] | tuple[Tensor]) -> Tensor:
        *target, scale = y
        value = loss(out, target[0] if target else None)
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        exact, factor = value.detach(), scale[(0,) * scale.dim()]
        return torch.where(exact.isfinite(), exact + (value - exact) * factor, value * factor)

    return scaled_loss


def with_scale(chunk: Chunk, scale: Tensor, layout: Layout) -> tuple[Tree, Tensor] | tuple[Tensor]:
    """The ``y`` of a scaled variant: ``(y, scale)``, or ``(scale,)`` without a target.

    Every leaf of ``y`` has time and rows, so the scalar is expanded to them.
    """
    if chunk.y is not None:
        return chunk.y, scale.expand(tree_leaves(chunk.y)[0].shape)
    x = tree_leaves(chunk.x)[0]
    sizes = {layout.y_time: x.shape[layout.x_time]}  # of the axes that y would have
    if layout.y_rows is not None and (isinstance(layout, InDimsLayout) or x.dim() > layout.x_rows):
        sizes[layout.y_rows] = x.shape[layout.x_rows]
    return (scale.expand([sizes.get(axis, 1) for axis in range(max(sizes) + 1)]),)
