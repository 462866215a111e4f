"""Gradients and tangents that a step computes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, Draw, H, Problem, mse
from .calling import K, call
from .one_operation import check_both

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


SCALARS = {
    "matrix times vector": lambda x, v: torch.tanh(x @ v).square().sum(),
    "linear": lambda x, v: nn.functional.linear(x, v).square().mean(),
    "addmv": lambda x, v: torch.addmv(x[:, 0], x, v).pow(3).sum(),
    "dot": lambda x, v: torch.dot(v, v).square() + (x @ v).cos().sum(),
}


@pytest.mark.parametrize("name", SCALARS)
def test_hessians(name: str) -> None:
    """Of Newton's method."""

    def step(params: Tree, x_t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        slope, hessian = (of(lambda v: SCALARS[name](x_t, v)) for of in (grad, torch.func.hessian))
        v = v - params["rate"] * torch.linalg.solve(hessian(v) + 5 * torch.eye(H).to(v), slope(v))
        return v, v

    draw = Draw(0)
    rate = {"rate": torch.tensor(0.3, dtype=torch.float64)}
    made = Problem(step, rate, draw(H), draw.sequence(B, H), draw.sequence(H), mse)
    check_both(made)


def test_a_whole_number_has_no_gradient() -> None:
    """Such as a counter in the state: the error is that of the loop."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        slope = grad(lambda state: (x_t @ state["v"]).square().sum())(state)
        v = state["v"] - params["rate"] * slope["v"]
        return v, {"v": v, "count": state["count"] + 1}

    state = {"v": torch.ones(H), "count": torch.tensor(0)}
    given = ({"rate": torch.tensor(0.1)}, state, torch.randn(K, B, H), torch.randn(K, H))
    words = "only Tensors of floating point dtype can require gradients"
    with pytest.raises(RuntimeError, match=words):
        reference_segment(step, mse, *given)
    with pytest.raises(RuntimeError, match=words):
        make_train_segment(step, mse, backend="eager")(*given)
