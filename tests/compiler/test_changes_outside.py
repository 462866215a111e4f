"""What a step or loss reaches through other things, and that changes between two calls."""

from __future__ import annotations

import importlib
import re
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from ftbptt import make_train_segment

from ..cells.problems import B, Draw, H, Problem, mse, named
from ..oracle import check
from .changing import AGAIN, made_with

Change = Callable[[], Any]


class Act(nn.Module):
    """``tanh(k * x)``; in eval mode without k."""

    def __init__(self, k: float = 2.0) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.k if self.training else x)


class OfOwnKind:
    def __init__(self) -> None:
        self.k = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.k)


class Model(nn.Module):
    """Calls all of ``acts``, whatever they are."""

    rate = 2.0

    def __init__(self, *acts: Any) -> None:
        super().__init__()
        self.linear, self.acts = nn.Linear(H, H), list(acts)

    def last(self, x: Tensor) -> Tensor:
        return x * self.rate

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        for act in self.acts:
            x = act(x)

        def other() -> float:
            return getattr(self, "other", 1.0)

        h = torch.tanh(self.last(x) * getattr(self, "extra", 1.0) * other() + h)
        return h, h


class Derived(Model):
    """Inherits all."""


def model(*acts: Any, kind: type[Model] = Model) -> tuple[Model, Problem]:
    draw = Draw(1)
    module: Any = draw.module(lambda: kind(*acts))
    data = draw(B, H), draw.sequence(B, H), draw.sequence(B, H)
    return module, Problem(module, named(module), *data, mse)


def check_change(made: Problem, *changes: Change, **options: Any) -> None:
    """Each change is noticed, once; ``options`` are those of the segment."""
    given = {"initial_state": options["initial_state"]} if "initial_state" in options else {}
    if given:
        given["reset"] = torch.arange(4) == 2
    segment = make_train_segment(made.step, made.loss, backend="eager", **options)
    check(segment, made, 4, **given)
    check(segment, made, 4, **given)
    for change in changes:
        change()
        with pytest.warns(RuntimeWarning, match=AGAIN):
            check(segment, made, 4, **given)
        traces = segment.trace_count
        check(segment, made, 4, **given)
        assert segment.trace_count == traces


# -- what modules and objects hold ----------------------------------------------------------------


def closure() -> tuple[Callable[[Tensor], Tensor], Change]:
    k = 2.0

    def act(x: Tensor) -> Tensor:
        return torch.tanh(x * k)

    def change() -> None:
        nonlocal k
        k = 3.0

    return act, change


def scaled_by(x: Tensor, by: dict[str, float]) -> Tensor:
    return x * by["k"]


def test_what_a_module_holds_in_a_list() -> None:
    act, change_closure = closure()
    module, own, by = Act(), OfOwnKind(), {"k": 2.0}
    _, made = model(act, module, own, partial(scaled_by, by=by))
    check_change(
        made,
        change_closure,
        lambda: setattr(module, "k", 3.0),
        lambda: setattr(own, "k", 3.0),
        lambda: by.update(k=3.0),
    )


def test_the_mode_of_a_module_in_a_list() -> None:
    """Another mode is another trace, without a warning."""
    act = Act()
    _, made = model(act)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    for mode in (True, False, True):
        act.train(mode)
        check(segment, made, 4)
    assert segment.trace_count == 2


def test_the_mode_of_one_of_very_many_modules() -> None:
    acts = nn.ModuleList(Act(1.0) for _ in range(1100))
    made = made_with(lambda x: acts[-1](x))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    for mode in (True, False):
        acts[-1].train(mode)
        check(segment, made, 4)
    assert segment.trace_count == 2


@pytest.mark.parametrize("name", ["rate", "last", "forward", "extra", "other"])
def test_an_attribute_that_hides_another(name: str) -> None:
    module, made = model()

    def forward(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.sin(module.linear(x) + h)

    values = {"rate": 3.0, "last": torch.sin, "forward": forward, "extra": 3.0, "other": 3.0}
    check_change(made, lambda: setattr(module, name, values[name]))


def test_an_attribute_of_a_class_that_hides_that_of_its_base() -> None:
    _, made = model(kind=Derived)
    try:
        check_change(made, lambda: setattr(Derived, "rate", 3.0))
    finally:
        del Derived.rate


class OwnLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H)
        self._rate = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self._rate


