"""What a window gave besides its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class WindowStats(NamedTuple):
    """The mean loss over ``weight`` valid steps, all rows together; both stay on the device.

    ``steps`` are those of time, ``tokens`` those of all rows, valid or not.
    """

    loss: Tensor
    weight: int | Tensor
    steps: int
    tokens: int

    @staticmethod
    def joined(parts: Sequence[WindowStats], steps: int | None = None) -> WindowStats:
        """That of several windows, or of a window of so many ``steps`` from its micro-batches."""
        if len(parts) == 1:
            return parts[0]
        loss, weight = parts[0].loss, parts[0].weight
        for part in parts[1:]:
            weight = weight + part.weight
            loss = loss + (part.loss - loss) * share(part.weight, weight)
        steps = sum(part.steps for part in parts) if steps is None else steps
        return WindowStats(loss, weight, steps, sum(part.tokens for part in parts))


def share(own: int | Tensor, total: int | Tensor) -> float | Tensor:
    """What a part with so many valid steps has in a mean over ``total``, itself among them.

    ``mean + (part - mean) * share`` goes on with a mean; the sums that it would be a quotient of
    have no room in half precision.
    """
    if isinstance(total, Tensor):
        return own / total.clamp(min=1).double()
    return own / max(total, 1)
