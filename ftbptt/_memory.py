"""How tensors lie in memory: as a program reads them, and gradients as their parameters do."""

from __future__ import annotations

import torch
from torch import Tensor


def resolved(tensor: Tensor) -> Tensor:
    """The tensor, a lazy conjugate or negative computed: a program reads memory."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if is_lazy else tensor


def with_strides_of(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient, with the strides of its parameter.

    Autograd's have them, and fused optimizers go through both as if they were one list of numbers.
    A parameter may have others than a new tensor: torch.linalg.qr returns columns in a row.
    """
    if grad.stride() == param.stride():
        return grad
    with_strides = torch.empty_like(param.detach())
    # Those of a slice, or of an expanded tensor, no other tensor has, nor has autograd's gradient.
    return grad if grad.stride() == with_strides.stride() else with_strides.copy_(grad)