def test_a_private_attribute_of_a_class_derived_from_torchs() -> None:
    inner = OwnLinear().double().requires_grad_(False)
    check_change(made_with(lambda x: inner(x)), lambda: setattr(inner, "_rate", 3.0))


strength = 2.0


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = model()
    hook = module.linear.register_forward_hook(lambda _, inputs, out: out * strength)
    check_change(
        made,
        lambda: monkeypatch.setitem(globals(), "strength", 3.0),
        hook.remove,
        lambda: module.linear.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
    )


def test_a_hook_of_all_modules() -> None:
    """But torch's own, by which it counts, are none."""
    module, made = model()
    kinds: list[Any] = []

    def hook(called: nn.Module, inputs: Any, out: Any) -> Any:
        return 2 * out if called is module.linear else out

    def added() -> None:
        kinds.append(nn.modules.module.register_module_forward_hook(hook))

    try:
        check_change(made, added)
    finally:
        kinds.pop().remove()
    segment = make_train_segment(made.step, made.loss, backend="eager")
    segment(*made.data(4))
    with FlopCounterMode(display=False):
        segment(*made.data(4))
    assert segment.trace_count == 1


def test_a_hook_in_the_place_of_another() -> None:
    module, made = model()
    hook = module.linear.register_forward_hook(lambda _, inputs, out: 2 * out)

    def exchange() -> None:
        hook.remove()
        module.linear.register_forward_hook(lambda _, inputs, out: out / 2)

    check_change(made, exchange)


def test_a_backward_hook_that_is_added() -> None:
    module, made = model()
    segment = make_train_segment(made.step, made.loss, backend="eager")
    segment(*made.data(4))
    module.linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="calls a module that has a full backward hook"):
        segment(*made.data(4))


def test_the_mode_of_a_module_in_the_place_of_another() -> None:
    act: nn.Module = Act().eval()
    made = made_with(lambda x: act(x))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    act = Act()
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4)
    act.eval()
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4)


