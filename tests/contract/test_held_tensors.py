"""Parameters and buffers that a module holds in other places than where they are registered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import mse, named
from ..oracle import assert_close

K, B, H = 4, 2, 3


class Constants(NamedTuple):
    decay: Any
    name: str


class Leaky(nn.Module):
    """A leaky unit; ``place`` keeps its tensors once more, ``find`` gets them from there."""

    def __init__(self, place: Callable[[Any], Any], find: Callable[[Any], Any]) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(H))
        self.enter = nn.Linear(H, H)
        self.register_buffer("scale", torch.rand(H))
        self.inner = nn.Module()
        self.inner.kept = place(self)
        self.find = find

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        decay, weight, scale = self.find(self.inner.kept)
        h = torch.tanh(decay * h + nn.functional.linear(x, weight)) * scale
        return h, h


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (
        lambda m: {"decay": m.decay, "rest": OrderedDict(w=m.enter.weight, s=m.scale)},
        lambda kept: (kept["decay"], kept["rest"]["w"], kept["rest"]["s"]),
    ),
    "list": (lambda m: [m.decay, 1, [m.enter.weight, m.scale]], lambda k: (k[0], *k[2])),
    "tuple": (lambda m: (m.decay, (m.enter.weight, m.scale)), lambda k: (k[0], *k[1])),
    "named tuple": (
        lambda m: {"c": Constants(m.decay, "leaky"), "w": [(m.enter.weight, None)], "s": m.scale},
        lambda kept: (kept["c"].decay, kept["w"][0][0], kept["s"]),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_kept_once_more(place: str) -> None:
    """ncps has its parameters in a dict, norse in a named tuple; functional_call misses those."""
    torch.manual_seed(0)
    module = Leaky(*PLACES[place]).double()
    plain = Leaky(*PLACES[place]).double()
    plain.find = lambda kept: (plain.decay, plain.enter.weight, plain.scale)
    plain.load_state_dict(module.state_dict())
    kept = module.inner.kept
    params = {name: 1.5 * p.detach() for name, p in module.named_parameters()}
    given = torch.randn(B, H).double(), torch.randn(K, B, H).double(), torch.randn(K, B, H).double()
    expected = reference_segment(plain, mse, params, *given)
    assert expected.grads["decay"].abs().min() > 0
    assert_close(reference_segment(module, mse, params, *given), expected)
    segment = make_train_segment(module, mse, backend="eager")
    assert_close(segment(params, *given), expected)
    assert module.inner.kept is kept
    assert module.find(kept)[0] is module.decay


def test_an_ensemble() -> None:
    models = [Leaky(*PLACES["dict"]) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    given = torch.randn(3, B, H), torch.randn(3, K, B, H), torch.randn(3, K, B, H)
    segment = make_train_segment(models[0], mse, backend="eager")
    found = torch.func.vmap(segment, in_dims=(0, 0, 0, 0))({**params, **buffers}, *given)
    for i, model in enumerate(models):
        expected = reference_segment(model, mse, named(model), *(leaf[i] for leaf in given))
        assert_close(found.loss[i], expected.loss, 1e-6)
        assert_close(found.grads["decay"][i], expected.grads["decay"], 1e-5)


def test_after_an_error_all_is_as_before() -> None:
    def fails(kept: Any) -> Any:
        raise KeyError("no such tensor")

    module = Leaky(PLACES["named tuple"][0], fails)
    before = dict(module.inner.kept)
    given = named(module), torch.zeros(B, H), torch.zeros(K, B, H), torch.zeros(K, B, H)
    with pytest.raises(KeyError, match="no such tensor"):
        reference_segment(module, mse, *given)
    assert all(module.inner.kept[key] is value for key, value in before.items())


class Gain(NamedTuple):
    decay: Any
    factor: float


class Gated(nn.Module):
    """``tanh(enter(x) + h)``, times what ``gates`` and two layers with one buffer keep."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.tau = nn.Linear(H, H), nn.Parameter(torch.rand(H))
        self.first, self.last = nn.Module(), nn.Module()
        self.first.register_buffer("scale", torch.rand(H))
        self.last.register_buffer("scale", self.first.scale)
        self.gates: Any = {"tau": self.tau, "c": Constants(self.first.scale, "leaky")}
        self.gain = Gain(self.tau, 2.0)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x) + h) * self.gain.decay * self.gain.factor
        for gate in self.gates.values():
            h = h * (gate if isinstance(gate, Tensor) else gate.decay)
        return h * self.first.scale - self.last.scale, h


def replaces_one_of_two(module: Any) -> None:
    module.first.scale = torch.full((H,), 3.0)


def replaces_the_other(module: Any) -> None:
    module.last.scale = torch.full((H,), 3.0)


