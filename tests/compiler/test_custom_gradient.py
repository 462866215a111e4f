"""``torch.autograd.Function`` in a step and in a loss: its own gradient, in all of its forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import vmap

from ftbptt import make_train_segment

from ..cells import slow_but
from ..cells.problems import B, H, Problem, mse
from ..oracle import assert_close, check
from ..sequences import looped, stacked
from .one_operation import check_both, problem_with

Tree = Any


class Spike(torch.autograd.Function):
    """The surrogate gradient of spiking networks, as most libraries have it."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, slope: float = 2.0) -> Tensor:
        ctx.save_for_backward(v)
        ctx.slope = slope
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (v,) = ctx.saved_tensors
        return grad / (1 + ctx.slope * v.abs()) ** 2, None


class NewSpike(torch.autograd.Function):
    """The same in the style that torch.func asks for; of one result, which it returns alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor) -> Tensor:
        return (v > 0).to(v.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        v, spikes = ctx.saved_tensors
        return grad * (1 + spikes) / (1 + v.abs()) ** 2


class Swapped(torch.autograd.Function):
    """Two inputs, two results, both read by backward, which is no gradient of anything."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: float, b: Tensor) -> Any:
        product = a * b
        ctx.factor, ctx.kept = factor, product.sigmoid()
        ctx.save_for_backward(a, b, product)
        return product, a - b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_product: Tensor, of_difference: Tensor) -> Any:
        _, b, product = ctx.saved_tensors
        return of_product * b - of_difference * product, None, ctx.factor * of_product * ctx.kept


class Marked(torch.autograd.Function):
    """One result without a gradient, and gradients that are None where nothing reads a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        flags, unread, largest = (x > 0).to(x.dtype), 3 * x, x.argmax(-1)
        ctx.mark_non_differentiable(flags)
        return flags, unread, torch.tanh(x), largest

    @staticmethod
    def backward(ctx: Any, of_flags: Any, of_unread: Any, grad: Any, of_largest: Any) -> Any:
        assert ctx.needs_input_grad == (True,)
        return 0.7 * grad if of_unread is None else 0.2 * grad + of_unread


class Reversed(torch.autograd.Function):
    """Of adversarial training: nothing forward, the other sign backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Weighed(torch.autograd.Function):
    """A product with gradients of both operands, of which that of the weight is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.T, (x.T @ grad).clamp(-0.01, 0.01) if ctx.needs_input_grad[1] else None


class Rounded(torch.autograd.Function):
    """Of weights of few bits. Each step's gradient is clipped, and not their sum."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return (4 * w).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return torch.where(w.abs() < 1, grad.clamp(-0.05, 0.05), 0.0)


