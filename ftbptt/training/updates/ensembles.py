"""The axes of models, with which everything in an ensemble begins: losses, weights, gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def is_ensemble(grads: Sequence[Tensor], loss: Tensor) -> bool:
    """Whether ``loss`` has axes with which all gradients begin: those of models, under vmap."""
    models = loss.shape
    return bool(models and grads) and all(grad.shape[: len(models)] == models for grad in grads)


def for_each_model(values: Tensor, leaf: Tensor) -> Tensor:
    """The values of models in a shape that broadcasts with a ``leaf`` that begins with them."""
    return values.reshape(values.shape + (1,) * (leaf.dim() - values.dim()))
