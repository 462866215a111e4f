"""What a step or a loss keeps, changes or trains beside its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, H, mse, named
from ..oracle import assert_close
from .calling import K, call

Tree = Any


class Remembers(nn.Module):
    """The classic: the hidden state is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(H))
        self.h: Tensor | None = None

    def forward(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.h = x_t * self.w if self.h is None else self.h + x_t * self.w
        return self.h, state


def test_a_module_with_its_state_in_an_attribute() -> None:
    module = Remembers()
    message = r"step Remembers changes the attribute 'h'.*from the state and return it"
    with pytest.raises(RuntimeError, match=message):
        call(module)
    assert module.h is None, "the module is as it was"


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.calls = nn.GRUCell(H, H), 0

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        h = self.cell(x_t, h)
        return h, h


def test_a_module_that_counts_its_calls() -> None:
    with pytest.raises(RuntimeError, match="changes the attribute 'calls'"):
        call(CountsCalls())


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(H, H), nn.BatchNorm1d(H)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.norm(x_t), h)
        return h, h


def test_batch_norm_in_train_mode_names_its_buffer() -> None:
    module = Normalised()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    message = (
        r"step Normalised changes its buffer '?norm\.(running_mean|running_var|num_batches).*eval"
    )
    with pytest.raises(RuntimeError, match=message):
        call(module)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_batch_norm_in_eval_mode_is_fine() -> None:
    assert call(Normalised().eval()).loss.isfinite()