def marked(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    flags, _, squashed, largest = Marked.apply(h @ w + x)
    _, both, other, _ = Marked.apply(h)
    return flags * x + squashed + 0.1 * (both + other) + 0.01 * largest.unsqueeze(-1)


def without_grad(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = Weighed.apply(h, w)
    return torch.tanh(gate * (h @ w) + x)


bound = Spike.apply  # as it is often kept: the method, looked up beforehand
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "old style": lambda w, x, h: 0.8 * h + x @ w - Spike.apply(h, 5.0),
    "default": lambda w, x, h: 0.8 * h + x @ w - bound(h),
    "new style": lambda w, x, h: 0.8 * h + x @ w - NewSpike.apply(h),
    "several": lambda w, x, h: torch.tanh(sum(Swapped.apply(h @ w, 0.3, x + h))),
    "marked": marked,
    "reversed": lambda w, x, h: torch.tanh(Reversed.apply(h @ w) + x),
    "with a weight": lambda w, x, h: torch.tanh(Weighed.apply(h, w) + x),
    "twice": lambda w, x, h: torch.tanh(Weighed.apply(Weighed.apply(h, w) + x, w)),
    "of a parameter alone": lambda w, x, h: torch.tanh(h @ Rounded.apply(2 * w) + x),
    "under no_grad": without_grad,
    "of a vmapped row": lambda w, x, h: torch.tanh(vmap(NewSpike.apply)(h @ w) + x + h),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    check_both(problem_with(STEPS[name]))


@pytest.mark.parametrize("name", ["old style", "several", "marked"])
def test_resets_and_a_start_that_is_learned(name: str) -> None:
    """The graph of the step is traced again, with what they add."""

    def start(params: Tree) -> Tensor:
        return params["w"][0].expand(B, H)

    made = problem_with(STEPS[name])
    segment = make_train_segment(made.step, mse, backend="eager", initial_state=start)
    for reset in (torch.tensor([[True, False, True]] * 4), torch.tensor([True, False, True, True])):
        check(segment, made, 4, reset=reset, initial_state=start)


@pytest.mark.parametrize(
    "name", ["old style", "new style", "several", "marked", "twice", "of a parameter alone"]
)
def test_vmapped(name: str) -> None:
    """Sequences that share parameters, and models of their own; torch refuses the old style."""
    made = problem_with(STEPS[name])
    calls = [problem_with(STEPS[name]).data(3), made.data(3)]
    calls[0] = tuple(0.6 * leaf if isinstance(leaf, Tensor) else leaf for leaf in calls[0])
    segment = make_train_segment(made.step, mse, backend="eager")
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    shared = vmap(segment, in_dims=(None, 0, 0, 0))(made.params, state, x, y)
    assert_close(shared, looped(made, [(made.params, *call[1:]) for call in calls]))
    models = [{"w": 0.7 * made.params["w"]}, made.params]
    found = vmap(segment)(stacked(models), state, x, y)
    assert_close(
        found, looped(made, [(p, *call[1:]) for p, call in zip(models, calls, strict=True)])
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("backend", slow_but(["fused"], ["compile", "fused"]))
def test_compiled(backend: str) -> None:
    """Spikes, and a weight whose gradient is not a sum over the steps that the engine knows."""

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        return 0.8 * torch.tanh(Weighed.apply(h, w)) + x - Spike.apply(h, 5.0)

    made = problem_with(after)
    segment = make_train_segment(made.step, mse, backend=backend)
    for steps in (4, 1):
        check(segment, made, steps)


class Mean(torch.autograd.Function):
    """Its context holds sizes, one of which is K: a symbol in the graph of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.steps, ctx.shape, ctx.count = x.shape[0], x.shape, x.numel()
        return x.sum() / x.numel()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad / ctx.count).expand(ctx.shape) * ctx.steps


def test_of_a_loss() -> None:
    """A loss is differentiated once for all steps, and for any number of them."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        product, difference = Swapped.apply(out, 0.4, out - y)
        return Mean.apply(product.square()) + difference.sum()

    made = problem_with(lambda w, x, h: torch.tanh(h @ w + x), loss=loss)
    segment = make_train_segment(made.step, loss, backend="eager")
    for steps in (4, 1, 7):
        check(segment, made, steps)
    assert (segment.trace_count, segment.compile_count) == (1, 1)


def test_a_constant_and_a_captured_tensor() -> None:
    """What forward takes from outside becomes an input of the graph."""
    scale = torch.rand(H, dtype=torch.float64)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.factor = scale * torch.tensor(0.5, dtype=x.dtype)
            return x * ctx.factor

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.factor

    made = problem_with(lambda w, x, h: torch.tanh(Scaled.apply(h @ w) + x))
    segment = make_train_segment(made.step, mse, backend="eager")
    check(segment, made, 4)
    scale.mul_(0.5)
    check(segment, made, 4)


@pytest.mark.parametrize("kind", ["number", "masked", "saved"])
def test_a_backward_that_makes_a_tensor(kind: str) -> None:
    table = torch.rand(H).double()

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a, table)
            return a.relu()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            a, saved = ctx.saved_tensors
            if kind == "number":
                return grad * torch.tensor(2.0)
            if kind == "masked":
                grad = grad.clone()
                grad[a < 0] = 0
                return grad
            return grad * saved

    check_both(problem_with(lambda w, x, h: Scaling.apply(x @ w + 0.5 * h)))


def test_a_backward_that_reads_a_tensor_outside() -> None:
    table = torch.rand(H).double()

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a.relu()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * table

    made = problem_with(lambda w, x, h: Scaling.apply(x @ w + h))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    words = (
        r"backward of a torch.autograd.Function reads a tensor .*of shape \[7\].*save_for_backward"
    )
    with pytest.raises(TypeError, match=words):
        segment(*made.data(4))


def test_random_numbers_are_drawn_at_each_step() -> None:
    """Forward draws like the rest of the step; backward sees what was drawn."""

    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = torch.rand_like(x) < 0.5
            ctx.save_for_backward(kept)
            return x * kept

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = Dropped.apply(h + params["w"])
        return h, h

    params, state = {"w": torch.ones(50, dtype=torch.float64)}, torch.zeros(1, 50).double()
    x = torch.zeros(3, 1, 50, dtype=torch.float64)
    segment = make_train_segment(step, lambda out, y: out.sum(), backend="eager")
    found = segment(params, state, x, x)
    assert found.out[0].ne(0).ne(found.out[1].ne(0)).any()
    # Each kept number is 1 more than the one before, and its gradient counts the steps from there.
    kept = found.out.ne(0).squeeze(1).double()
    expected = kept[0] * (1 + kept[1] * (1 + kept[2])) + kept[1] * (1 + kept[2]) + kept[2]
    assert_close(found.grads, {"w": expected})


# -- what is refused ------------------------------------------------------------------------------


def refusal(made: Problem) -> str:
    with pytest.raises(RuntimeError) as error:
        make_train_segment(made.step, mse, backend="eager")(*made.data(3))
    return str(error.value) + "".join(getattr(error.value, "__notes__", []))


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_arguments_that_are_written() -> None:
    found = refusal(problem_with(lambda w, x, h: torch.tanh(InPlace.apply(h @ w) + x)))
    assert found.startswith("ctx.mark_dirty: a Function that writes to its arguments cannot be")
    assert "while step step was traced" in found


@pytest.mark.parametrize("of_x", [(), (None, None), (None, 1.0)])
def test_a_wrong_number_of_gradients(of_x: tuple[Any, ...]) -> None:
    """One for each argument, as torch wants it; what is beyond may be None."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, x: Tensor) -> Tensor:
            return h + x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, *of_x

    made = problem_with(lambda w, x, h: torch.tanh(Sum.apply(h @ w, x)))
    if of_x == (None, None):
        check(make_train_segment(made.step, mse, backend="eager"), made, 3)
    else:
        found = refusal(made)
        assert f"Sum.backward: returned {1 + len(of_x)} gradients; expected 2" in found


class Implicit(torch.autograd.Function):
    """A fixed point, as deep equilibrium models differentiate it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(x), x, grad)[0]


def test_a_backward_that_takes_a_gradient_by_torch_autograd() -> None:
    message = r"Implicit backward takes a gradient by torch\.autograd.*\n.*in backward\n"
    found = refusal(problem_with(lambda w, x, h: Implicit.apply(h @ w + x)))
    assert re.match(message, found)
    assert "or torch.func.vjp" in found


def test_inside_an_inner_gradient() -> None:
    """torch.func.grad inside the step takes the gradient where no graph could know of it."""

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        return torch.func.grad(lambda h: (Spike.apply(h) * x).sum())(h) @ w + x

    found = refusal(problem_with(after))
    assert "step step uses a torch.autograd.Function inside another gradient" in found
    assert "soft + (hard - soft).detach()" in found


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_full_backward_hooks(kind: str) -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(H, H).double()
            getattr(self.inner, f"register_full_backward_{kind}")(lambda *args: None)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.inner(h) + x)
            return h, h

    module = Hooked()
    given = problem_with(lambda w, x, h: h)
    params = dict(module.named_parameters())
    found = refusal(Problem(module, params, given.state, given.x, given.y, mse))
    assert found.startswith(
        "step Hooked calls a module that has a full backward hook, which cannot be compiled\n"
    )
    assert "h = torch.tanh(self.inner(h) + x)" in found
    assert found.endswith(
        "Remove it, by remove() of what register_full_backward_hook returned. For the gradient of "
        "the loss at a tensor inside the step use make_train_segment(..., taps=) and ftbptt.tap."
    )


