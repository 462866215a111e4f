"""A value with the gradient of another tensor, as a straight-through estimator has it."""

from __future__ import annotations

import torch
from torch import Tensor


def with_gradient_of(value: Tensor, source: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """``value`` exactly, whose gradient goes to ``source``, times ``factor``.

    Where the source is not finite none does: the difference that carries it would be nan.
    """
    nothing = source - source.detach()
    nothing = torch.where(source.detach().isfinite(), nothing, torch.zeros_like(nothing))
    return value.detach() + factor * nothing
