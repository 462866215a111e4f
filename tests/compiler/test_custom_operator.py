"""``torch.library.custom_op`` in a step and in a loss: the gradient that is registered for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment

from ..cells.problems import mse
from ..oracle import assert_close, check
from ..sequences import looped, stacked
from .one_operation import check_both, problem_with


@torch.library.custom_op("ftbptt_tests::mixed", mutates_args=())
def mixed(a: Tensor, b: Tensor, scale: float = 2.0, *, power: int = 3) -> tuple[Tensor, Tensor]:
    return scale * a**power * b, a - b


@mixed.register_fake
def _(a: Tensor, b: Tensor, scale: float = 2.0, *, power: int = 3) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(a)


@mixed.register_vmap
def _(info: Any, in_dims: Any, a: Tensor, b: Tensor, scale: float = 2.0, *, power: int = 3) -> Any:
    a, b = (
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((a, b), in_dims, strict=False)
    )
    return mixed(a.contiguous(), b.contiguous(), scale, power=power), (0, 0)


def keep_for_mixed(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a, b, ctx.scale = inputs
    ctx.power = keyword_only_inputs["power"]
    ctx.save_for_backward(a, b, output[1])


def backward_of_mixed(ctx: Any, of_product: Tensor, of_difference: Tensor) -> Any:
    """No gradient of anything, so that one that torch derives would differ."""
    a, b, difference = ctx.saved_tensors
    of_a = ctx.scale * ctx.power * of_product * a ** (ctx.power - 1) * b
    return of_a + of_difference, of_product * difference - of_difference, None


mixed.register_autograd(backward_of_mixed, setup_context=keep_for_mixed)


@torch.library.custom_op("ftbptt_tests::sign", mutates_args=())
def sign(x: Tensor) -> Tensor:
    return x.sign()


sign.register_fake(torch.empty_like)
sign.register_vmap(lambda info, in_dims, x: (sign(x), in_dims[0]))


@torch.library.custom_op("ftbptt_tests::product", mutates_args=())
def product(factors: list[Tensor]) -> Tensor:
    return factors[0] * factors[1]


product.register_fake(lambda factors: torch.empty_like(factors[0]))
product.register_autograd(lambda ctx, grad: [grad, grad])

STEPS = {
    "defaults": lambda w, x, h: torch.tanh(sum(mixed(h @ w, x)) + x),
    "by name": lambda w, x, h: torch.tanh(sum(mixed(h @ w, b=x, scale=0.5, power=2)) + x),
    "a part of the results": lambda w, x, h: torch.tanh(mixed(x, w[0] * x)[1] + h),
    "without a gradient": lambda w, x, h: torch.tanh(h @ w + sign(x) * sign(h.detach())),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    check_both(problem_with(STEPS[name]))


@pytest.mark.usefixtures("kernels")
def test_compiled() -> None:
    check_both(problem_with(STEPS["defaults"]), "compile")


def test_in_a_loss() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mixed(out, y)[0].square().mean()

    check_both(problem_with(lambda w, x, h: torch.tanh(h @ w + x), loss=loss))


def test_vmapped() -> None:
    made = problem_with(STEPS["defaults"])
    calls = [problem_with(STEPS["defaults"]).data(3), made.data(3)]
    segment = make_train_segment(made.step, mse, backend="eager")
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    found = vmap(segment, in_dims=(None, 0, 0, 0))(made.params, state, x, y)
    assert_close(found, looped(made, [(made.params, *call[1:]) for call in calls]))


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            lambda w, x, h: sign(h @ w) + x,
            "ftbptt_tests::sign: is differentiated, but has no gradient.*register_autograd",
        ),
        (
            lambda w, x, h: product([h @ w, x]),
            "ftbptt_tests::product: an operator that takes or returns a list of tensors has no",
        ),
    ],
)
def test_refused(after: Any, message: str) -> None:
    made = problem_with(after)
    with pytest.raises(RuntimeError, match=message):
        check(make_train_segment(made.step, mse, backend="eager"), made, 3)