class MayScale(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("gain", None)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(x, h if self.gain is None else h * self.gain)


def test_a_buffer_that_is_filled() -> None:
    """One that was None."""
    inner, made = model()
    module = MayScale(inner)
    made = replace(made, step=module, params=named(module))
    segment = make_train_segment(module, made.loss, backend="eager")
    for gain in (None, torch.arange(H).double(), None):
        module.gain = gain
        check(segment, made, 4)


def test_a_buffer_of_the_step_that_the_loss_reads() -> None:
    module, made = model()
    module.register_buffer("weights", torch.ones(H, dtype=torch.float64))
    made = replace(made, loss=lambda out, y: ((out - y).square() * module.weights).mean())
    check_change(made, lambda: setattr(module, "weights", torch.arange(H).double()))


@pytest.mark.parametrize("kind", ["appended", "deleted", "none", "filled"])
def test_submodules_that_come_or_go(kind: str) -> None:
    module, made = model()
    module.post = nn.Sequential(nn.Tanh(), nn.Tanh())
    module.table = nn.ModuleDict()
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    if kind == "appended":
        module.post.append(nn.Tanh())
    elif kind == "deleted":
        del module.post[-1]
    elif kind == "none":
        module.post = None
    else:
        module.table["a"] = nn.Tanh()
    with pytest.raises(RuntimeError, match=r"submodule.* was replaced, added or removed since"):
        segment(*made.data(4))


def test_a_buffer_that_is_removed() -> None:
    """As where a model that is pruned becomes an ordinary one again."""
    module, made = model()
    prune.l1_unstructured(module.linear, "weight", 0.5)
    given = named(module), *made.data(4)[1:]
    segment = make_train_segment(module, made.loss, backend="eager")
    segment(*given)
    prune.remove(module.linear, "weight")
    said = (
        "step Model: its buffer 'linear.weight_mask' was removed since the segment was made. Make "
        "a new segment, by make_train_segment."
    )
    with pytest.raises(RuntimeError, match=re.escape(said)):
        segment(named(module), *given[1:])


# -- modules beside the step ----------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(H).double())

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return ((out - y).square() * self.weight).mean()


def test_tensors_of_other_modules() -> None:
    frozen = nn.Linear(H, H).double().requires_grad_(False)
    weighted = Weighted()
    other = {name: torch.rand_like(t) for name, t in frozen.state_dict().items()}
    check_change(
        made_with(lambda x: frozen(x), weighted),
        lambda: setattr(weighted, "weight", torch.rand(H).double()),
        lambda: frozen.load_state_dict(other, assign=True),
    )


act: Any = None


def test_a_module_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the mode is watched as well."""
    monkeypatch.setitem(globals(), "act", Act())
    made = made_with(lambda x: act(x))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    monkeypatch.setitem(globals(), "act", Act(3.0))
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4)
    act.eval()
    check(segment, made, 4)
    act.train()
    check(segment, made, 4)


def test_the_mode_of_a_module_that_computes_the_initial_state() -> None:
    start, reset = Act(), torch.arange(4) == 2
    made = made_with(lambda x: x)

    def initial_state(params: Any) -> Tensor:
        return start(params["w"][:1].expand(B, H))

    segment = make_train_segment(made.step, mse, backend="eager", initial_state=initial_state)
    for mode in (True, False):
        start.train(mode)
        check(segment, made, 4, reset=reset, initial_state=initial_state)


def test_a_tensor_of_the_initial_state() -> None:
    draw, plain = Draw(2), made_with(lambda x: x)
    initial, reset = {"h": draw(B, H)}, torch.arange(4) == 2

    def step(params: Any, x: Tensor, state: Any) -> Any:
        out, h = plain.step(params, x, state["h"])  # type: ignore[operator]
        return out, {"h": h}

    made = Problem(step, plain.params, {"h": plain.state}, plain.x, plain.y, mse)
    segment = make_train_segment(step, mse, backend="eager", initial_state=initial)
    for _ in range(2):
        check(segment, made, 4, reset=reset, initial_state=initial)
        initial["h"] = draw(B, H)
        check(segment, made, 4, reset=reset, initial_state=initial)
    initial["h"] = draw(B, H).float()
    with pytest.raises(TypeError, match=r"initial_state\['h'\]: is torch.float32, but state"):
        segment(*made.data(4), reset=reset)


# -- values of other kinds ------------------------------------------------------------------------

VALUES: dict[str, tuple[Any, Any, Callable[[Tensor, Any], Tensor]]] = {
    "float32": (np.float32(2), np.float32(3), lambda x, v: x * float(v)),
    "int64": (np.int64(1), np.int64(2), lambda x, v: x.roll(int(v), 1)),
    "bool": (np.bool_(True), np.bool_(False), lambda x, v: x if v else -x),
    "fraction": (Fraction(1, 2), Fraction(3, 2), lambda x, v: x * float(v)),
    "range": (range(2), range(3), lambda x, v: x * len(v)),
    "slice": (slice(0, 1), slice(0, 2), lambda x, v: x + x[:, v].sum()),
    "frozenset": (frozenset("a"), frozenset("b"), lambda x, v: x * (1 + ("a" in v))),
    "zero": (0.0, -0.0, lambda x, v: x * np.copysign(1.0, v)),
    "object": (OfOwnKind(), torch.sin, lambda x, v: v(x)),
    "distribution": (
        torch.distributions.Normal(0.0, 1.0),
        torch.distributions.Normal(1.0, 2.0),
        lambda x, v: x + v.log_prob(x),
    ),
}
value: Any = None


@pytest.mark.parametrize("kind", VALUES)
def test_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, of = VALUES[kind]
    monkeypatch.setitem(globals(), "value", before)
    check_change(
        made_with(lambda x: of(x, value)), lambda: monkeypatch.setitem(globals(), "value", after)
    )


def test_equal_values_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "value", (np.float32(2), range(2), frozenset("ab")))
    made = made_with(lambda x: x * float(value[0]) * len(value[1]))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    monkeypatch.setitem(globals(), "value", (np.float32(2), range(2), frozenset("ba")))
    check(segment, made, 4)
    assert segment.trace_count == 1


@pytest.mark.parametrize("kind", [set, deque])
def test_a_container(kind: Any) -> None:
    held = kind([1.0, 2.0])
    add = held.add if kind is set else held.append
    check_change(made_with(lambda x: x * sum(held)), lambda: add(5.0))


def test_the_default_of_an_argument() -> None:
    held = {"rate": 2.0}

    def of(x: Tensor, given: dict[str, float] = held, *, more: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return x * given["rate"] * more[0]

    check_change(
        made_with(of),
        lambda: held.update(rate=3.0),
        lambda: of.__kwdefaults__["more"].__setitem__(0, 3.0),
    )


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Triples(Doubles):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class Scales:
    def __call__(self, x: Tensor, *, by: float = 2.0) -> Tensor:
        return x * by


def halves(self: Any, x: Tensor) -> Tensor:
    return x / 2


def test_code_that_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook: by another method of a class, another class, or in the same function."""
    module, scale = Doubles(), Scales()
    check_change(
        made_with(module),
        lambda: monkeypatch.setattr(Doubles, "forward", halves),
        lambda: setattr(module, "__class__", Triples),
        lambda: monkeypatch.setattr(Triples.forward, "__code__", halves.__code__),
    )
    call = Scales.__call__
    check_change(
        made_with(lambda x: scale(x)),
        lambda: monkeypatch.setattr(call, "__kwdefaults__", {"by": 3.0}),
        lambda: monkeypatch.setattr(Scales, "__call__", halves),
    )

    def of(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    given = partial(of, by=2.0)
    check_change(made_with(of), lambda: setattr(of, "__defaults__", (3.0,)))
    check_change(made_with(given), lambda: given.keywords.update(by=4.0))


def test_code_that_is_the_same_again() -> None:
    """It is no other code, and costs no trace."""

    def of(x: Tensor) -> Tensor:
        return 2 * x

    made = made_with(of)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    segment(*made.data(4))
    of.__code__ = of.__code__.replace()
    segment(*made.data(4))
    assert segment.trace_count == 1


def test_a_step_that_remembers_in_the_default_of_an_argument() -> None:
    def of(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return x

    made = made_with(of)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    with pytest.raises(RuntimeError, match="changes the default of 'seen' of of"):
        segment(*made.data(4))


def test_a_key_of_a_dict() -> None:
    functions = {"tanh": True}

    def of(x: Tensor) -> Tensor:
        for name in functions:
            x = getattr(torch, name)(x)
        return x

    def change() -> None:
        del functions["tanh"]
        functions["sin"] = True

    check_change(made_with(of), change)


def test_numbers_written_where_torch_does_not_count() -> None:
    v, array = torch.tensor(2.0), np.array(2.0)
    shared = torch.from_numpy(array)
    check_change(
        made_with(lambda x: x * float(v) + float(shared)),
        lambda: v.data.fill_(3.0),
        lambda: array.fill(3.0),
    )


def test_tensors_that_are_compared() -> None:
    a, b = torch.ones(2), torch.ones(2)
    made = made_with(lambda x: x if torch.allclose(a, b) else -x)
    check_change(made, lambda: a.fill_(2.0), lambda: b.fill_(2.0))


# -- other files ----------------------------------------------------------------------------------

SETTINGS = """
rate, used = 2.0, 2.0

class Config:
    def __init__(self, rate=2.0):
        self.rate = rate

def act(x):
    return x * used
"""
settings: Any = None


def test_what_stands_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_of_a_test.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("settings_of_a_test")
    monkeypatch.setitem(sys.modules, "settings_of_a_test", module)
    monkeypatch.setitem(globals(), "settings", module)
    config = module.Config()
    check_change(
        made_with(lambda x: settings.act(x) * settings.rate * config.rate),
        lambda: setattr(module, "rate", 3.0),
        lambda: setattr(module, "used", 3.0),
        lambda: setattr(config, "rate", 3.0),
    )


def test_a_step_that_changes_what_stands_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counters_of_a_test.py").write_text("count = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("counters_of_a_test")
    monkeypatch.setitem(globals(), "settings", module)

    def of(x: Tensor) -> Tensor:
        settings.count += 1
        return x

    made = made_with(of)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    words = "changes the variable 'count' of the module counters_of_a_test"
    with pytest.raises(RuntimeError, match=words):
        segment(*made.data(4))
    assert module.count == 0
