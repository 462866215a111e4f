"""Stopping when a loss has not improved for a while."""

from __future__ import annotations

import math
from typing import Any

from ..._checks import check_int, check_number


class EarlyStop:
    """EarlyStop : patience, min_delta -> a function of a loss, true when it is time to stop

    Pass it as ``train_stream(stop=...)``, which calls it with the mean loss of each report, or call
    it with the loss of an evaluation. It returns true once no loss was below the best one by more
    than ``min_delta`` for ``patience`` calls in a row. NaN is no improvement.

    Raises TypeError for a ``patience`` that is not a whole number and a ``min_delta`` that is none,
    ValueError for one below 1 or a negative ``min_delta``.

    >>> stop = EarlyStop(patience=2)
    >>> [stop(loss) for loss in (1.0, 0.5, 0.6, 0.5)]
    [False, False, False, True]
    """

    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        patience = check_int("patience", patience, 1)
        check_number("min_delta", min_delta)
        if not min_delta >= 0:
            raise ValueError(f"min_delta: expected at least 0, found {min_delta}.")
        self.patience, self.min_delta = patience, min_delta
        self.best = math.inf
        self.calls_without_gain = 0

    def __call__(self, loss: float) -> bool:
        if loss < self.best - self.min_delta:
            self.best, self.calls_without_gain = loss, 0
        else:
            self.calls_without_gain += 1
        return self.reached

    @property
    def reached(self) -> bool:
        """Whether it is time to stop."""
        return self.calls_without_gain >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """The best loss and the calls since, for a checkpoint; ``train_stream`` stores it."""
        return {"best": self.best, "calls_without_gain": self.calls_without_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned."""
        self.best, self.calls_without_gain = state["best"], state["calls_without_gain"]
