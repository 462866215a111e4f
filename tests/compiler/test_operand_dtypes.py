"""Operands of different dtypes: the error names the leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, H, mse, named
from .calling import K, call

Tree = Any
DOUBLE = torch.float64


def cell_call(cell: nn.Module, x: Tensor, state: Tree, backend: str) -> Any:
    segment = make_train_segment(cell, mse, backend=backend)
    return segment(named(cell), state, x, torch.zeros(K, B, H, dtype=x.dtype))


@pytest.mark.parametrize("backend", ["auto", "eager", "compile", "fused"])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_data_of_another_dtype_than_the_parameters(kind: Any, backend: str) -> None:
    """Fake tensors do not check it, and each backend would fail in another way."""
    message = (
        r"step: x is torch.float64, but the parameters are torch.float32, and .* multiplies the "
        r"two. Give x as torch.float32 \(x.float\(\)\), or the parameters as torch.float64 "
        r"\(module.double\(\)\)."
    )
    with pytest.raises(TypeError, match=message):
        cell_call(kind(H, H), torch.randn(K, B, H, dtype=DOUBLE), None, backend)
    message = r"state.* came out as torch.float64. x is torch.float32 too.*give x and the state as "
    with pytest.raises(TypeError, match=message + "torch.float64"):
        cell_call(kind(H, H).double(), torch.randn(K, B, H), None, backend)


def test_the_leaf_of_another_dtype_is_named() -> None:
    def product(params: Tree, x_t: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t["a"] + (x_t["b"] @ params["w"]).float() + h)
        return h, h

    def convolution(params: Tree, x_t: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t["a"] + F.conv1d(x_t["b"][None], params["c"])[0].float() + h)
        return h, h

    params = {"w": torch.randn(H, H), "c": torch.randn(B, B, 1)}
    x = {"a": torch.randn(K, B, H), "b": torch.randn(K, B, H, dtype=torch.float16)}
    for step in (product, convolution):
        message = (
            r"step: x\['b'\] is torch.float16, but the parameters are torch.float32, and "
            rf"{step.__name__} .*Give x\['b'\] as torch.float32 \(x\['b'\].float\(\)\), or the "
            r"parameters as torch.float16\."
        )
        segment = make_train_segment(step, mse, backend="eager")
        with pytest.raises(TypeError, match=message):
            segment(params, torch.zeros(B, H), x, torch.zeros(K, B, H))


def test_a_state_of_another_dtype_than_the_parameters() -> None:
    message = r"step: state is torch.float64, but the parameters are torch.float32.*state.float\(\)"
    with pytest.raises(TypeError, match=message):
        cell_call(nn.GRUCell(H, H), torch.randn(K, B, H), torch.zeros(B, H, dtype=DOUBLE), "eager")


def test_operands_of_different_dtypes_that_are_no_arguments() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.eye(H, dtype=DOUBLE)
        h = torch.tanh(x_t + ((h * params["w"]) @ eye).float())
        return h, h

    message = r"calls aten.mm.default on operands of different dtypes, .*float32 and .*float64"
    with pytest.raises(TypeError, match=message):
        call(step)


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_operands_that_the_step_converts(backend: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh((x_t @ params["u"].double()).float() + h @ params["u"])
        return h, h

    x = torch.randn(K, B, H, dtype=DOUBLE)
    arguments = {"u": torch.randn(H, H)}, torch.zeros(B, H), x, torch.randn(K, B, H)
    result = make_train_segment(step, mse, backend=backend)(*arguments)
    torch.testing.assert_close(result.grads, reference_segment(step, mse, *arguments).grads)
