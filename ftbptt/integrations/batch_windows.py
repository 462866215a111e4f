"""A batch cut along time: one window for each update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..training.windows import Truncation


class BatchWindow(NamedTuple):
    """The steps of one update. ``keep``: before which of them the next window starts.

    ``again``: it starts where this one did; else, without ``keep``, after this one.
    """

    x: Tensor
    y: Tensor
    reset: Tensor | None
    keep: int | None
    again: bool
    steps: int
    axis: int


@dataclass(frozen=True)
class BatchWindows:
    """Cuts a batch ``(x, y)`` along ``dim``; ``reset`` gives the flags that go with it."""

    truncation: Truncation
    dim: int
    reset: Callable[[Any], Tensor | None] | None

    def of(self, batch: Any) -> Iterator[BatchWindow]:
        """The windows of a batch, in the order of time."""
        x, y = batch if self.reset is None else batch[:2]
        for name, part in (("x", x), ("y", y)):
            if not isinstance(part, Tensor):
                raise TypeError(
                    f"batch: expected tensors (x, y), found a {type(part).__name__} for {name}. "
                    "What is to become of a chunk of them is up to prepare_batch."
                )
            if not -part.dim() <= self.dim < part.dim():
                raise ValueError(f"dim: {name} of shape {list(part.shape)} has no axis {self.dim}.")
        axis = self.dim % x.dim()
        reset = None if self.reset is None else self.reset(batch)
        if reset is not None:
            _check_reset(reset, x, axis)
        k1, k2 = self.truncation.k1, self.truncation.k2
        totals = x.shape[self.dim], y.shape[self.dim]
        if totals[0] != totals[1] and (reset is not None or k2 > k1):
            raise ValueError(
                f"batch: x has {totals[0]} steps on axis {self.dim}, but y has {totals[1]}. "
                "Windows that overlap, and reset, need as many in both."
            )
        count = max(1, min(-(-total // k1) for total in totals))  # as zip has it, and as split
        for i in range(count):
            window = self.truncation.window(i)
            start, end = window.start, window.end
            following = self.truncation.window(i + 1).start
            last = i == count - 1
            parts = [
                whole.narrow(self.dim, start, min(end, total) - start)
                for whole, total in zip((x, y), totals, strict=True)
            ]
            steps = parts[0].shape[self.dim]
            flags = reset
            if reset is not None:
                flags = reset.narrow(axis if reset.dim() > 1 else 0, start, steps)
            keep = None if last or not start < following < end else following - start
            again = following == start and not last
            yield BatchWindow(parts[0], parts[1], flags, keep, again, steps, axis)


def _check_reset(reset: Any, x: Tensor, axis: int) -> None:
    """bool, [T], or [T, B] with time where ``x`` has it."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        found = reset.dtype if isinstance(reset, Tensor) else type(reset).__name__
        raise TypeError(f"reset: expected it to return a bool tensor or None, found {found}.")
    wanted = [[x.shape[axis]]] + ([list(x.shape[:2])] if axis < 2 <= x.dim() else [])
    if list(reset.shape) not in wanted:
        words = " or ".join(map(str, wanted))
        raise ValueError(
            f"reset: expected it to return shape {words} for x of {list(x.shape)}, found "
            f"{list(reset.shape)}."
        )