# -- a gradient that changes ---------------------------------------------------------------------

sharpness = 2.0


class GlobalSpike(NewSpike):
    """The slope of its gradient is a global variable, which the forward does not read."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * sharpness


SHARPENED: dict[str, Callable[[Tensor], Tensor]] = {
    "in backward": GlobalSpike.apply,
    "an argument": lambda h: Spike.apply(h, sharpness),
}


@pytest.mark.parametrize("place", ["step", "loss"])
@pytest.mark.parametrize("how", SHARPENED)
def test_a_slope_that_is_annealed(how: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is the same operations as before."""

    def spikes(h: Tensor) -> Tensor:
        return SHARPENED[how](h)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(spikes(out), y)

    after = (lambda w, x, h: spikes(h @ w + x)) if place == "step" else (lambda w, x, h: h @ w + x)
    made = problem_with(after, loss=loss if place == "loss" else mse)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    monkeypatch.setitem(globals(), "sharpness", 25.0)
    with pytest.warns(RuntimeWarning, match="compiled again: .* 'sharpness' has changed"):
        check(segment, made, 4)


def test_what_does_not_change_a_gradient_that_someone_wrote() -> None:
    """The loss is traced again, and not compiled again."""
    step_size = 1.0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        assert step_size
        return mse(Spike.apply(out), y)

    made = problem_with(lambda w, x, h: h @ w + x, loss=loss)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    compiled = segment.compile_count
    for _ in range(2):
        step_size += 1
        check(segment, made, 4)
    assert (segment.trace_count, segment.compile_count) == (3, compiled)
