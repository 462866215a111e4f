"""Variables, attributes and modules that a step or its loss reads, and that change."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment
from ftbptt.compiler.tracing.constants import Change, Constants

from ..cells.problems import B, Draw, H, Problem, mse, named
from ..oracle import check
from .changing import AGAIN, made_with

rate = 2.0
activation = torch.tanh


@dataclass
class Config:
    rate: float = 2.0


class Scaled(nn.Module):
    """Reads numbers in many ways."""

    of_class = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.rate, self.count = 2.0, 0
        self.with_rates = {"a": 2.0, "other": [1]}
        self.rates = [2.0, 3.0]
        self.slope, self.memory = nn.LeakyReLU(0.2), torch.zeros(())
        self.constant = torch.tensor(2.0)
        self.config, self.options = Config(), Namespace(rate=2.0)
        self.scaled = partial(torch.mul, 2.0)

    @property
    def sum(self) -> float:
        return self.rate + self.of_class + self.with_rates["a"] + self.rates[1]

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.memory if h is None else h
        factor = self.sum + self.config.rate + self.options.rate + self.constant
        h = torch.tanh(self.scaled(self.slope(self.linear(x))) * factor + h)
        return h, h


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "'rate' of Scaled": lambda m: setattr(m, "rate", 3.0),
    "'of_class' of the class Scaled": lambda m: setattr(Scaled, "of_class", 3.0),
    "item 'a' of the attribute 'with_rates'": lambda m: m.with_rates.update(a=3.0),
    "item 1 of the attribute 'rates'": lambda m: m.rates.__setitem__(1, 4.0),
    "'rates' of Scaled": lambda m: setattr(m, "rates", [0.0, 0.0]),
    "'slope.negative_slope' of Scaled": lambda m: setattr(m.slope, "negative_slope", 0.3),
    "'constant' of Scaled": lambda m: setattr(m, "constant", torch.tensor(3.0)),
    "'rate' of Config": lambda m: setattr(m.config, "rate", 3.0),
    "'rate' of Namespace": lambda m: setattr(m.options, "rate", 3.0),
    "'config' of Scaled": lambda m: setattr(m, "config", replace(m.config, rate=4.0)),
    "'options' of Scaled": lambda m: setattr(m, "options", Namespace(rate=4.0)),
    "'scaled' of Scaled": lambda m: setattr(m, "scaled", partial(torch.mul, 3.0)),
}


def test_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "of_class", 2.0)  # which is put back
    draw = Draw(1)
    module = draw.module(Scaled)
    made = Problem(module, named(module), draw(B, H), draw.sequence(B, H), draw.sequence(B, H), mse)
    segment = make_train_segment(module, mse, backend="eager")
    check(segment, made, 4)
    for i, (name, change) in enumerate(CHANGES.items()):
        change(module)
        with pytest.warns(RuntimeWarning, match=f"Scaled is compiled again: the .*{name}"):
            check(segment, made, 4)
        assert segment.trace_count == i + 2
    module.rate = float("3")  # equal, but another object
    module.count += 1  # no code names it
    check(segment, made, 3)
    assert segment.trace_count == len(CHANGES) + 1
    module.rates.append(5.0)  # read by no code
    check(segment, made, 4)
    before = segment.trace_count
    for i in range(7):
        module.memory = made.state + i  # read in a branch that is not taken
        with pytest.warns(RuntimeWarning, match="for the 8th time") if i == 6 else nullcontext():
            check(segment, made, 4)
    assert segment.trace_count == before + 7
    assert len(segment._executables._by_key) == 1


def test_a_change_that_matters_later() -> None:
    """A schedule: the same graph for some epochs, then another."""
    epoch = 0
    made = made_with(lambda h: h if epoch < 2 else -h)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    for epoch in range(5):
        with pytest.warns(RuntimeWarning, match="'epoch'") if epoch == 2 else nullcontext():
            check(segment, made, 4)


def test_captured_and_global_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    own, cut = 2.0, (0, H)
    shift = 1.0

    def of(h: Tensor) -> Tensor:
        return activation(h * rate + own)[:, slice(*cut)]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(out + shift, y)

    made = made_with(of, loss)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    cut = (0, int(str(H)))  # an equal one
    check(segment, made, 4)
    assert segment.trace_count == 1
    own = 3.0
    with pytest.warns(RuntimeWarning, match="step is compiled again: the captured variable 'own'"):
        check(segment, made, 4)
    shift = 3.0
    with pytest.warns(RuntimeWarning, match="the captured variable 'shift' has changed"):
        check(segment, made, 4)
    monkeypatch.setitem(globals(), "rate", 3.0)
    with pytest.warns(RuntimeWarning, match="the global variable 'rate' has changed"):
        check(segment, made, 4)
    monkeypatch.setitem(globals(), "activation", torch.sigmoid)
    with pytest.warns(RuntimeWarning, match="the global variable 'activation' has changed"):
        check(segment, made, 4)


class Factors:
    """A number that is read in a method of each kind."""

    def plain(self) -> float:
        return gain

    @classmethod
    def of_class(cls) -> float:
        return cls.static()

    @staticmethod
    def static() -> float:
        return gain

    @property
    def prop(self) -> float:
        return self.plain()

    @cached_property
    def nothing(self) -> None: ...

    def __float__(self) -> float:
        return gain

    def step(self, params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.tanh(x_t @ params["w"] * self.prop + h)
        return h, h

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return mse(out, y) * self.plain()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(x) * gain + h)
        return h, h


class Derived(Layer):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, h)


def by_setter(h: Tensor) -> Tensor:
    scaled = [h]
    setter.prop = scaled
    return scaled[0]


class HasSetter:
    """A number that nothing but the setter of a property reads."""

    @property
    def prop(self) -> None: ...

    @prop.setter
    def prop(self, h: list[Tensor]) -> None:
        h[0] = h[0] * gain


factors, setter = Factors(), HasSetter()
gain = 2.0
IN_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda h: h * factors.plain(),
    "class method": lambda h: h * Factors.of_class(),
    "static method": lambda h: h * Factors.static(),
    "property": lambda h: h * factors.prop,
    "setter": by_setter,
    "conversion": lambda h: h * float(factors),
}


@pytest.mark.parametrize("where", [*IN_METHODS, "step", "loss", "base class"])
def test_in_methods(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_with(IN_METHODS.get(where, lambda h: h), factors if where == "loss" else mse)
    if where == "step":
        made = replace(made, step=factors.step)
    if where == "base class":
        module = Draw(1).module(Derived)
        made = replace(made, step=module, params=named(module))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    monkeypatch.setitem(globals(), "gain", 3.0)
    with pytest.warns(RuntimeWarning, match="the global variable 'gain' has changed"):
        check(segment, made, 4)


class Log:
    """Its length and its text are not read by a step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Log({self.count})"


