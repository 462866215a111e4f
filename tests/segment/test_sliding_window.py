"""A sliding window in the gradient, against the loops that people write for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ftbptt import as_step, make_train_segment, reference_segment

from ..cells import CELLS, problem, slow_but
from ..cells.problems import Draw, Problem
from ..kernels.test_fused import QUICK
from ..oracle import assert_close

TIME_FIRST = [name for name in CELLS if not problem(name).time_dim]
WINDOWS = [(1, 1), (3, 1), (5, 3)]


def graded(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def recomputed(
    given: Problem, arguments: Any, window: int, stride: int, reset: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Forward once for the states; then, for each window, the steps again with autograd."""
    params, state, x, y = arguments
    step = as_step(given.step)
    leaves, spec = tree_flatten(params)
    leaves = [leaf.detach().requires_grad_(graded(leaf)) for leaf in leaves]
    params = tree_unflatten(leaves, spec)
    steps = tree_leaves(x)[0].shape[0]

    def run(t: int, state: Any) -> Any:
        if reset is not None:
            state = tree_map(lambda leaf: leaf * ~reset[t].unsqueeze(1), state)
        return step.apply(params, step.buffers(), tree_map(lambda leaf: leaf[t], x), state)

    states, outs = [state], []
    with torch.no_grad():
        for t in range(steps):
            out, after = run(t, states[-1])
            outs.append(tree_leaves(out))
            states.append(after)
            out_spec = tree_flatten(out)[1]
    stacked = [torch.stack(own).requires_grad_(graded(own[0])) for own in zip(*outs, strict=True)]
    loss = given.loss(tree_unflatten(stacked, out_spec), y)
    loss = loss.mean() if loss.dim() else loss
    read = [i for i, leaf in enumerate(stacked) if leaf.requires_grad]
    d_out = torch.autograd.grad(loss, [stacked[i] for i in read], allow_unused=True)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    total = [torch.zeros_like(leaf) for leaf in trained]
    for first in range(0, steps, stride):
        end = min(first + stride, steps)
        start = max(0, end - window)
        own_state, values, cotangents = tree_map(Tensor.detach, states[start]), [], []
        for t in range(start, end):
            out, own_state = run(t, own_state)
            if t >= first:
                own = tree_leaves(out)
                pairs = [(own[i], d[t]) for i, d in zip(read, d_out, strict=True) if d is not None]
                values += [value for value, _ in pairs if value.requires_grad]
                cotangents += [d for value, d in pairs if value.requires_grad]
        grads = torch.autograd.grad(values, trained, cotangents, allow_unused=True)
        for i, grad in enumerate(grads):
            total[i] += 0 if grad is None else grad
    return loss.detach(), total


