"""Runs of ``train_stream`` on the tagger, to their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ftbptt import TrainSegment
from ftbptt.training import Update, train_stream

from .streams import zeros

Params = dict[str, Tensor]
Segments = Callable[..., tuple[TrainSegment, Params]]


def sgd(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.values(), **{"lr": 0.5, **options})


def run(segment: Any, data: Any, **options: Any) -> tuple[list[Update], Params]:
    """All updates, and the parameters after them."""
    train_segment, params = segment
    optimizer = options.pop("optimizer", None) or sgd(params)
    options = {"k1": 4, "progress": False} | options
    updates = list(train_stream(train_segment, params, zeros(), data, optimizer, **options))
    return updates, params


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


class FunctionalMomentum:
    """Stochastic gradient descent with momentum, as pure functions."""

    def init(self, params: Params) -> Params:
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, grads: Params, state: Params, params: Params) -> tuple[Params, Params]:
        state = {name: 0.9 * state[name] + grad for name, grad in grads.items()}
        return {name: p.detach() - 0.5 * state[name] for name, p in params.items()}, state
