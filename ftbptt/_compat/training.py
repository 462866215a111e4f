"""What torch's helpers for training keep to themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """The optimizer's update is not made, and begins anew: without it, unscaling would refuse.

    ``GradScaler.update`` forgets it too, but moves the scale (2.11 to 2.13).
    """
    scaler._per_optimizer_states.pop(id(optimizer), None)


def unscales_itself(optimizer: Any) -> bool:
    """Whether a ``GradScaler`` leaves unscaling to the optimizer's step, as to a fused one's."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


# A ``DataLoader`` draws a seed for its workers when it starts them, and so its order after that,
# from the same random numbers: another order where persistent workers are there already. It has no
# public way to see that (2.11 to 2.13: ``DataLoader.__iter__`` and ``_iterator``).


def has_workers(data: Any) -> bool:
    """Whether there are workers that wait for the next epoch."""
    return isinstance(data, DataLoader) and data._iterator is not None


def with_workers(data: Any, wanted: bool) -> None:
    """Sees to it that there are such workers, or none; random numbers are drawn to start some."""
    if not isinstance(data, DataLoader) or not data.persistent_workers:
        return
    if not wanted:
        data._iterator = None
    elif data._iterator is None:
        iter(data)
