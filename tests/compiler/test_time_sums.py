"""Gradients of parameters as sums over the steps, of which linear operations come after the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment, reference_segment

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


class Shifted(torch.autograd.Function):
    """``x + bias``, for a bias of more bits than x, or a single one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.is_single = not bias.dim()
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        if ctx.is_single:
            return grad, grad.sum(dim=None)
        return grad, grad.sum(0, dtype=torch.float32)


def test_a_sum_in_a_wider_dtype() -> None:
    """As for a bias in float32 in mixed precision: what is summed must not be rounded before."""

    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = Shifted.apply(x + 0.1 * h, params["bias"])
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out.float() - y).square().sum()

    draw = Draw(0)
    params, state = {"bias": draw(H).float()}, draw(4, H).bfloat16()
    data = state, draw.sequence(4, H)(40).bfloat16(), draw.sequence(4, H)(40).float()
    found = make_train_segment(step, loss, backend="eager")(params, *data).grads["bias"]
    expected = reference_segment(step, loss, params, *data).grads["bias"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_sum_over_all_axes() -> None:
    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = Shifted.apply(torch.tanh(x + 0.5 * h), params["bias"])
        return h, h

    draw = Draw(0)
    y = draw.sequence(4, H)
    made = Problem(step, {"bias": draw()}, draw(4, H), draw.sequence(4, H), y, mse)
    check(make_train_segment(step, mse, backend="eager"), made, 3)
