"""Norms of gradients: of all together, or of those of each model of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .ensembles import for_each_model, is_ensemble


def total_norm(grads: Sequence[Tensor], loss: Tensor) -> Tensor:
    """The norm of all gradients together, or of each model's."""
    if not is_ensemble(grads, loss):
        return get_total_norm(grads)
    norms = [torch.linalg.vector_norm(grad.reshape(*loss.shape, -1), dim=-1) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def clip_by_norm(grads: Sequence[Tensor], norm: Tensor, bound: float) -> None:
    """Scales gradients in place, where their :func:`total_norm` is above ``bound``."""
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(for_each_model(factor, grad))
