"""Steps that stop, change or replace their gradient get that gradient, or an error.

Tracing records what a step computes; these tests cover the ways in which a step overrides autograd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, tap

from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import assert_close, check, reference
from .one_operation import check_both, problem_with

Tree = Any


@torch.no_grad()
def measured(w: Tensor, h: Tensor) -> Tensor:
    return torch.sigmoid(h @ w)


def in_a_block(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x @ w + h)
    return torch.tanh(gate * (x @ w) + h)


def half_off(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        gate = torch.sigmoid(x @ w)
        with torch.enable_grad():
            through = torch.tanh(h @ w)
    return torch.tanh(gate * through + h)


def cubes(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return ((h @ w).tanh() ** 3 * x).sum()


def value_and_more(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    def inner(h: Tensor) -> Any:
        return cubes(w, x, h), h @ w

    with torch.no_grad():
        slope, (value, more) = torch.func.grad_and_value(inner, has_aux=True)(h)
    return torch.tanh(slope * value * more * (h @ w) + x)


def half_of_two_gradients(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        with torch.no_grad():
            slope = torch.func.grad(lambda v: cubes(w, x, v))(h)
        return (slope * h * w[0]).sum()

    return torch.tanh(torch.func.grad(inner)(h) * (h @ w) + x)


def all_of_two_gradients(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return (torch.func.grad(lambda v: cubes(w, x, v) * h.sum())(h) * w[0]).square().sum()

    with torch.no_grad():
        slope = torch.func.grad(inner)(h)
    return torch.tanh(slope * (h @ w) + x)


def part_of_a_gradient(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.zeros_like(h)
            gate += torch.sigmoid(h @ w)
        return (gate * (h @ w) ** 2).sum()

    return torch.tanh(torch.func.grad(inner)(h) + x)


@torch.no_grad()
def slopes_by_row(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(cubes, argnums=2), (None, 0, 0))(w, x, h)


@torch.no_grad()
def summed_jacobian(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return torch.func.jacrev(lambda v: (torch.tanh(v @ w) * x).sum(0))(h).sum(0)


STOPPED = {
    "no_grad around func.grad": value_and_more,
    "no_grad within func.grad": part_of_a_gradient,
    "no_grad around the inner func.grad": half_of_two_gradients,
    "no_grad around both func.grad": all_of_two_gradients,
    "no_grad around vmap": lambda w, x, h: torch.tanh(slopes_by_row(w, x, h) * (h @ w) + x),
    "no_grad around jacrev": lambda w, x, h: torch.tanh(summed_jacobian(w, x, h) * (h @ w) + x),
    "detach": lambda w, x, h: torch.tanh(h @ w + (x @ w).detach() * h),
    "straight through": lambda w, x, h: torch.tanh(h @ w + x) + (h.round() - h).detach(),
    "no_grad block": in_a_block,
    "no_grad decorator": lambda w, x, h: torch.tanh(measured(w, h) + x @ w + h),
    "set_grad_enabled": half_off,
    "data": lambda w, x, h: torch.tanh(h @ w + x) * (h @ w).data.sigmoid(),
    "all detached": lambda w, x, h: torch.tanh(h.detach() @ w + x),
}


@pytest.mark.parametrize("name", STOPPED)
def test_stopped(name: str) -> None:
    check_both(problem_with(STOPPED[name]))


def test_the_workaround_for_a_custom_gradient() -> None:
    """A surrogate gradient without autograd.Function."""

    def spike(v: Tensor) -> Tensor:
        soft = v / (1 + v.abs())
        return soft + ((v > 0).to(v.dtype) - soft).detach()

    check_both(
        problem_with(lambda w, x, h: 0.8 * h + x @ w - spike(h), out=lambda w, x, h: spike(h) + h)
    )


@pytest.mark.parametrize("guarded", [False, True])
def test_a_hook_on_the_gradient(guarded: bool) -> None:
    """Clipping inside the step: exact, or an error that names the hook; never ignored."""

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        h = torch.tanh(h @ w + x)
        if h.requires_grad or not guarded:
            h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return h

    made = problem_with(after)
    segment = make_train_segment(made.step, mse, backend="eager")
    refusal = ""
    try:
        check(segment, made, 4)
    except RuntimeError as error:
        refusal = str(error)
    assert not refusal or "hook" in refusal


def test_requires_grad_is_as_in_eager() -> None:
    """``if h.requires_grad`` must take the branch that the eager loop takes for weights."""

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(h @ w + x) if w.requires_grad else torch.tanh(h @ w - x)

    check_both(problem_with(after))


def _flags(w: Tensor, x: Tensor, h: Tensor) -> list[bool]:
    with torch.no_grad():
        frozen, inside = torch.tanh(h @ w), w.requires_grad
    written, viewed, asked = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(H)
    written[:, 0] = frozen[:, 0]
    viewed[:1].copy_((x @ w)[:1])
    asked.requires_grad_()
    alias = (h + 1).detach()
    alias += x @ w
    constants = [x, 2 * x + 1, torch.zeros(H), frozen, frozen * x, (h @ w).detach(), w.data]
    others = [w, x @ w, frozen + w[0], h @ w, viewed, alias, asked, x @ w > 0]
    return [inside, *(v.requires_grad for v in (*constants, written, *others))]


def test_requires_grad_of_what_is_detached() -> None:
    """Hierarchical models assert it of what they compute under no_grad."""

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.tanh(h @ w + x)
        assert not z.requires_grad
        return torch.tanh(z @ w + x)

    def out(w: Tensor, x: Tensor, h: Tensor) -> Tree:
        return h, torch.tensor(_flags(w, x, h))

    made = problem_with(after, out, loss=lambda out, y: mse(out[0], y))
    check(make_train_segment(made.step, made.loss, backend="eager"), made, 4)


def test_a_segment_inside_torch_func_grad_is_an_error() -> None:
    """Its results are detached in eager torch; torch.func must not silently return zeros."""
    made = problem_with(lambda w, x, h: torch.tanh(h @ w + x))
    segment = make_train_segment(made.step, mse, backend="eager")
    _, state, x, y = made.data(4)

    def value(w: Tensor) -> Tensor:
        return segment({"w": w}, state, x, y).loss

    with pytest.raises(RuntimeError, match=r"not differentiable|detached"):
        torch.func.grad(value)(made.params["w"])


WITHOUT_GRADIENT = {
    "detached": lambda out, y: mse(out, y).detach(),
    "argmax": lambda out, y: (out.argmax(-1) == y.argmax(-1)).double().mean(),
    "a comparison": lambda out, y: (out > y).double().mean(),
    "detached, by K as a number": lambda out, y: nn.functional.cross_entropy(
        out.detach().flatten(0, -2), y.argmax(-1).flatten()
    ),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
@pytest.mark.filterwarnings("default:ftbptt")
def test_a_loss_without_a_gradient(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """torch's backward would be an error; a segment that is only evaluated needs no gradient."""
    given = problem_with(STOPPED["straight through"])
    segment = make_train_segment(given.step, WITHOUT_GRADIENT[name], backend="eager")
    assert segment.evaluate(*given.data(3)).loss.isfinite()
    assert not recwarn.list
    for _ in range(2):  # told once
        grads = segment(*given.data(3)).grads
        assert all(grad.count_nonzero() == 0 for grad in grads.values())
    (warning,) = recwarn.list
    expected = "has no gradient with respect to its outputs, so all gradients are zeros"
    assert expected in str(warning.message)


