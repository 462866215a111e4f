"""Losses of what a mask selects, of which the number depends on its values."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ftbptt import make_train_segment, reference_segment

from ..oracle import assert_close

K, B, H = 5, 3, 4


def by_elements(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).abs()[y > 0].sum()


def by_steps_and_rows(out: Tensor, y: Tensor) -> Tensor:
    kept = y[..., 0] > 0
    return F.mse_loss(out[kept], y[kept], reduction="sum")


def by_numbers(out: Tensor, y: Tensor) -> Tensor:
    return out[torch.nonzero(y > 0, as_tuple=True)].square().sum()


def by_numbers_of_few(out: Tensor, y: Tensor) -> Tensor:
    """It also reads K as a number."""
    return by_numbers(out, y) / len(out)


def selected(out: Tensor, y: Tensor) -> Tensor:
    return out.masked_select(y[..., :1] > 0).square().sum()


def columns(out: Tensor, y: Tensor) -> Tensor:
    return out[:, y[0, :, 0] > 0].square().sum()


def put(out: Tensor, y: Tensor) -> Tensor:
    kept = y > 0
    padded = torch.zeros_like(out)
    padded[kept] = 2 * out[kept]
    return (padded - y).square().mean()


def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h + x_t * params["w"])
    return h, h


@pytest.mark.parametrize(
    "loss",
    [by_elements, by_steps_and_rows, by_numbers, by_numbers_of_few, selected, columns, put],
)
def test_what_a_mask_selects(loss: Any) -> None:
    """Of all, of some, of none; of one step as well; with one program for all of these."""
    torch.manual_seed(0)
    params, h = {"w": torch.randn(H).double()}, torch.randn(B, H).double()
    segment = make_train_segment(step, loss, backend="eager")
    for steps in (K, 1, 3):
        x, y = torch.randn(steps, B, H).double(), torch.randn(steps, B, H).double()
        for least in (0.0, 9.0, -9.0):
            given = params, h, x, y - least
            assert_close(segment(*given), reference_segment(step, loss, *given))
    assert segment.trace_count == 1


def test_in_a_compiled_program() -> None:
    torch.manual_seed(0)
    segment = make_train_segment(step, by_steps_and_rows, backend="compile")
    for steps in (K, 3):
        given = [{"w": torch.randn(H).double()}, torch.randn(B, H).double()]
        given += [torch.randn(steps, B, H).double() for _ in range(2)]
        assert_close(segment(*given), reference_segment(step, by_steps_and_rows, *given))
    assert segment.compile_count == 1


def spread(out: Tensor, y: Tensor) -> Tensor:
    return out[y > -9].std()


def added_up(out: Tensor, y: Tensor) -> Tensor:
    return out[y > 0].cumsum(0).square().sum()


@pytest.mark.parametrize("loss", [spread, added_up])
def test_a_gradient_that_cannot_be_traced(loss: Any) -> None:
    """It has a branch on the number of elements: the loss runs as it is written."""
    torch.manual_seed(0)
    given = [{"w": torch.randn(H).double()}, torch.randn(B, H).double()]
    given += [torch.randn(K, B, H).double() for _ in range(2)]
    segment = make_train_segment(step, loss, backend="eager")
    with pytest.warns(RuntimeWarning, match=rf"loss {loss.__name__} cannot be compiled"):
        found = segment(*given)
    assert_close(found, reference_segment(step, loss, *given))


def test_under_vmap() -> None:
    """Each entry of vmap has a number of elements of its own."""
    torch.manual_seed(0)
    params, h = {"w": torch.randn(H).double()}, torch.randn(2, B, H).double()
    x, y = torch.randn(2, K, B, H).double(), torch.randn(2, K, B, H).double()
    segment = make_train_segment(step, by_elements, backend="eager")
    with pytest.warns(RuntimeWarning, match="loss by_elements selects by a mask"):
        found = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))(params, h, x, y)
    for i in range(2):
        expected = reference_segment(step, by_elements, params, h[i], x[i], y[i])
        assert_close(tree_map(itemgetter(i), found), expected)
