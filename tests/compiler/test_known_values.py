"""Steps whose Python reads tensors that are made of numbers alone, as ODE solvers do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import mse, named
from ..oracle import assert_close

K, B, H = 3, 2, 4


def solve(f: Any, h: Tensor, times: Tensor, step: float) -> Tensor:
    """Midpoint rule on a grid, with the checks and the loops of ``torchdiffeq.odeint``."""
    assert (times[1:] > times[:-1]).all()
    count = int(torch.ceil((times[-1] - times[0]) / step + 1).item())
    grid = torch.arange(0, count, dtype=times.dtype, device=times.device) * step + times[0]
    grid[-1] = times[-1]
    assert grid[0] == times[0]
    assert grid[-1] == times[-1]
    for t, until in pairwise(grid):
        dt = until - t
        h = h + dt * f(t + dt / 2, h + dt / 2 * f(t, h))
        if until >= times[1]:
            break
    return h


class OdeRnn(nn.Module):
    """The state flows between steps, on a grid of ``torch.linspace`` or of given times."""

    def __init__(self, points: int) -> None:
        super().__init__()
        self.flow, self.cell, self.points = nn.Linear(H, H), nn.GRUCell(H, H), points

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        times = torch.tensor([0.0, 1.0], dtype=h.dtype)
        if self.points:
            times = torch.linspace(0, 1, self.points, dtype=h.dtype)
        h = solve(lambda t, v: torch.tanh(self.flow(v)) * (1 + t), h, times, 0.4)
        h = self.cell(x, h)
        return h, h


def given(module: nn.Module) -> tuple[Any, ...]:
    torch.manual_seed(0)
    h, x, y = torch.randn(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    return named(module.double()), h.double(), x.double(), y.double()


@pytest.mark.parametrize("points", [0, 3])
def test_an_ode_solver(points: int) -> None:
    module = OdeRnn(points)
    arguments = given(module)
    segment = make_train_segment(module, mse, backend="eager")
    assert_close(segment(*arguments), reference_segment(module, mse, *arguments))


def test_in_kernels() -> None:
    """The points of time are parts of the kernel's arithmetic, and nothing of them is a block."""
    module = OdeRnn(0)
    arguments = given(module)
    segment = make_train_segment(module, mse, backend="fused")
    assert_close(segment(*arguments), reference_segment(module, mse, *arguments))
    assert str(segment.explain(*arguments)).count("one generated C++ kernel") == 2


def test_under_vmap() -> None:
    module = OdeRnn(0)
    params, *leaves = given(module)
    stacked = [torch.stack([leaf, 2 * leaf]) for leaf in leaves]
    segment = make_train_segment(module, mse, backend="eager")
    found = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))(params, *stacked)
    for i in range(2):
        expected = reference_segment(module, mse, params, *(leaf[i] for leaf in stacked))
        assert_close(found.loss[i], expected.loss)
        assert_close({n: g[i] for n, g in found.grads.items()}, expected.grads)


def reads_state(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h * params["w"] + x)
    return (h, h) if h.sum() > 0 else (-h, h)


def reads_many(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h * params["w"] + x)
    return (h, h) if torch.arange(2000).sum() > 0 else (-h, h)


@pytest.mark.parametrize("step", [reads_state, reads_many])
def test_other_values_are_not_known(step: Any) -> None:
    segment = make_train_segment(step, mse, backend="eager")
    arguments = {"w": torch.ones(H)}, torch.zeros(B, H), torch.zeros(K, B, H), torch.zeros(K, B, H)
    with pytest.raises(RuntimeError, match="needs the value of a tensor in Python"):
        segment(*arguments)
