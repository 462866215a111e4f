"""Cuts a batch along time into windows, one for each update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._messages import describe_type
from ...training.data.windows import Truncation, kept_within


class BatchWindow(NamedTuple):
    """The data of one update, and where the next window starts.

    - ``x``, ``y``, ``reset``: the steps of this window.
    - ``save_at``: the step of this window at which the next one starts; None if that is the first
      step of this window (then ``repeats_start`` is True), or the step after its last.
    - ``steps``: the number of steps. ``axis``: the axis of time in ``x``, counted from the front.
    """

    x: Tensor
    y: Tensor
    reset: Tensor | None
    save_at: int | None
    repeats_start: bool
    steps: int
    axis: int


@dataclass(frozen=True)
class BatchWindows:
    """Cuts a batch ``(x, y)`` along ``dim``; ``reset(batch)`` returns its reset flags."""

    truncation: Truncation
    dim: int
    reset: Callable[[Any], Tensor | None] | None

    def of(self, batch: Any) -> Iterator[BatchWindow]:
        """Yields the windows of a batch in order of time.

        Raises TypeError and ValueError for batches of other structures or shapes.
        """
        parts = len(batch) if isinstance(batch, (tuple, list)) else 0
        if parts < 2 or (parts > 2 and self.reset is None):
            raise TypeError(
                f"batch: expected (x, y), found {describe_type(batch)}. Further parts are for "
                "reset=, a function of the batch that returns flags; convert others in the loader."
            )
        x, y = batch[:2]
        for name, leaf in (("x", x), ("y", y)):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"batch: expected tensors (x, y), found a {type(leaf).__name__} for {name}. "
                    "Return tensors from the loader; prepare_batch may convert each chunk of them."
                )
            if not -leaf.dim() <= self.dim < leaf.dim():
                raise ValueError(f"dim: {name} of shape {list(leaf.shape)} has no axis {self.dim}.")
        axis = self.dim % x.dim()
        reset = None if self.reset is None else self.reset(batch)
        if reset is not None:
            _check_reset(reset, x, axis)
        k1, k2 = self.truncation.k1, self.truncation.k2
        x_steps, y_steps = x.shape[self.dim], y.shape[self.dim]
        if x_steps != y_steps and (reset is not None or k2 > k1):
            raise ValueError(
                f"batch: x has {x_steps} steps on axis {self.dim}, but y has {y_steps}. "
                "Overlapping windows and reset need the same number in both."
            )
        # Like zip(x.split(k1), y.split(k1)), which stops at the shorter and splits 0 steps once.
        count = max(1, min(-(-steps // k1) for steps in (x_steps, y_steps)))
        for i in range(count):
            window = self.truncation.window(i)
            start, end, next_start = window.start, window.end, self.truncation.next_start(window)
            steps = min(end, x_steps) - start
            is_last = i == count - 1
            flags = None
            if reset is not None:
                flags = reset.narrow(axis if reset.dim() > 1 else 0, start, steps)
            yield BatchWindow(
                x.narrow(self.dim, start, steps),
                y.narrow(self.dim, start, min(end, y_steps) - start),
                flags,
                save_at=None if is_last else kept_within(window, next_start),
                repeats_start=not is_last and next_start == start,
                steps=steps,
                axis=axis,
            )


def _check_reset(reset: Any, x: Tensor, axis: int) -> None:
    """``reset`` must be bool, [T], or [T, B] with time where ``x`` has it."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        kind = reset.dtype if isinstance(reset, Tensor) else type(reset).__name__
        raise TypeError(f"reset: expected it to return a bool tensor or None, found {kind}.")
    shapes = [[x.shape[axis]]] + ([list(x.shape[:2])] if axis < 2 <= x.dim() else [])
    if list(reset.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(
            f"reset: expected it to return shape {expected} for x of {list(x.shape)}, found "
            f"{list(reset.shape)}."
        )
