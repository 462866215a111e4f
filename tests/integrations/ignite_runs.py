"""Runs Ignite's trainer and ours, recording the losses of their chunks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.contrib.engines import tbptt as theirs
from ignite.engine import Engine, Events
from torch import nn

from ftbptt.integrations.ignite import Tbptt_Events, create_supervised_tbptt_trainer

STARTED, COMPLETED = Tbptt_Events.TIME_ITERATION_STARTED, Tbptt_Events.TIME_ITERATION_COMPLETED
mse = nn.MSELoss()


def trainer_of(
    model: Any,
    make: Callable[..., Engine] = create_supervised_tbptt_trainer,
    step: int = 4,
    loss: Any = mse,
    optimizer: Any = None,
    **options: Any,
) -> tuple[Engine, list[float]]:
    """A trainer, and a list to which it appends the loss of each chunk."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    trainer = make(model, optimizer, loss, step, **options)
    losses: list[float] = []
    trainer.add_event_handler(COMPLETED, lambda: losses.append(trainer.state.output))
    return trainer, losses


def assert_same(result: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, a), b in zip(result.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def check(
    model: nn.Module, data: Any, tolerance: float, *, dim: int = 0, **options: Any
) -> nn.Module:
    """Trains it, and a copy with Ignite's trainer: losses, means and parameters must be equal."""
    other = copy.deepcopy(model)
    theirs_ = trainer_of(other, theirs.create_supervised_tbptt_trainer, dim=dim)
    ours = trainer_of(model, dim=dim, loss_mean="chunks", **options)
    means: list[list[float]] = []
    for trainer, _ in (theirs_, ours):
        outputs: list[float] = []
        means.append(outputs)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda e, outputs=outputs: outputs.append(e.state.output)
        )
        torch.manual_seed(1)
        random.seed(1)
        trainer.run(data, max_epochs=2)
    assert len(ours[1]) == len(theirs_[1]) > 0
    assert ours[1] == pytest.approx(theirs_[1], rel=0, abs=tolerance)
    assert means[1] == pytest.approx(means[0], rel=0, abs=tolerance)
    assert all(type(loss) is float for loss in ours[1])
    assert_same(model, other, tolerance)
    return other