@pytest.mark.parametrize("argument", ["params", "x", "state"])
def test_a_step_that_writes_into_its_arguments(argument: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        {"params": params["w"], "x": x_t, "state": h}[argument].mul_(0.5)
        return h + params["w"], h + x_t

    where = {"params": r"params\['w'\]", "x": "x", "state": "state"}[argument]
    with pytest.raises(RuntimeError, match=rf"step step changes {where} in place.*clone"):
        call(step)


@pytest.mark.parametrize("kind", ["replaced", "added", "removed"])
def test_a_step_that_changes_what_params_holds(kind: str) -> None:
    def step(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "replaced":
            params["w"] = params["w"] * 0.9
        elif kind == "added":
            params["n"] = params["w"] * 2
        else:
            del params["w"]
        return x_t, state

    leaf = r"params\['w'\]" if kind == "replaced" else "params"
    with pytest.raises(RuntimeError, match=f"step step puts other values into {leaf}, which the"):
        call(step)


@pytest.mark.parametrize("kind", ["write", "strides"])
def test_places_in_memory(kind: str) -> None:
    """What is written within torch.func.grad is a place in memory, as the trace has it."""

    def inner(a: Tensor) -> Tensor:
        z = a.clone()
        z[0] *= 2
        z[1] *= 3
        return (z**3).sum()

    def step(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = state + x_t * params["w"]
        if kind == "write":
            return torch.func.grad(inner)(h), state
        return h.as_strided((2,), (1,)), state

    with pytest.raises(RuntimeError, match="step step writes into a part of a tensor inside torch"):
        call(step)


def test_a_step_that_writes_into_what_it_closes_over() -> None:
    total = torch.zeros(B, H)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        total.add_(x_t)
        return h + total * params["w"], h

    with pytest.raises(RuntimeError, match=r"not among its arguments.*Carry it in the state"):
        call(step)
    assert not total.any()


@pytest.mark.parametrize("argument", ["step", "loss"])
def test_a_counter_that_is_a_tensor(argument: str) -> None:
    """Which nothing in the graph reads."""
    calls = torch.zeros((), dtype=torch.long)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if argument == "step":
            calls.add_(1)
        return h + x_t * params["w"], h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if argument == "loss":
            calls.add_(1)
        return mse(out, y)

    x = torch.randn(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    expected = f"{argument}: changes in place a tensor that is not among its arguments"
    with pytest.raises(RuntimeError, match=expected):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)
    assert calls == 0


seen = torch.ones(H)
WRITES: list[Callable[[], Any]] = [
    lambda: torch.add(seen[:1], 1, out=seen[:1]),
    lambda: torch.add(seen, 1, out=seen),
    lambda: torch._foreach_add_([seen], 1),
    lambda: seen[0].add_(1),
    lambda: torch.frexp(seen, out=(seen, torch.zeros(H, dtype=torch.int32))),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("argument", ["step", "loss"])
def test_writes_in_other_ways(write: Callable[[], Any], argument: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if argument == "step":
            write()
        return h + x_t * params["w"] + seen, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if argument == "loss":
            write()
        return mse(out, y)

    x = torch.randn(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    with pytest.raises(RuntimeError, match=r"in place a tensor that is not|mutate a captured"):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)
    assert seen.tolist() == [1.0] * H


@pytest.mark.parametrize("changed", ["out", "y"])
def test_a_loss_that_writes_into_its_arguments(changed: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        {"out": out, "y": y}[changed].sub_(1)
        return mse(out, y)

    x, y = torch.randn(K, B, H), torch.zeros(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    with pytest.raises(RuntimeError, match=r"loss: changes out or y in place.*Write out = out - a"):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, y)
    assert not y.any()


@pytest.mark.parametrize("kind", ["tensor", "parameter", "module"])
def test_a_step_that_closes_over_what_it_should_be_given(kind: str) -> None:
    """A weight that is not in params would silently never be trained."""
    layer = nn.Linear(H, H)
    weight: Any = layer.weight if kind == "parameter" else torch.zeros(H, H, requires_grad=True)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(layer(h) if kind == "module" else h @ weight) + x_t * params["w"]
        return h, h

    expected = (
        r"step: uses an? .* of shape \[7, 7\] that requires grad but was not taken from params"
    )
    with pytest.raises(ValueError, match=expected):
        call(step)


def test_a_loss_with_a_parameter() -> None:
    """A readout in the loss, which only the step's parameters would be trained beside."""
    readout = nn.Linear(H, H, bias=False)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x_t * params["w"])
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(readout(out), y)

    params, x = {"w": torch.ones(H), **named(readout)}, torch.randn(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    expected = (
        r"loss: uses an nn.Parameter of shape \[7, 7\] that requires grad but was not taken from "
        r"params, so it would get no gradient\. .*compute with it in the step"
    )
    with pytest.raises(ValueError, match=expected):
        segment(params, torch.zeros(B, H), x, x)
    readout.requires_grad_(False)
    assert segment(params, torch.zeros(B, H), x, x).loss.isfinite()


def detached(teacher: nn.Linear, x: Tensor) -> Tensor:
    return teacher(x).detach()


def without_grad(teacher: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        return teacher(x)


def with_detached_weights(teacher: nn.Linear, x: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in teacher.named_parameters()}
    return torch.func.functional_call(teacher, weights, x)


@pytest.mark.parametrize("use", [detached, without_grad, with_detached_weights])
@pytest.mark.parametrize("place", ["step", "loss"])
def test_a_trained_tensor_that_no_gradient_reaches(place: str, use: Callable[..., Any]) -> None:
    """A teacher, as the loop takes it; with a gradient it is refused."""
    teacher = nn.Linear(H, H)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * params["w"] + x_t)
        return h + use(teacher, x_t) if place == "step" else h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(out, use(teacher, y) if place == "loss" else y)

    params, h, x = {"w": torch.ones(H)}, torch.zeros(B, H), torch.randn(K, B, H)
    found = make_train_segment(step, loss, backend="eager")(params, h, x, x)
    assert_close(found, reference_segment(step, loss, params, h, x, x), 1e-6)
    use = lambda teacher, x: teacher(x)  # noqa: E731
    with pytest.raises(ValueError, match=rf"{place}: uses an nn.Parameter of shape \[\d+, \d+\]"):
        make_train_segment(step, loss, backend="eager")(params, h, x, x)


def restart_from(start: Callable[[Any], Tensor]) -> Any:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h + x_t * params["w"]

    segment = make_train_segment(step, mse, initial_state=start, backend="eager")
    x = torch.ones(K, B, H)
    return segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x, reset=torch.arange(K) == 2)


class Start:
    """An initial state that remembers."""

    table: Any = None

    def __call__(self, params: Any) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, H)
        return self.table.expand(B, H) * params["w"]


def test_an_initial_state_that_remembers() -> None:
    start = Start()
    words = "initial_state changes the attribute 'table' of Start. An initial_state is a pure"
    with pytest.raises(RuntimeError, match=words):
        restart_from(start)
    assert start.table is None


def test_an_initial_state_that_needs_a_value() -> None:
    def start(params: Any) -> Tensor:
        return params["w"].expand(B, H) if params["w"].sum() > 0 else torch.zeros(B, H)

    words = r"initial_state start cannot be compiled: it needs the value(.|\n)*test_outside_state"
    with pytest.raises(RuntimeError, match=words):
        restart_from(start)
