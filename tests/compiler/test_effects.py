"""A step with side effects is refused, and the effects are undone."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import mse
from ..oracle import assert_close

Tree = Any
K, B, H = 4, 2, 3
calls_of_all = 0
scale_of_all = 1
seen_by_all: list[Tensor] = []


def call(step: Any) -> Any:
    params = dict(step.named_parameters()) if isinstance(step, nn.Module) else {"w": torch.ones(H)}
    segment = make_train_segment(step, mse, backend="eager")
    return segment(params, torch.zeros(B, H), torch.randn(K, B, H), torch.randn(K, B, H))


def refused(step: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(step)


def test_a_captured_variable() -> None:
    calls = 0

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return h + calls * params["w"], h + x_t

    refused(step, "step step changes the captured variable 'calls'.*from the state")
    assert calls == 0


def test_a_global_variable() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        global calls_of_all
        calls_of_all += 1
        return h + calls_of_all * params["w"], h + x_t

    refused(step, "changes the global variable 'calls_of_all'")
    assert calls_of_all == 0


def test_a_global_list() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        seen_by_all.append(h)
        return h * params["w"], h + x_t

    refused(step, "changes the global variable 'seen_by_all'")
    assert seen_by_all == []


@pytest.mark.parametrize("kind", [list, dict, set, deque])
def test_a_captured_container(kind: Any) -> None:
    kept = kind([("a", 1)])

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(kept, dict):
            kept["a"] = h
        elif isinstance(kept, set):
            kept.add("b")
        else:
            kept.append(h)
        return h * params["w"], h + x_t

    refused(step, "changes the captured variable 'kept'")
    assert kept == kind([("a", 1)])


def test_a_container_in_a_module() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(H, H)
            self.inner.stats = {"calls": 0}  # type: ignore[assignment]

        def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            self.inner.stats["calls"] += 1  # type: ignore[index, operator]
            h = torch.tanh(self.inner(h) + x_t)
            return h, h

    module = Logs()
    refused(module, "changes the attribute 'inner.stats'")
    assert module.inner.stats == {"calls": 0}


class OfAll(nn.Module):
    """Keeps what it sees in its class."""

    last: Any = None
    calls = 0
    log: list[Tensor] = []  # noqa: RUF012
    by_name: dict[str, Tensor] = {}  # noqa: RUF012

    def __init__(self, effect: Callable[[OfAll, Tensor], Any]) -> None:
        super().__init__()
        self.cell, self.effect = nn.GRUCell(H, H), effect

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        self.effect(self, h)
        return h, h


def count_in_class(module: OfAll, h: Tensor) -> None:
    OfAll.calls += 1


EFFECTS: dict[str, Callable[[OfAll, Tensor], Any]] = {
    "last": lambda module, h: setattr(OfAll, "last", h),
    "calls": count_in_class,
    "log": lambda module, h: module.log.append(h),
    "by_name": lambda module, h: module.by_name.update(h=h),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_class(name: str) -> None:
    refused(OfAll(EFFECTS[name]), f"changes the attribute '{name}' of the class OfAll")
    assert (OfAll.last, OfAll.calls, OfAll.log, OfAll.by_name) == (None, 0, [], {})


def test_an_attribute_of_a_function() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        step.calls += 1  # type: ignore[attr-defined]
        return h * params["w"], h + x_t

    step.calls = 0  # type: ignore[attr-defined]
    refused(step, "step changes the attribute 'calls' of the function step")
    assert step.calls == 0  # type: ignore[attr-defined]


def test_a_callable_object() -> None:
    class Counts:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return h * params["w"], h + x_t

        def step(self, params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return self(params, x_t, h)

    counts = Counts()
    for step in (counts, counts.step):
        refused(step, "changes the attribute 'calls'")
    assert counts.calls == 0


class Cell(nn.Module):
    """A module that counts its calls in a global variable, in a method beside ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.counted(h), h + x_t

    def counted(self, h: Tensor) -> Tensor:
        global calls_of_all
        calls_of_all += 1
        return h * self.scale


class Tally:
    """Its methods keep what they see in a global list."""

    def note(self, h: Tensor) -> Tensor:
        seen_by_all.append(h)
        return h

    @classmethod
    def note_too(cls, h: Tensor) -> Tensor:
        return counting_helper(h)


tally = Tally()


