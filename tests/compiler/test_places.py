"""Attributes that a step assigns before it reads them, as places for values of one step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import mse, named
from ..oracle import assert_close

Arguments = tuple[Any, ...]
K, B, H = 4, 2, 3


def arguments_of(module: nn.Module) -> Arguments:
    """A call's, of a module that they turn into float64."""
    torch.manual_seed(1)
    h, x, y = torch.randn(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    return named(module.double()), h.double(), x.double(), y.double()


class Cell(nn.Module):
    """``h = keep(self, tanh(recur(h) + x))``, where ``keep`` may use attributes as places."""

    table = {"seen": 1.0}  # noqa: RUF012

    def __init__(self, keep: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.recur, self.keep = nn.Linear(H, H), keep
        self.kept: Any = None
        self.of_last: Any = {"v": 0.0, "w": 2.0}
        vars(self).update(attributes)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.keep(self, torch.tanh(self.recur(h) + x))
        return h, h


def in_attribute(module: Any, h: Tensor) -> Tensor:
    module.kept = 2 * h
    module.kept = module.kept - h.square()
    return module.kept


def in_new_attribute(module: Any, h: Tensor) -> Tensor:
    module.spikes = (h > 0).to(h.dtype)
    return h - 0.5 * module.spikes + torch.tensor([0.5, 1.0, 2.0], dtype=h.dtype)


def in_item(module: Any, h: Tensor) -> Tensor:
    module.of_last["v"] = h
    return module.of_last["v"] * module.of_last["w"]


def with_missing_values(module: Any, h: Tensor) -> Tensor:
    module.kept = h + torch.tensor([1.0, math.nan, 2.0], dtype=h.dtype).nan_to_num()
    return module.kept


def in_both(module: Any, h: Tensor) -> Tensor:
    module.calls = 1
    return in_attribute(module, in_item(module, h)) * module.calls


PLACES: dict[Callable[[Any, Tensor], Tensor], str] = {
    in_attribute: "the attribute 'kept' of Cell, which has its old value again",
    in_new_attribute: "the attribute 'spikes' of Cell, which",
    with_missing_values: "the attribute 'kept' of Cell, which",
    in_item: "the item 'v' of the attribute 'of_last' of Cell, which",
    in_both: r"the attribute 'calls' of Cell \(and 2 more\), which",
}


@pytest.mark.parametrize("keep", PLACES)
def test_assigned_first(keep: Callable[[Any, Tensor], Tensor]) -> None:
    module = Cell(keep)
    given = arguments_of(module)
    segment = make_train_segment(module, mse, backend="eager")
    before = {**vars(module)}
    items = dict(module.of_last)
    with pytest.warns(RuntimeWarning, match=f"step Cell assigns {PLACES[keep]}"):
        found = segment(*given)
    assert vars(module) == before
    assert module.of_last == items
    assert_close(found, reference_segment(deepcopy(module), mse, *given))
    # Nothing depends on what the module's own calls leave there.
    module(given[2][0], given[1])
    for _ in range(2):
        segment(*given)
        module(given[2][1], given[1])


def read_by_the_next(module: Any, h: Tensor) -> Tensor:
    h = h if module.kept is None else h + module.kept
    module.kept = h
    return h


def made_once(module: Any, h: Tensor) -> Tensor:
    if not hasattr(module, "scale"):
        module.scale = h.detach().abs().mean()
    return h / module.scale


def made_for_none(module: Any, h: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = h.detach()
    return h + 1


def another_after_the_first(module: Any, h: Tensor) -> Tensor:
    is_first, module.kept = module.kept is None, h
    return 2 * h if is_first else h


def of_another_class(module: Any, h: Tensor) -> Tensor:
    is_number, module.of_last["v"] = isinstance(module.of_last["v"], float), h
    return h if is_number else 2 * h


def counts(module: Any, h: Tensor) -> Tensor:
    module.of_last["w"] += 1
    return h


def looked_up(module: Any, h: Tensor) -> Tensor:
    scale, module.kept = module.table.get(module.kept, 2.0), "seen"
    return scale * h


def forgives(module: Any, h: Tensor) -> Tensor:
    try:
        scale = float(module.of_last["v"]) + 1
    except RuntimeError:
        scale = 2.0
    module.of_last["v"] = 3.0
    return scale * h


def adds_an_item(module: Any, h: Tensor) -> Tensor:
    module.of_last[len(module.of_last)] = h
    return h


def starts_afresh_once(module: Any, h: Tensor) -> Tensor:
    h = h if module.of_last["w"] is None else 0.5 * h
    module.of_last["w"] = None
    return h


def a_number_first(module: Any, h: Tensor) -> Tensor:
    h = 2 * h if isinstance(module.of_last["v"], tuple) else h
    module.of_last["v"] = (h, 1)
    return h


def ignores_the_error(module: Any, h: Tensor) -> Tensor:
    with suppress(Exception):
        h = h + module.kept  # None in the first step only
    module.kept = h
    return h


def ignores_the_error_of_a_part(module: Any, h: Tensor) -> Tensor:
    with suppress(Exception):
        h = h + module.kept[0]
    module.kept = (h,)
    return h


def takes_turns(module: Any, h: Tensor) -> Tensor:
    name = next(iter(module.of_last))
    module.of_last[name] = module.of_last.pop(name)
    return h * 2 if name == "v" else h


CARRIED = [
    read_by_the_next, made_once, made_for_none, another_after_the_first, of_another_class, counts,
    looked_up, forgives, adds_an_item, starts_afresh_once, a_number_first, ignores_the_error,
    ignores_the_error_of_a_part, takes_turns,
]  # fmt: skip


@pytest.mark.parametrize("keep", CARRIED)
def test_what_the_next_step_could_see_is_refused(keep: Callable[[Any, Tensor], Tensor]) -> None:
    module = Cell(keep)
    before, items = {**vars(module)}, dict(module.of_last)
    with pytest.raises(RuntimeError, match=r"Cell changes the attribute '(kept|scale|of_last)"):
        make_train_segment(module, mse, backend="eager")(*arguments_of(module))
    assert vars(module) == before
    assert module.of_last == items


def with_a_parameter_of_its_own(module: Any, h: Tensor) -> Tensor:
    module.kept = h * nn.Parameter(torch.ones(H, dtype=h.dtype))
    return module.kept


@pytest.mark.filterwarnings("ignore:.*which has its old value again")
def test_a_parameter_that_is_made_in_the_step() -> None:
    module = Cell(with_a_parameter_of_its_own)
    with pytest.raises(TypeError, match=r"step: uses a tensor of shape \[3\] that it makes as an"):
        make_train_segment(module, mse, backend="eager")(*arguments_of(module))


def test_a_loss() -> None:
    class Loss:
        last: Any = None

        def __call__(self, out: Tensor, y: Tensor) -> Tensor:
            self.last = (out - y).square()
            return self.last.mean()

    loss, module = Loss(), nn.RNNCell(H, H)
    segment = make_train_segment(module, loss, backend="eager")
    with pytest.warns(RuntimeWarning, match="loss assigns the attribute 'last' of Loss, which"):
        found = segment(*arguments_of(module))
    assert loss.last is None
    assert_close(found.loss, reference_segment(module, mse, *arguments_of(module)).loss)


def test_a_weight_that_is_put_into_an_attribute() -> None:
    """As the first implementations of weight drop do."""

    class WeightDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(torch.randn(H, H))
            self.weight = self.raw.detach().clone()

        def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            self.weight = self.raw * 0.5
            h = torch.tanh(x_t + h @ self.weight)
            return h, h

    module = WeightDrop()
    given = arguments_of(module)
    segment = make_train_segment(module, mse, backend="eager")
    with pytest.warns(RuntimeWarning, match="assigns the attribute 'weight' of WeightDrop"):
        found = segment(*given)
    assert_close(found, reference_segment(deepcopy(module), mse, *given))


class OwnPruning(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return default_mask * (t > 0)


def pruned_twice(layer: nn.Module, name: str) -> None:
    prune.l1_unstructured(layer, name, 0.3)
    prune.random_unstructured(layer, name, 0.3)


@pytest.mark.parametrize(
    "wrap", [OwnPruning.apply, pruned_twice, nn.utils.weight_norm, nn.utils.spectral_norm]
)
def test_a_weight_that_a_hook_of_torch_computes(wrap: Callable[..., Any]) -> None:
    """The user has assigned nothing, and is not told to return it."""
    module = Cell(in_attribute)
    wrap(module.recur, "weight")
    given = arguments_of(module.eval())
    segment = make_train_segment(module, mse, backend="eager")
    with pytest.warns(RuntimeWarning, match="assigns the attribute 'kept' of Cell, which"):
        found = segment(*given)
    assert_close(found, reference_segment(module, mse, *given))
    unkept = Cell(lambda module, h: h)
    wrap(unkept.recur, "weight")
    make_train_segment(unkept.eval(), mse, backend="eager")(*arguments_of(unkept))


class Spiking(nn.Module):
    """A buffer as the place of the membrane's potential, which the caller may pass."""

    def __init__(self, passed: bool) -> None:
        super().__init__()
        self.enter, self.passed = nn.Linear(H, H), passed
        self.register_buffer("mem", torch.zeros(0), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.passed:
            self.mem = h
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        self.mem = torch.tanh(self.scale * self.mem + self.enter(x))
        return self.mem, self.mem


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_a_buffer_that_is_assigned_first(backend: Any) -> None:
    module = Spiking(passed=True)
    given = arguments_of(module)

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        enter = nn.functional.linear(x, params["enter.weight"], params["enter.bias"])
        h = torch.tanh(2.0 * h + enter)
        return h, h

    expected = reference_segment(step, mse, *given)
    assert_close(reference_segment(module, mse, *given), expected)
    assert_close(make_train_segment(module, mse, backend=backend)(*given), expected)
    assert module.mem.numel() == 0


class Memory:
    def __init__(self, v: Any) -> None:
        self.v = v


def in_the_fast(module: Any, h: Tensor) -> Tensor:
    module.fast.v = h
    return module.fast.v * module.slow.v


@pytest.mark.filterwarnings("ignore:.*which has its old value again")
def test_another_place_of_that_name_is_watched() -> None:
    module = Cell(in_the_fast, fast=Memory(0.0), slow=Memory(2.0))
    given = arguments_of(module)
    segment = make_train_segment(module, mse, backend="eager")
    segment(*given)
    module.slow.v = 3.0
    with pytest.warns(RuntimeWarning, match="compiled again: the attribute 'v' of Memory"):
        found = segment(*given)
    assert_close(found, reference_segment(deepcopy(module), mse, *given))
    module.fast.v = 4.0  # nothing reads that
    segment(*given)


@pytest.mark.filterwarnings("ignore:.*which has its old value again")
def test_what_a_loss_assigns_and_the_step_reads_is_refused() -> None:
    module = Cell(lambda module, h: h * module.kept, kept=1.0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        module.kept = mse(out, y)
        return module.kept

    segment = make_train_segment(module, loss, backend="eager")
    words = r"step names the attribute 'kept' of Cell, which the loss assigns, .* in its state"
    with pytest.raises(RuntimeError, match=words):
        segment(*arguments_of(module))
    assert module.kept == 1.0


def in_buffer(module: Any, h: Tensor) -> Tensor:
    module.kept_buffer = h
    return 2 * module.kept_buffer


@pytest.mark.filterwarnings("ignore:.*which has its old value again")
@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_loss_that_reads_what_the_step_assigns_is_refused(
    is_buffer: bool, is_traced: bool
) -> None:
    module = Cell(in_buffer if is_buffer else in_attribute, kept=torch.zeros(B, H))
    module.register_buffer("kept_buffer", torch.zeros(B, H))
    given = arguments_of(module)
    before, buffer = {**vars(module)}, module.kept_buffer

    def of_attribute(out: Tensor, y: Tensor) -> Tensor:
        return mse(out, y) + module.kept.square().mean()

    def of_buffer(out: Tensor, y: Tensor) -> Tensor:
        return mse(out, y) + module.kept_buffer.square().mean()

    loss = of_buffer if is_buffer else of_attribute
    segment = make_train_segment(
        module, loss if is_traced else torch.compiler.disable(loss), backend="eager"
    )
    name = "the buffer 'kept_buffer'" if is_buffer else "the attribute 'kept' of Cell"
    verb = "reads" if is_traced else "names"
    with pytest.raises(RuntimeError, match=f"loss {verb} {name}, which the step assigns"):
        segment(*given)
    assert vars(module) == before
    assert module.kept_buffer is buffer


@pytest.mark.filterwarnings("ignore:.*which has its old value again")
def test_a_loss_that_reads_something_else_of_the_module() -> None:
    module = Cell(in_attribute, scale=2.0)
    given = arguments_of(module)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(out, y) * module.scale

    segment = make_train_segment(module, loss, backend="eager")
    for _ in range(2):
        assert_close(segment(*given), reference_segment(module, loss, *given))
        module(given[2][0], given[1])


@pytest.mark.filterwarnings("ignore:.*which has its old value again")
@pytest.mark.parametrize("place", ["kept", "kept_buffer"])
def test_what_the_caller_puts_there_stays(place: str) -> None:
    """Also where the loss, which reads K as a number, is traced again for another K."""
    module = Cell(in_buffer if place == "kept_buffer" else in_attribute)
    module.register_buffer("kept_buffer", torch.zeros(B, H))
    params, h, x, y = arguments_of(module)
    segment = make_train_segment(module, lambda out, y: mse(out, y) / len(out), backend="eager")
    segment(params, h, x, y)
    own = torch.ones(B, H, dtype=torch.float64)
    setattr(module, place, own)
    segment(params, h, x[:2], y[:2])
    assert getattr(module, place) is own
