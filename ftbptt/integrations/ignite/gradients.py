"""Adds gradients to ``.grad``, as ``backward()`` does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..._memory import with_strides_of


def backward(loss: Tensor, weight: float, scaler: GradScaler | None) -> None:
    """Adds ``weight`` times the (scaled) gradients of the loss."""
    loss = loss if weight == 1 else loss * weight
    (loss if scaler is None else scaler.scale(loss)).backward()


def backward_alone(
    params: Mapping[str, nn.Parameter], loss: Tensor, weight: float, scaler: GradScaler | None
) -> dict[str, Tensor | None]:
    """As :func:`backward`; returns the gradients of this loss alone, without the weight.

    The backward has the weight: it may reach other parameters, as those of a loss.
    """
    before = {name: p.grad for name, p in params.items()}
    for p in params.values():
        p.grad = None
    try:
        backward(loss, weight, scaler)
    finally:
        grads = {name: p.grad for name, p in params.items()}
        for name, p in params.items():
            p.grad, grad = before[name], grads[name]
            if grad is not None:
                _add(p, grad, 1)
    if weight == 1:
        return grads
    return {name: None if grad is None else grad / weight for name, grad in grads.items()}


def add_gradients(
    params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor | None], weight: float
) -> None:
    """Adds ``weight`` times each gradient."""
    for name, grad in grads.items():
        assert grad is not None
        _add(params[name], with_strides_of(params[name], grad), weight)


def _add(p: nn.Parameter, grad: Tensor, weight: float) -> None:
    grad = grad if weight == 1 else grad * weight
    if p.grad is None:
        p.grad = grad
    else:
        with torch.no_grad():
            p.grad += grad
