"""Submodules that the code of a step names, does not name, or comes to in other ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanSquaredError

from ftbptt import TrainSegment, make_train_segment

from ..cells.problems import B, Draw, H, Problem, mse, named
from ..oracle import check
from .changing import AGAIN


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 2.0

    def forward(self, h: Tensor) -> Tensor:
        return h * self.rate


class Counts(nn.Module):
    """As a metric does, what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.total = 0, torch.zeros(())

    def forward(self, h: Tensor) -> Tensor:
        self.seen, self.total = self.seen + len(h), self.total + h.sum()
        return self.total / self.seen


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.error, self.mean = MeanSquaredError(), Counts()
        self.scale_0 = Scale()

    def scaled(self, h: Tensor) -> Tensor:
        return self.scale_0(h)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.scaled(self.linear(x_t)) + h)
        return h, h


def through(function: Callable[[nn.Module], Iterator[nn.Module]]) -> type[Cell]:
    """A cell that comes to its submodule in this way."""

    class Other(Cell):
        def scaled(self, h: Tensor) -> Tensor:
            for module in function(self):
                h = module(h)
            return h

    return Other


class Chain(nn.Sequential):
    """Read by code of torch's."""


class Nested(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain(self.scale_0, nn.Identity())
        del self.scale_0

    def scaled(self, h: Tensor) -> Tensor:
        return self.inner(h)


class NamedTwice(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.scale_1 = self.scale_0

    def scaled(self, h: Tensor) -> Tensor:
        return self.scale_1(h)


def first_scale(modules: Iterator[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in modules if isinstance(module, Scale))


CELLS: dict[str, type[Cell]] = {
    "by its name": Cell,
    "by its second name": NamedTwice,
    "within a Sequential": Nested,
    "children": through(lambda m: first_scale(m.children())),
    "modules": through(lambda m: first_scale(m.modules())),
    "getattr": through(lambda m: iter([getattr(m, f"scale_{0}")])),
    "get_submodule": through(lambda m: iter([m.get_submodule(f"scale_{0}")])),
    "the dict of them": through(lambda m: iter([m._modules[f"scale_{0}"]])),  # type: ignore[list-item]
    "vars": through(lambda m: iter([vars(m)["_modules"][f"scale_{0}"]])),
}


def made_of(kind: type[Cell]) -> tuple[Cell, Problem, TrainSegment]:
    draw = Draw(1)
    module = draw.module(kind)
    made = Problem(module, named(module), draw(B, H), draw.sequence(B, H), draw.sequence(B, H), mse)
    return module, made, make_train_segment(module, mse, backend="eager")


@pytest.mark.parametrize("way", CELLS)
def test_a_change_is_noticed(way: str) -> None:
    module, made, segment = made_of(CELLS[way])
    check(segment, made, 4)
    scale = next(m for m in module.modules() if isinstance(m, Scale))
    scale.rate = 3.0
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4)


def test_what_no_code_names_may_change() -> None:
    """Metrics lie beside the layers, as in Lightning: a trace after each of their updates took
    longer than the segment."""
    module, made, segment = made_of(Cell)
    check(segment, made, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(9):
            module.error.update(torch.ones(3), torch.zeros(3))
            module.mean(torch.ones(3))
            check(segment, made, 4)
    assert segment.trace_count == 1
    assert module.error.compute() == 1


def test_one_that_is_replaced_is_still_an_error() -> None:
    module, made, segment = made_of(Cell)
    check(segment, made, 4)
    module.error = MeanSquaredError()
    with pytest.raises(RuntimeError, match="'error' of Cell was replaced"):
        check(segment, made, 4)
