"""Gradients and tangents that a step computes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, H, mse
from .calling import K, call

Tree = Any


def test_a_gradient_by_torch_autograd() -> None:
    def by_grad(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        (slope,) = torch.autograd.grad((h**3).sum(), h, create_graph=True)
        return h, h - 0.1 * slope

    def by_backward(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        ((h + x_t * params["w"]) ** 3).sum().backward()
        return h, h

    for step in (by_grad, by_backward):
        message = rf"step {step.__name__} takes a gradient by torch\.autograd.*\n.*test_inner_grad"
        with pytest.raises(RuntimeError, match=message) as caught:
            call(step)
        assert "torch.func.grad(f)(x)" in str(caught.value)


def test_a_gradient_by_torch_func_and_marks_that_do_not_matter() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = (h + x_t * params["w"]).requires_grad_()
        h = h - 0.1 * torch.func.grad(lambda h: (h**3).sum())(h)
        return h + torch.zeros(H).requires_grad_(False), h

    arguments = {"w": torch.ones(H)}, torch.zeros(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    result = make_train_segment(step, mse, backend="eager")(*arguments)
    torch.testing.assert_close(result.grads, reference_segment(step, mse, *arguments).grads)


def tangent_in_no_grad(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda h: h**3 * x_t, (h,), (x_t,))
    return h, h - params["w"] * tangent


def no_grad_in_a_tangent(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    def function(h: Tensor) -> Tensor:
        with torch.no_grad():
            square = h**2
        return square * h * x_t

    _, tangent = torch.func.jvp(function, (h,), (x_t,))
    return h, h - params["w"] * tangent


def jacobian_in_no_grad(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        jacobian = torch.func.jacfwd(lambda row: (row * row.sum()).sin())(h[0])
    return h, h @ jacobian * params["w"]


@pytest.mark.parametrize("step", [tangent_in_no_grad, no_grad_in_a_tangent, jacobian_in_no_grad])
def test_a_tangent_and_no_grad(step: Any) -> None:
    message = r"step: torch\.func\.jvp \(jacfwd, hessian\) around or inside of no_grad cannot be.*"
    with pytest.raises(RuntimeError, match=message + r"detach\(\) its results"):
        call(step)


def test_a_tangent_and_detach() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.jvp(lambda h: h.detach() ** 2 * h * x_t, (h,), (x_t,))[1]
        constant = torch.func.jvp(lambda h: h**3 * x_t, (h,), (x_t,))[1].detach()
        return h + slope, h - params["w"] * (slope + constant).tanh()

    arguments = {"w": torch.ones(H)}, torch.rand(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    result = make_train_segment(step, mse, backend="eager")(*arguments)
    torch.testing.assert_close(result.grads, reference_segment(step, mse, *arguments).grads)