def noted(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return tally.note(h) * params["w"], h + x_t


def noted_by_class(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return Tally.note_too(h) * params["w"], h + x_t


class DerivedCell(Cell):
    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_t, h)


def counting_helper(h: Tensor) -> Tensor:
    seen_by_all.append(h)
    return h


class Model:
    def __init__(self) -> None:
        self.calls = 0

    def step(self, params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return h * params["w"], h + x_t


def helped(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return sum(counting_helper(h) for _ in range(1)) * params["w"], h + x_t


def test_what_a_step_reaches() -> None:
    refused(Cell(), "step Cell changes the global variable 'calls_of_all'")
    refused(helped, "step helped changes the global variable 'seen_by_all'")
    refused(partial(helped), "changes the global variable 'seen_by_all'")
    refused(noted, "step noted changes the global variable 'seen_by_all'")
    refused(noted_by_class, "changes the global variable 'seen_by_all'")
    refused(DerivedCell(), "step DerivedCell changes the global variable 'calls_of_all'")
    model = Model()
    refused(model.step, "step step changes the attribute 'calls'")
    assert (calls_of_all, seen_by_all, model.calls) == (0, [], 0)


def test_a_step_that_is_tapped() -> None:
    segment = make_train_segment(helped, mse, backend="eager", taps=True)
    x = torch.randn(K, B, H)
    with pytest.raises(RuntimeError, match="step helped changes the global variable"):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)
    assert seen_by_all == []


@cache
def table(size: int) -> Tensor:
    return torch.ones(size, size).tril()


def test_a_table_that_is_cached_at_the_first_call() -> None:
    """The cache held a fake tensor: the caller's own code failed, and the next plan crashed."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t * params["w"] + h @ table(H))
        return h, h

    segment = make_train_segment(step, mse, backend="eager")
    params = {"w": torch.randn(H)}
    for rows in (B, B + 1):
        table.cache_clear()
        arguments = params, torch.zeros(rows, H), torch.randn(K, rows, H), torch.randn(K, rows, H)
        found = segment(*arguments)
        assert table(H).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        assert_close(found, reference_segment(step, mse, *arguments), 1e-5)


class Lazy:
    table: Any = None

    def __matmul__(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(H, H)
        return h @ self.table


lazy = Lazy()


def test_a_table_that_an_object_keeps_at_the_first_call() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return lazy @ h * params["w"], h + x_t

    refused(step, "changes the attribute 'table'.*Compute a constant before the first call")
    assert lazy.table is None


def test_a_parameter_that_is_made_in_the_step() -> None:
    """It crashed the process."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = nn.LayerNorm(H)(x_t * params["w"] + h)
        return h, h

    with pytest.raises(TypeError, match=r"step: uses a tensor of shape \[3\] that it makes as an"):
        call(step)


def test_a_loss() -> None:
    errors: list[Tensor] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        error = (out - y).square().mean()
        errors.append(error)
        return error

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h * params["w"], h + x_t

    segment = make_train_segment(step, loss, backend="eager")
    x = torch.randn(K, B, H)
    message = (
        "loss changes the captured variable 'errors'. A loss is a pure function: compute such a "
        "value from the result of the call, or return it in the step's out."
    )
    with pytest.raises(RuntimeError, match=message):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)
    assert errors == []


@pytest.mark.parametrize("kind", ["random", "numpy.random"])
def test_random_numbers_of_python_and_numpy(kind: str) -> None:
    """Scheduled sampling with them would be one choice for all steps and calls."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        keep = random.random() if kind == "random" else float(np.random.rand())
        h = torch.tanh(h * params["w"] + keep * x_t)
        return h, h

    refused(step, f"step step draws from {kind}, so that it would use the same numbers.*torch.rand")


@pytest.fixture
def pcg64() -> Iterator[None]:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64())
    yield
    np.random.set_bit_generator(before)


@pytest.mark.usefixtures("pcg64")
def test_another_bit_generator_of_numpy() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h * params["w"], h + x_t

    def drawing(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h * params["w"], h + float(np.random.rand()) * x_t

    assert call(step).loss.isfinite()
    refused(drawing, "step drawing draws from numpy.random")


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: np.random.shuffle([1, 2])])
def test_random_numbers_of_another_thread(draw: Callable[..., Any]) -> None:
    """Such as one that augments data while the first call traces."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        other = threading.Thread(target=draw)
        other.start()
        other.join()
        h = torch.tanh(h * params["w"] + x_t)
        return h, h

    assert call(step).loss.isfinite()


@pytest.mark.parametrize("draw", [random.randrange, np.random.randint])
def test_drawing_through_other_functions(draw: Callable[..., Any]) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h * params["w"], h + draw(5) * x_t

    refused(step, "step step draws from")


def test_changes_by_another_thread_stay() -> None:
    changed, kept = threading.Event(), [1]

    def change() -> None:
        global scale_of_all
        scale_of_all += 1
        kept.append(2)
        changed.set()

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if not changed.is_set():
            other = threading.Thread(target=change)
            other.start()
            other.join()
        return h * params["w"], h * (scale_of_all + kept[0]) + x_t

    with pytest.warns(RuntimeWarning, match="compiled again"):  # with what they are now
        assert call(step).loss.isfinite()
    assert scale_of_all == 2
    assert kept == [1, 2]


def test_a_torch_generator() -> None:
    generator = torch.Generator()

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h * params["w"], h + torch.rand(B, H, generator=generator)

    with pytest.raises(
        TypeError, match=r"step: draws from a torch.Generator.*torch's default generator"
    ):
        call(step)


def test_variables_that_are_only_read() -> None:
    sizes, names = [H, H], {"w": 0}

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        weights = [params[name] for name in names]
        h = torch.tanh(h.reshape(-1, sizes[0]) * weights[0] + x_t)
        return h, h

    assert call(step).loss.isfinite()
    assert not seen_by_all