def check(given: Problem, arguments: Any, segment: Any, window: int, stride: int) -> None:
    found = segment(*arguments)
    loss, grads = recomputed(given, arguments, window, stride)
    assert_close(found.loss, loss)
    own = [leaf for leaf in tree_leaves(found.grads) if graded(leaf)]
    for a, b in zip(own, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", slow_but(QUICK, TIME_FIRST))
def test_windows_computed_again(name: str) -> None:
    given = problem(name)
    for window, stride in WINDOWS:
        segment = make_train_segment(
            given.step, given.loss, backend="eager", window=window, stride=stride
        )
        check(given, given.data(7), segment, window, stride)


@pytest.mark.parametrize("name", slow_but([*QUICK, "gru_batch_first"], CELLS))
def test_a_window_of_the_whole_segment_is_plain_tbptt(name: str) -> None:
    given = problem(name)
    options: Any = {"backend": "eager", "time_dim": given.time_dim or None}
    segment = make_train_segment(given.step, given.loss, window=7, stride=2, **options)
    plain = reference_segment(
        given.step, given.loss, *given.data(5), time_dim=given.time_dim or None
    )
    found = segment(*given.data(5))
    if given.time_dim == 0:
        whole = make_train_segment(given.step, given.loss, window=9, stride=5, **options)
        assert_close(whole(*given.data(5)), plain)
    assert_close((found.loss, found.state, found.out), (plain.loss, plain.state, plain.out))


@pytest.mark.parametrize("recompute", [False, True])
def test_every_length(recompute: bool) -> None:
    """Shorter and longer than the window, and more windows than run at once."""
    given = problem("lstm_readout")
    segment = make_train_segment(
        given.step, given.loss, backend="eager", window=4, recompute=recompute
    )
    for steps in (1, 3, 4, 5, 17):
        check(given, given.data(steps), segment, 4, 1)
    assert segment.trace_count == 1


def test_windows_in_blocks(in_chunks: None) -> None:
    given = problem("gru_cell")
    segment = make_train_segment(given.step, given.loss, backend="eager", window=5, stride=2)
    for steps in (33, 17):
        check(given, given.data(steps), segment, 5, 2)


@pytest.mark.slow
def test_a_loop_called_from_python() -> None:
    """The operator of the loop finds its block again in every call."""
    given = problem("gru_cell")
    segment = make_train_segment(given.step, given.loss, backend="cudagraph", window=3)
    for _ in range(2):
        check(given, given.data(6), segment, 3, 1)


def test_compiled() -> None:
    """Kernels over all windows at once; no compilation for another K of as many windows."""
    given = problem("lstm_readout")
    segment = make_train_segment(given.step, given.loss, backend="fused", window=3)
    check(given, given.data(7), segment, 3, 1)
    compiled = segment.compile_count
    for steps in (8, 5):
        check(given, given.data(steps), segment, 3, 1)
    assert segment.compile_count == compiled


def test_explained() -> None:
    given = problem("lstm")
    segment = make_train_segment(given.step, given.loss, window=4, stride=2, backend="eager")
    text = str(segment.explain(*given.data(9)))
    assert "reverse, in 5 windows of 4 steps, up to 5 at once" in text
    assert "20 times" in text  # the product of the loop
    assert "contracted over 9 steps and rows at once" in text
    assert "in chunks" not in text


def test_resets_and_masks() -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        return h, h

    def per_step(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean(-1)

    draw = Draw(0)
    params, h = {"w": draw(5, 4), "u": draw(4, 4)}, draw(3, 4)
    x, y = draw(9, 3, 5), draw(9, 3, 4)
    generator = torch.Generator().manual_seed(1)
    reset = torch.rand(9, 3, generator=generator) < 0.3
    given = Problem(step, params, h, lambda k: x[:k], lambda k: y[:k], per_step)
    segment = make_train_segment(step, per_step, backend="eager", window=3)
    found = segment(params, h, x, y, reset=reset)
    loss, grads = recomputed(given, (params, h, x, y), 3, 1, reset)
    assert_close((found.loss, list(found.grads.values())), (loss, grads))
    # Steps at the end that are not valid: the segment is as long as those that are.
    mask = torch.arange(9) < 6
    found = segment(params, h, x, y, mask=mask)
    loss, grads = recomputed(given, (params, h, x[:6], y[:6]), 3, 1)
    assert_close((found.loss, list(found.grads.values())), (loss, grads))


def test_vmap_and_in_dims() -> None:
    given = problem("elman_one_sequence")
    draw = Draw(2)
    sequences = [given.data(7)] + [
        (given.params, draw(*given.state.shape), draw(*given.x(7).shape), draw(*given.y(7).shape))
        for _ in range(2)
    ]
    state, x, y = (torch.stack([own[i] for own in sequences]) for i in (1, 2, 3))
    expected = [recomputed(given, own, 3, 1)[1] for own in sequences]
    segment = make_train_segment(given.step, given.loss, backend="eager", window=3)
    found = vmap(segment, in_dims=(None, 0, 0, 0))(given.params, state, x, y)
    for i, own in enumerate(expected):
        assert_close([leaf[i] for leaf in tree_leaves(found.grads)], own)
    segment = make_train_segment(
        given.step, given.loss, backend="eager", window=3, in_dims=(None, 0, 0, 0)
    )
    mean = [torch.stack(own).mean(0) for own in zip(*expected, strict=True)]
    assert_close(tree_leaves(segment(given.params, state, x, y).grads), mean)


def written(backward: Callable[[Tensor], Tensor], place: str) -> Problem:
    """A step with an identity there, whose gradient is what someone wrote."""

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return backward(grad)

    def at(name: str, tensor: Tensor) -> Tensor:
        return Written.apply(tensor) if name == place else tensor  # type: ignore[no-untyped-call]

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z = at("input", x_t @ at("weight", params["w"]))
        h = torch.tanh(z + at("state", h) @ params["u"])
        return at("out", h @ params["u"]), h

    draw = Draw(0)
    params = {"w": draw(5, 5), "u": draw(5, 5)}
    sequences = draw.sequence(3, 5), draw.sequence(3, 5)
    return Problem(step, params, draw(3, 5), *sequences, lambda out, y: (out - y).square().sum())


def clipped(grad: Tensor) -> Tensor:
    return grad.clamp(-0.01, 0.01)


@pytest.mark.parametrize("place", ["state", "out"])
def test_a_gradient_that_is_clipped_within_the_recurrence(place: str) -> None:
    """There each window clips its own; outside of it, windows are added up."""
    given = written(clipped, place)
    segment = make_train_segment(given.step, given.loss, backend="eager", window=3)
    check(given, given.data(7), segment, 3, 1)


NOT_LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "clipped": clipped,
    "sin": lambda grad: torch.sin(9 * grad),
    "floor": lambda grad: torch.floor(10 * grad),
    "whole": lambda grad: (10 * grad).int().to(grad.dtype),
    "remainder": lambda grad: grad % 0.3,
    "sorted": lambda grad: grad.sort(-1).values,
    "largest": lambda grad: grad - grad.max(-1, keepdim=True).values,
    "plus a number": lambda grad: grad + 0.1,
    "from a number": lambda grad: 0.5 - grad,
    "a number": torch.ones_like,
    "signed": lambda grad: torch.where(grad > 0, grad, 0.5 * grad),
    "over itself": lambda grad: 1 / (grad + 5),
}


@pytest.mark.parametrize("place", ["input", "weight"])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_gradient_that_is_not_linear(name: str, place: str) -> None:
    given = written(NOT_LINEAR[name], place)
    segment = make_train_segment(given.step, given.loss, backend="eager", window=3)
    with pytest.raises(ValueError, match=r"^window: a gradient in the step is not linear, as of"):
        segment(*given.data(7))


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda grad: -0.5 * grad,
    "of some": lambda grad: torch.where(torch.ones_like(grad).bool().tril(), grad, 0.0),
    "of some columns": lambda grad: F.pad(grad[:, 1:], (1, 0)),
    "centred": lambda grad: grad - grad.mean(-1, keepdim=True),
    "joined": lambda grad: torch.cat([grad[:, 2:] / 3, torch.zeros_like(grad[:, :2])], 1),
    "summed": lambda grad: grad.cumsum(-1).flip(-1) + grad.mT.sum(0).unsqueeze(1),
}


@pytest.mark.parametrize("place", ["input", "weight"])
@pytest.mark.parametrize("name", LINEAR)
def test_a_gradient_that_is_linear(name: str, place: str) -> None:
    given = written(LINEAR[name], place)
    segment = make_train_segment(given.step, given.loss, backend="eager", window=3)
    check(given, given.data(7), segment, 3, 1)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"window": 0}, ValueError, "window: expected at least 1, found 0"),
        ({"window": 2.0}, TypeError, "window: expected a whole number, found 2.0"),
        ({"stride": 2}, ValueError, "stride: 2 has no meaning without window="),
        ({"window": 3, "stride": 4}, ValueError, "stride: 4 is more than window=3"),
        ({"window": 3, "taps": True}, ValueError, "taps, window: a tensor has a gradient in each"),
    ],
)
def test_bad_input(options: Any, kind: type[Exception], words: str) -> None:
    given = problem("elman")
    with pytest.raises(kind, match=words):
        make_train_segment(given.step, given.loss, **options)
