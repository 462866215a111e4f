"""Gradients of parameters as sums over the steps, of which linear operations come after the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment

from ..cells.problems import Draw, H, Problem, mse
from ..oracle import check

Tree = Any
SHAPE = (2, 4, 4)  # of a field on a grid


def neighbours(u: Tensor) -> Tensor:
    return torch.roll(u, 1, -1) + torch.roll(u, -1, -2) - 2 * u


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_linear_steps_within_a_step(backend: str) -> None:
    """Of a wave equation: there are more paths to the source than can be followed one by one."""

    def step(params: Tree, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tree]:
        u, v = state
        force = params["source"] + x
        for _ in range(8):
            v = v + 0.1 * (neighbours(u) + force)
            u = u + 0.1 * v
        return u, (u, v)

    draw = Draw(0)
    state = (draw(*SHAPE), draw(*SHAPE))
    made = Problem(
        step, {"source": draw(4, 4)}, state, draw.sequence(*SHAPE), draw.sequence(*SHAPE), mse
    )
    check(make_train_segment(step, mse, backend=backend), made, 3)


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_gradients_share_no_memory(backend: str) -> None:
    """One is a part of another; callers write to gradients in place, as clipping does."""

    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        part = torch.cat([0 * x[:1], params["part"]])
        h = torch.tanh(x + 0.5 * h + params["whole"] + part)
        return h, h

    draw = Draw(0)
    params = {"whole": draw(H), "part": draw(H - 1)}
    made = Problem(step, params, draw(H), draw.sequence(H), draw.sequence(H), mse)
    segment = make_train_segment(step, mse, backend=backend)
    check(segment, made, 3)
    grads = segment(*made.data(3)).grads
    before = grads["part"].clone()
    grads["whole"].zero_()
    assert torch.equal(grads["part"], before)
