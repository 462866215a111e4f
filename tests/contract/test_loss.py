"""What a loss may return, how it is averaged, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt.contract.loss import segment_loss

K, B = 4, 3


def value_of(value: Any, mask: Tensor | None = None, time_dim: int = 0) -> Tensor:
    return segment_loss(lambda out, y: value, None, None, mask, time_dim)


def test_the_loss_sees_out_and_y() -> None:
    seen = segment_loss(lambda out, y: (out["a"] - y).sum(), {"a": torch.ones(2)}, 0.5, None, 0)
    assert seen == 1.0


def test_a_scalar_is_returned_as_it_is() -> None:
    assert value_of(torch.tensor(3.5)) == 3.5


@pytest.mark.parametrize("shape", [(K,), (K, B)])
def test_a_loss_per_step_is_averaged(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    torch.testing.assert_close(value_of(value), value.mean())


def test_mask_averages_over_the_valid_ones() -> None:
    value = torch.arange(12.0).reshape(K, B)
    mask = torch.rand(K, B) < 0.5
    mask[0, 0] = True
    torch.testing.assert_close(value_of(value, mask), value[mask].mean())
    steps = torch.tensor([True, False, False, True])
    torch.testing.assert_close(value_of(value, steps), value[steps].mean())
    torch.testing.assert_close(value_of(value[:, 0], steps), value[steps, 0].mean())


def test_mask_of_steps_where_time_is_on_axis_1() -> None:
    value, steps = torch.randn(B, K), torch.tensor([True, False, False, True])
    torch.testing.assert_close(value_of(value, steps, time_dim=1), value[:, steps].mean())
    mask = torch.rand(B, K) < 0.5
    mask[0, 0] = True
    torch.testing.assert_close(value_of(value, mask, time_dim=1), value[mask].mean())


def test_more_steps_than_float16_counts() -> None:
    value = torch.full((70000,), 2.0, dtype=torch.float16, requires_grad=True)
    found = value_of(value, torch.ones(70000, dtype=torch.bool))
    (grad,) = torch.autograd.grad(found, value)
    assert found == 2
    torch.testing.assert_close(grad, torch.full_like(grad, 1 / 70000))


def test_nothing_valid_is_zero_and_not_nan() -> None:
    value = torch.randn(K, B, requires_grad=True)
    found = value_of(value, torch.zeros(K, B, dtype=torch.bool))
    (grad,) = torch.autograd.grad(found, value)
    assert found == 0
    assert not grad.any()


def test_what_is_masked_may_be_nan() -> None:
    value = torch.tensor([1.0, float("nan"), 3.0, float("inf")], requires_grad=True)
    found = value_of(value, torch.tensor([True, False, True, False]))
    (grad,) = torch.autograd.grad(found, value)
    assert found == 2
    assert grad.tolist() == [0.5, 0, 0.5, 0]


def test_nan_that_counts_is_returned() -> None:
    assert value_of(torch.tensor([1.0, float("nan")])).isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    value, mask = torch.ones(K, B, dtype=dtype), torch.ones(K, B, dtype=torch.bool)
    assert value_of(value).dtype == dtype
    assert value_of(value, mask).dtype == dtype
    assert value_of(value, mask) == 1


def test_a_scalar_cannot_be_masked() -> None:
    with pytest.raises(
        ValueError, match=r"mask: a scalar loss cannot be masked.*\[K\] or \[K, B\]"
    ):
        value_of(torch.tensor(1.0), torch.ones(K, dtype=torch.bool))


def test_too_many_axes() -> None:
    with pytest.raises(ValueError, match=r"loss: expected a scalar.*found shape \[4, 3, 2\]"):
        value_of(torch.zeros(K, B, 2))


def test_rows_that_are_already_mixed() -> None:
    with pytest.raises(
        ValueError, match=r"loss: mask is \[4, 3\].*has shape \[4\].*mixed the rows"
    ):
        value_of(torch.zeros(K), torch.ones(K, B, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(K, 2), (B,)])
def test_a_shape_that_is_not_that_of_the_mask(shape: tuple[int, ...]) -> None:
    mask = torch.ones(K, B, dtype=torch.bool) if len(shape) == 2 else torch.ones(K).bool()
    with pytest.raises(ValueError, match="loss: "):
        value_of(torch.zeros(shape), mask)


@pytest.mark.parametrize("wrong", [1.0, None, (torch.tensor(1.0),)])
def test_what_is_no_tensor(wrong: Any) -> None:
    advice = "Return the tensor itself" if isinstance(wrong, float) else "Return the loss alone;"
    words = f"loss: expected .* to return a tensor, found {type(wrong).__name__}.*{advice}"
    with pytest.raises(TypeError, match=words):
        value_of(wrong)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_real_number(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"loss: expected .* real floating .* found {dtype}"):
        value_of(torch.zeros(K, dtype=dtype))