def removes_aliases(module: Any) -> None:
    module.gates.clear()


def replaces_a_part(module: Any) -> None:
    module.gain = module.gain._replace(factor=3.0)


CHANGES = [replaces_one_of_two, replaces_the_other, removes_aliases, replaces_a_part]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*compiled again")
def test_changed_between_calls(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    module = Gated()
    segment = make_train_segment(module, mse, backend="eager")
    params = {name: 1.5 * p.detach() for name, p in module.named_parameters()}
    given = params, torch.randn(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    before = segment(*given)
    assert_close(before, reference_segment(module, mse, *given), 1e-5)
    change(module)
    expected = reference_segment(module, mse, *given)
    assert not torch.allclose(before.loss, expected.loss)
    assert_close(segment(*given), expected, 1e-5)
    traces = segment.trace_count
    segment(*given)
    assert segment.trace_count == traces


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mean = torch.zeros(H)
        self.enter, self.first, self.last = nn.Linear(H, H), nn.Module(), nn.Module()
        self.first.register_buffer("mean", mean)
        self.last.register_buffer("mean", mean)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x) + h) - self.last.mean
        self.last.mean = h.detach().mean(0)
        return h, h


def test_a_buffer_is_assigned_by_its_other_name() -> None:
    module = Normal()
    given = named(module), torch.zeros(B, H), torch.zeros(K, B, H), torch.zeros(K, B, H)
    for call in (make_train_segment(module, mse), partial(reference_segment, module, mse)):
        with pytest.raises(RuntimeError, match=r"step Normal assigns to its buffer 'last.mean'"):
            call(*given)


class Starts(nn.Module):
    """Its state is an attribute, or the item of a list, that starts as a buffer."""

    def __init__(self, in_list: bool) -> None:
        super().__init__()
        self.enter, self.in_list = nn.Linear(H, H), in_list
        self.register_buffer("start", torch.ones(H))
        self.kept: Any = [self.start] if in_list else self.start

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.5 * (self.kept.pop() if self.in_list else self.kept) + self.enter(x)
        if self.in_list:
            self.kept.append(v)
        else:
            self.kept = v
        return torch.tanh(v), h


@pytest.mark.parametrize("in_list", [False, True])
def test_a_state_that_starts_as_a_buffer(in_list: bool) -> None:
    module, plain = Starts(in_list), Starts(in_list)
    plain.load_state_dict(module.state_dict())
    h, x, y = torch.zeros(B, H), torch.randn(K, B, H), torch.zeros(K, B, H)
    with pytest.raises(RuntimeError, match="step Starts changes the attribute 'kept' of Starts"):
        make_train_segment(module, mse, backend="eager")(named(module), h, x, y)
    assert (module.kept[0] if in_list else module.kept) is module.start
    found = reference_segment(module, mse, named(module), h, x, y)
    assert_close(found.out, torch.stack([plain(x_t, h)[0] for x_t in x]).detach(), 1e-6)


class Decays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.w = nn.Linear(H, H), nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x) + h) * self.w
        self.w = nn.Parameter(0.5 * self.w.detach())
        return h, h


def test_a_parameter_is_assigned() -> None:
    module = Decays()
    given = named(module), torch.zeros(B, H), torch.zeros(K, B, H), torch.zeros(K, B, H)
    for call in (make_train_segment(module, mse), partial(reference_segment, module, mse)):
        with pytest.raises(RuntimeError, match="step Decays assigns to its parameter 'w'"):
            call(*given)
        assert module.w is given[0]["w"]


class OfBuffer(nn.Module):
    """With weights that another network computes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(H))
        self.register_buffer("made", torch.ones(H))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.w * x + self.made * h)
        return h, h


def test_a_buffer_that_waits_for_a_gradient() -> None:
    """Also where calls with the same shapes are known by then."""
    module, other = OfBuffer(), nn.Linear(1, H)
    segment = make_train_segment(module, mse, backend="eager")
    data = torch.zeros(B, H), torch.randn(K, B, H), torch.zeros(K, B, H)
    segment(named(module), *data)
    module.made = made = other(torch.ones(1))
    with pytest.raises(ValueError, match="step OfBuffer: its buffer 'made' requires a gradient, b"):
        segment(named(module), *data)
    segment.evaluate(named(module), *data)
    found = segment(named(module) | {"made": made}, *data)  # as the message says
    expected = reference_segment(module, mse, named(module) | {"made": made}, *data)
    assert_close(found, expected, 1e-6)
    made.backward(found.grads["made"])
    assert other.bias.grad.any()
    module.made = made.detach()
    assert_close(segment(named(module), *data).loss, found.loss, 1e-6)
