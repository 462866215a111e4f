"""Modules that are not the step itself: in train mode or not, as they are at each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ftbptt import make_train_segment
from ftbptt._reach import modules_read_by, reached_by

Tree = Any
DROPOUT = nn.Dropout(0.5)  # a global
torch_operators = torch.ops  # says that it has whatever attribute is asked for
MODULES: dict[str, list[nn.Module]] = {}


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(x_t), h


class Model:
    """No module, but has one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def step(self, params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = functional_call(self.module, params, (x_t, h))
        return result

    def __call__(self, params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(params, x_t, h)


def closed_over(module: nn.Module) -> Callable[..., Any]:
    def helper(*args: Any) -> Any:
        return functional_call(module, *args)

    return lambda params, x_t, h: helper(params, (x_t, h))


def of_global(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return DROPOUT(x_t), h


def by_partial(module: nn.Module, params: Tree, x_t: Tensor, h: Tensor) -> Any:
    return functional_call(module, params, (x_t, h))


def with_default(module: nn.Module) -> Callable[..., Any]:
    def step(params: Tree, x_t: Tensor, h: Tensor, own: nn.Module = module) -> Any:
        return functional_call(own, params, (x_t, h))

    return step


def of_attribute(module: nn.Module) -> Callable[..., Any]:
    config = SimpleNamespace(module=module)
    return lambda params, x_t, h: functional_call(config.module, params, (x_t, h))


def of_container(module: nn.Module) -> Callable[..., Any]:
    MODULES["own"] = [module]
    return lambda params, x_t, h: functional_call(MODULES["own"][0], params, (x_t, h))


STEPS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "closed over": closed_over,
    "global": lambda module: of_global,
    "partial": lambda module: partial(by_partial, module),
    "method": lambda module: Model(module).step,
    "default": with_default,
    "attribute": of_attribute,
    "container": of_container,
    "object": Model,
}


class Nested(nn.Module):
    """A module that reads a global one in code within its ``forward``."""

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = sum(self.dropped(part) for part in (x_t, h))
        return out, h  # type: ignore[return-value]

    def dropped(self, part: Tensor) -> Tensor:
        return (lambda: DROPOUT(part + 1))()


def zeros_in(out: Tensor) -> int:
    return int((out == 0).sum())


@pytest.mark.parametrize("name", STEPS)
def test_a_function_step_that_calls_modules(name: str) -> None:
    module = DROPOUT if name == "global" else Noisy()
    segment = make_train_segment(
        STEPS[name](module), lambda out, y: (out - y).square().mean(), backend="eager"
    )
    params, x, h = {"unused": torch.zeros(1)}, torch.ones(5, 4, 6), torch.zeros(4, 6)
    for training in (True, False, True):
        module.train(training)
        for _ in range(2):
            assert (zeros_in(segment(params, h, x, x).out) > 0) == training


def test_a_module_that_reads_a_global_one() -> None:
    segment = make_train_segment(
        Nested(), lambda out, y: (out - y).square().mean(), backend="eager"
    )
    x, h = torch.ones(5, 4, 6), torch.zeros(4, 6)
    for training in (True, False, True):
        DROPOUT.train(training)
        assert (zeros_in(segment({}, h, x, x).out) > 0) == training


def test_a_loss_that_is_a_module() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return self.dropout(torch.ones_like(out)).square().mean() + 0 * (out - y).mean()

    loss, cell = Loss(), nn.GRUCell(3, 4)
    segment = make_train_segment(cell, loss, backend="eager")
    arguments = dict(cell.named_parameters()), None, torch.ones(5, 2, 3), torch.ones(5, 2, 4)
    for training in (True, False, True):
        loss.train(training)
        assert (float(segment(*arguments).loss) != 1) == training


def test_what_a_class_holds_beside_methods() -> None:
    class Holds(nn.Module):
        scale, act, ops = np.ones(3), torch.tanh, torch.ops

        def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.act(x_t * self.scale[0]), h

    module = Holds()
    assert modules_read_by(module) == [module]
    assert torch_operators not in [*reached_by(lambda: torch_operators)]


def test_functions_of_torch_are_not_searched() -> None:
    assert modules_read_by(torch.nn.functional.cross_entropy) == []
