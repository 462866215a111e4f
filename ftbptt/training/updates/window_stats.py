"""What a window gives besides its gradients: its loss, and what that weighs in a mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .ensembles import for_each_model


class WindowStats(NamedTuple):
    """The loss of a window, and its weight in the loss of an update; both stay on the device.

    ``weight`` is the number of valid steps that the loss is a mean over, summed over rows (with
    ``in_dims``: of all steps; one for each model of an ensemble with masks of their own). ``steps``
    counts steps of time, ``tokens`` the steps of all rows, valid or not.
    """

    loss: Tensor
    weight: int | Tensor
    steps: int
    tokens: int

    @staticmethod
    def joined(parts: Sequence[WindowStats], steps: int | None = None) -> WindowStats:
        """Those of several windows together, or of the micro-batches of one that has ``steps``."""
        if len(parts) == 1:
            return parts[0]
        loss, weight = parts[0].loss, parts[0].weight
        for part in parts[1:]:
            weight = weight + part.weight
            loss = moved_mean(loss, part.loss, share(part.weight, weight))
        steps = sum(part.steps for part in parts) if steps is None else steps
        return WindowStats(loss, weight, steps, sum(part.tokens for part in parts))


def share(weight: int | Tensor, total: int | Tensor) -> float | Tensor:
    """The fraction that a part has in a mean over ``total``, which includes its ``weight``.

    ``mean + (part - mean) * share`` updates a running mean, as :func:`moved_mean` does. A sum to be
    divided by ``total`` at the end would overflow in half precision.
    """
    if isinstance(total, Tensor):
        return weight / total.clamp(min=1).double()
    return weight / max(total, 1)


def moved_mean(mean: Tensor, part: Tensor, fraction: float | Tensor) -> Tensor:
    """A running mean with one more part in it, of its dtype.

    The fraction may be a float64 tensor, which would make single numbers float64; of an ensemble,
    with one for each model.
    """
    if isinstance(fraction, Tensor) and fraction.dim():
        fraction = for_each_model(fraction, mean)
    return mean + ((part - mean) * fraction).to(mean.dtype)