def test_a_part_of_a_loss_without_a_gradient() -> None:
    given = problem_with(STOPPED["straight through"])
    penalized = lambda out, y: mse(out, y) * (1 + (out > y).double().mean().detach())  # noqa: E731
    given = replace(given, loss=penalized)
    check(make_train_segment(given.step, given.loss, backend="eager"), given, 3)


def keeps(params: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """A statistic of the state, which overflows: infinite, and so is its derivative."""
    h, product = state
    h = torch.tanh(h @ params["w"] + x)
    return h, (h, tap("product", product * (1e300 * h).exp()))


def reads_late(params: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The loss depends on both, but on the first only through the second, a step later."""
    a, b = state
    return b, (torch.tanh(a @ params["w"] + x), torch.tanh(a) + 0.5 * b)


def reads_none(params: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    h, kept = state
    return h.detach() * params["w"].mean(0), (torch.tanh(h @ params["w"] + x), kept + h)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"window": 4}])
@pytest.mark.parametrize(("step", "read"), [(keeps, "0"), (reads_late, "01"), (reads_none, "")])
def test_the_gradient_of_what_a_step_only_keeps(step: Any, read: str, options: Any) -> None:
    """It is zero, and is not multiplied by what may be infinite; there is no loop for it."""
    draw = Draw(0)
    given = Problem(
        step, {"w": draw(H, H)}, (draw(B, H), draw(B, H)), draw.sequence(B, H),
        draw.sequence(B, H), mse,
    )  # fmt: skip
    segment = make_train_segment(given.step, given.loss, backend="eager", **options)
    found, expected = segment(*given.data(4)), reference(given, 4)
    assert_close((found.grads, found.loss), (expected.grads, expected.loss))
    titles = [block.title for block in segment.explain(*given.data(4)).blocks]
    assert [i for i in "01" if any(f"d state[{i}]" in title for title in titles)] == list(read)


def test_a_tap_on_what_a_step_only_keeps() -> None:
    draw = Draw(0)
    segment = make_train_segment(keeps, mse, backend="eager", taps=["product"])
    arguments = {"w": draw(H, H)}, (draw(B, H), draw(B, H)), draw.sequence(B, H)(3)
    found = segment(*arguments, draw.sequence(B, H)(3))
    assert torch.equal(found.taps["product"].grad, torch.zeros(3, B, H, dtype=torch.float64))


def test_a_step_that_trains_nothing_is_told(recwarn: pytest.WarningsRecorder) -> None:
    """torch's backward would be an error. A gradient of what is tapped may be all one wants."""
    given = problem_with(lambda w, x, h: torch.tanh(tap("x", x) + h @ w.detach()))
    expected = "step has no gradient with respect to the parameters, so all"
    with pytest.warns(RuntimeWarning, match=expected):
        make_train_segment(given.step, given.loss, backend="eager")(*given.data(3))
    tapped = make_train_segment(given.step, given.loss, backend="eager", taps=["x"])
    assert tapped(*given.data(3)).taps["x"].grad.count_nonzero() > 0
    assert not recwarn.list


class Partly(nn.Module):
    """A normalized readout of a state that is detached; one layer is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.unused = nn.GRUCell(H, H), nn.Linear(2, 2)
        self.readout = nn.utils.parametrizations.weight_norm(nn.Linear(H, H))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.readout(h.detach()), h


def test_explain_names_the_parameters_without_a_gradient() -> None:
    model, (x, y) = Partly(), torch.randn(2, 4, 3, H)
    params = dict(model.named_parameters())
    explanation = make_train_segment(model, mse, backend="eager").explain(
        params, torch.zeros(3, H), x, y
    )
    names = [name for name in params if not name.startswith("readout")]
    assert explanation.without_gradient == [f"params['{name}']" for name in names]
    assert str(explanation).endswith(
        "\nwithout a gradient: " + ", ".join(f"params['{n}']" for n in names)
    )


@pytest.mark.parametrize(
    "view", [lambda h: h.view(B, H), lambda h: h.reshape(B, -1), lambda h: h.expand(B, H)]
)
def test_a_view_that_changes_nothing_at_the_end_of_a_step(view: Any) -> None:
    """The reverse loop reads the new state of one leaf, and not the old one of the other."""

    def step(params: Tree, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        h, c = state
        new = view(h * params["w"] + c + x)
        return new * params["v"], (new, 0.5 * c + x)

    draw = Draw(0)
    x, y = draw(5, B, H), draw(5, B, H)
    params, state = {"w": draw(H), "v": draw(H)}, (draw(B, H), draw(B, H))
    case = Problem(step, params, state, lambda k: x[:k], lambda k: y[:k], mse)
    check(make_train_segment(step, mse, backend="eager"), case, 5)
