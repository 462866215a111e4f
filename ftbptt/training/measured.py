"""What a window gave besides its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Measured(NamedTuple):
    """The mean loss over ``weight`` valid steps, all rows together; both stay on the device.

    ``steps`` are those of time, ``tokens`` those of all rows, valid or not.
    """

    loss: Tensor
    weight: int | Tensor
    steps: int
    tokens: int

    @staticmethod
    def joined(parts: Sequence[Measured], steps: int | None = None) -> Measured:
        """That of several windows, or of a window of so many ``steps`` from its micro-batches."""
        if len(parts) == 1:
            return parts[0]
        weight = sum(part.weight for part in parts)
        least = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        loss = sum((part.loss * part.weight for part in parts[1:]), parts[0].loss * parts[0].weight)
        steps = sum(part.steps for part in parts) if steps is None else steps
        return Measured(loss / least, weight, steps, sum(part.tokens for part in parts))
