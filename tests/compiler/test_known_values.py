"""Steps that read the values of constants: points of time in ODE solvers, edges of a graph."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy
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


def test_in_transforms_inside() -> None:
    scale = torch.tensor([1.0, 2.0, 3.0, 0.5]).double()

    def energy(h: Tensor) -> Tensor:
        return (scale * h).square().sum()

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        force = torch.func.vmap(torch.func.grad(energy))(h)
        h = torch.tanh(x - 0.1 * params["w"] * force) if scale[0] > 0 else h
        return h, h

    _, *leaves = given(nn.Linear(H, H))
    arguments = {"w": torch.ones(H).double()}, *leaves
    segment = make_train_segment(step, mse, backend="eager")
    assert_close(segment(*arguments), reference_segment(step, mse, *arguments))


def reads_state(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h * params["w"] + x)
    return (h, h) if h.sum() > 0 else (-h, h)


def reads_many(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h * params["w"] + x)
    return (h, h) if torch.arange(300_000).sum() > 0 else (-h, h)


class GraphCell(nn.Module):
    """Sums over the edges of a graph that are no loops, as graph convolutions prepare them."""

    def __init__(self, edges: Tensor, is_buffer: bool) -> None:
        super().__init__()
        self.enter, self.edges = nn.Linear(H, H), edges
        if is_buffer:
            del self.edges
            self.register_buffer("edges", edges)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edges = self.edges[:, self.edges[0] != self.edges[1]]
        rows = int(self.edges.max()) + 1
        degree = h.new_zeros(rows).scatter_add_(0, target, h.new_ones(edges.shape[1]))
        weight = 1 / degree.clamp(min=1)[target]
        weight = weight[weight.nonzero().squeeze(1)]
        sums = torch.zeros_like(h).index_add(0, target, h[source] * weight[:, None])
        h = torch.tanh(self.enter(x) + sums)
        return h, h


def edges() -> Tensor:
    return torch.tensor([[0, 0, 1, 2, 2, 4], [1, 0, 2, 2, 4, 3]])


def given_nodes(module: nn.Module) -> tuple[Any, ...]:
    params, *_ = given(module)
    torch.manual_seed(0)
    nodes, x, y = torch.randn(5, H), torch.randn(K, 5, H), torch.randn(K, 5, H)
    return params, nodes.double(), x.double(), y.double()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_graph(is_buffer: bool) -> None:
    module = GraphCell(edges(), is_buffer)
    arguments = given_nodes(module)
    segment = make_train_segment(module, mse, backend="eager")
    assert_close(segment(*arguments), reference_segment(module, mse, *arguments))
    # Their values are in the graph: others make another one, in place or not.
    for change in (lambda: module.edges[0].copy_(module.edges[0].flip(0)),
                   lambda: setattr(module, "edges", edges().flip(0))):  # fmt: skip
        change()
        with pytest.warns(RuntimeWarning, match="is compiled again: the (number|attribute|buffer)"):
            found = segment(*arguments)
        assert_close(found, reference_segment(module, mse, *arguments))


def test_a_graph_in_compiled_programs() -> None:
    module = GraphCell(edges(), False)
    arguments = given_nodes(module)
    segment = make_train_segment(module, mse)
    assert_close(segment(*arguments), reference_segment(module, mse, *arguments))


table = torch.tensor([1.0, 2.0, math.nan, 3.0])
WRITES = [
    lambda h: table[0].add_(1),
    lambda h: table[1:].select(0, 1).copy_(h.sum()),
    lambda h: table.mul_(2),
    lambda h: table.view(2, 2).mul_(2),
]


@pytest.mark.parametrize("write", [*WRITES, None])
def test_writes_to_what_is_known(write: Any) -> None:
    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if table[0] > 0 and write is not None:
            write(h)
        h = torch.tanh(h * params["w"] + x + table.nan_to_num())
        return h, h

    segment = make_train_segment(step, mse, backend="eager")
    arguments = {"w": torch.ones(H)}, torch.zeros(B, H), torch.zeros(K, B, H), torch.zeros(K, B, H)
    if write is None:
        assert_close(segment(*arguments).loss, reference_segment(step, mse, *arguments).loss, 1e-6)
        return
    with pytest.raises(RuntimeError, match="step: changes in place a tensor that is not among"):
        segment(*arguments)
    assert table[[0, 1, 3]].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("step", [reads_state, reads_many])
def test_other_values_are_not_known(step: Any) -> None:
    segment = make_train_segment(step, mse, backend="eager")
    arguments = {"w": torch.ones(H)}, torch.zeros(B, H), torch.zeros(K, B, H), torch.zeros(K, B, H)
    with pytest.raises(RuntimeError, match="needs the value of a tensor in Python"):
        segment(*arguments)


class ReadsALastOne(nn.Module):
    """What it leaves in ``kept``, also as far as it ran in a first attempt without the values."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.kept, self.times = nn.Linear(H, H), None, torch.ones(2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        is_first, self.kept = self.kept is None, h
        h = torch.tanh(self.enter(x) + h)
        if self.times[:1] > 0 and (self.times > 0).all():
            h = 2 * h if is_first else h
        return h, h


def test_what_a_first_attempt_leaves_is_undone() -> None:
    module = ReadsALastOne()
    with pytest.raises(RuntimeError, match="changes the attribute 'kept' of ReadsALastOne"):
        make_train_segment(module, mse, backend="eager")(*given(module))
    assert module.kept is None


def check(step: Any) -> None:
    """Compares a step with a parameter ``w`` with the loop."""
    _, *leaves = given(nn.Linear(H, H))
    arguments = ({"w": torch.ones(H, dtype=torch.float64)}, *leaves)
    segment = make_train_segment(step, mse, backend="eager")
    assert_close(segment(*arguments), reference_segment(step, mse, *arguments))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_mask_of_constants(axis: int) -> None:
    """Of what is not known itself, along either axis."""
    kept = torch.tensor([True, False, True, True])

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h * params["w"])
        chosen = h[:, kept].sum(1) if axis else h.T[kept].prod(0)
        return h * chosen.unsqueeze(1), h

    check(step)


@pytest.mark.parametrize("axis", [0, 1])
def test_values_at_a_mask_of_constants(axis: int) -> None:
    """One for each position that it selects."""
    kept = torch.tensor([True, False, True, True])

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h * params["w"])
        padded = torch.zeros_like(h)
        if axis:
            padded[:, kept] = h[:, :3]
        else:
            padded.T[kept] += h.T[:3]
        return padded + h, padded

    check(step)


def test_an_array_that_a_step_converts() -> None:
    """torch looks at its tensor outside of the transforms, which is no use of it by the step."""
    times, mixing = torch.ones(2), numpy.eye(H)[::-1].copy()

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        assert (times > 0).all()
        h = torch.tanh(x + h * params["w"] @ torch.from_numpy(mixing))
        return h, h

    check(step)


def test_a_negation_that_is_pending() -> None:
    """Is no write: the imaginary part of a conjugate."""
    times, part = torch.ones(2), torch.full((H,), 2j, dtype=torch.complex128).conj().imag
    assert part.is_neg()

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        assert (times > 0).all()
        h = torch.tanh(x + h * params["w"] * part)
        return h, h

    check(step)