def test_methods_that_no_step_calls() -> None:
    log = Log()

    def of(h: Tensor) -> Tensor:
        return h if isinstance(log, Log) else -h

    made = made_with(of)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    for _ in range(3):
        check(segment, made, 4)
        log.values.append(1.0)
        log.count += 1
    assert segment.trace_count == 1


class Settings:
    rate = 2.0


def test_what_a_class_and_a_function_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(h: Tensor) -> Tensor:
        return h * Settings.rate * read.rate

    def read() -> None: ...

    read.rate = 2.0  # type: ignore[attr-defined]
    made = made_with(of)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    monkeypatch.setattr(Settings, "rate", 3.0)
    with pytest.warns(RuntimeWarning, match="'rate' of the class Settings has changed"):
        check(segment, made, 4)
    read.rate = 3.0  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="'rate' of the function read has changed"):
        check(segment, made, 4)
    monkeypatch.setitem(globals(), "Settings", type("Settings", (), {"rate": 4.0}))
    with pytest.warns(RuntimeWarning, match="the global variable 'Settings' has changed"):
        check(segment, made, 4)


def test_what_changes_with_each_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, and no endless loop, should a change not be noticed as an effect of the step."""
    made = made_with(lambda h: h)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    monkeypatch.setattr(Constants, "change", lambda self: Change("the counter", is_read=True))
    with (
        pytest.warns(RuntimeWarning, match=AGAIN),
        pytest.raises(RuntimeError, match="step or its loss changes the counter, or"),
    ):
        segment(*made.data(4))


def test_a_variable_that_is_called_like_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """``size`` is an attribute in the step, and no variable that it reads."""
    monkeypatch.setitem(globals(), "size", 2)
    made = made_with(lambda h: h * h.size(0))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    monkeypatch.setitem(globals(), "size", 3)
    check(segment, made, 4)
    assert segment.trace_count == 1


# -- modules --------------------------------------------------------------------------------------


def test_a_submodule_that_is_replaced() -> None:
    module = Draw(1).module(Scaled)
    segment = make_train_segment(module, mse, backend="eager")
    given = named(module), torch.zeros(B, H).double(), *(torch.ones(3, B, H).double(),) * 2
    segment(*given)
    module.slope = nn.Tanh()
    with pytest.raises(
        RuntimeError, match=r"the submodule 'slope' of Scaled was replaced, added or removed .* new"
    ):
        segment(*given)


def test_buffers_that_take_turns() -> None:
    """Of the same shape, but under another name."""

    class Shifted(nn.Module):
        up: Tensor | None
        down: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H)
            self.register_buffer("up", None)
            self.register_buffer("down", None)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(x) + h)
            return (h + 2 * self.up if self.down is None else h - self.down), h

    draw = Draw(1)
    module = draw.module(Shifted)
    x, y = draw.sequence(B, H), draw.sequence(B, H)
    segment = make_train_segment(module, mse, backend="eager")
    for up, down in ((draw(H), None), (None, draw(H)), (draw(H), None)):
        module.up, module.down = up, down
        check(segment, Problem(module, named(module), draw(B, H), x, y, mse), 4)


def test_a_buffer_that_is_removed() -> None:
    class Shifted(nn.Module):
        shift: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H)
            self.register_buffer("shift", torch.ones(H))

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(x) + h)
            return (h if self.shift is None else h + self.shift), h

    draw = Draw(1)
    module = draw.module(Shifted)
    made = Problem(module, named(module), draw(B, H), draw.sequence(B, H), draw.sequence(B, H), mse)
    segment = make_train_segment(module, mse, backend="eager")
    check(segment, made, 4)
    module.shift = None
    check(segment, made, 4)


def test_a_class_that_tells_no_name_of_a_module() -> None:
    """Its instances do, by a descriptor."""

    class Rate:
        value = 2.0

    Rate.__module__ = property(lambda self: __name__)  # type: ignore[assignment]
    rate = Rate()

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x * params["w"] * rate.value + h)
        return h, h

    draw = Draw(1)
    x, y = draw.sequence(B, H), draw.sequence(B, H)
    made = Problem(step, {"w": draw(H).requires_grad_()}, draw(B, H), x, y, mse)
    check(make_train_segment(step, mse, backend="eager"), made, 4)
