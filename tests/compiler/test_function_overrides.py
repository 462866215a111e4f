"""Functions that cannot be traced, losses of one K, states in parts, pending conjugations.

All compared with the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment, reference_segment

from ..cells import slow_but
from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import assert_close, check, reference
from ..sequences import looped, stacked

Tree = Any
K = 4


def linear(params: Tree, x_t: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(x_t + h @ params["w"])


def tanh_step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = linear(params, x_t, h)
    return h, h


def problem(
    step: Callable[..., Any], loss: Any = mse, state: Any = None, out: tuple[int, ...] = (B, H)
) -> Problem:
    draw = Draw(0)
    params = {"w": draw(H, H), "table": draw(5, H)}
    state = draw(B, H) if state is None else state
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(*out), loss)


def checked(case: Problem, backend: str = "eager") -> Any:
    segment = make_train_segment(case.step, case.loss, backend=backend)
    check(segment, case, K)
    return segment


# -- compositions -------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gaussian_likelihood(reduction: str) -> None:
    """It checks for negative variances."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = F.gaussian_nll_loss(out, y, out[..., 0].square() + 0.1, True, reduction=reduction)
        return value.mean(-1) if reduction == "none" else value

    checked(problem(tanh_step, loss))


def test_infinite_variances_and_lengths() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        h = linear(params, x_t, h)
        wide = h.square().masked_fill(h > 0, torch.inf)
        likely = F.gaussian_nll_loss(x_t, h, wide, reduction="none")
        return (likely, torch.polar(wide, torch.ones_like(h)).real), h

    def loss(out: Tree, y: Tensor) -> Tensor:
        return sum(mse(leaf.where(leaf.isfinite(), 0.0), y) for leaf in out)

    case = problem(step, loss)
    arguments = case.data(K)
    result = make_train_segment(step, loss, backend="eager")(*arguments)
    expected = reference_segment(step, loss, *arguments)
    assert all(leaf.isinf().any() for leaf in expected.out)
    for leaf, expected_leaf in zip(result.out, expected.out, strict=True):
        torch.testing.assert_close(leaf, expected_leaf)
    assert_close(result[:3], expected[:3])


@pytest.mark.parametrize("correction", [0, 1])
def test_covariance(correction: int) -> None:
    """It validates weights, also if there are none."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        features = (out + y).reshape(-1, H)
        alone = features[:, 0].cov(correction=correction)
        return torch.cov(features.T, correction=correction).triu(1).square().sum() + alone

    checked(problem(tanh_step, loss))


def test_correlation() -> None:
    """By the covariance."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        features = (out + y).reshape(-1, H)
        alone = torch.corrcoef(features[:, 0] + out[0, 0, 0])
        return torch.corrcoef(features.T).triu(1).square().sum() + features.corrcoef().sum() + alone

    checked(problem(tanh_step, loss))


def test_shrinking() -> None:
    """In a kernel, for which their gradients have to be known."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = F.softshrink(x_t + h @ params["w"], 0.3)
        return torch.hardshrink(h, 0.2) + F.hardshrink(x_t) + x_t.hardshrink(0.7), h

    checked(problem(step), "fused")


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("place", ["step", "loss"])
def test_a_slope_that_is_drawn(place: str, inplace: bool) -> None:
    """Of one value, so that the gradient is known; in eval mode the mean of the bounds."""
    act = torch.nn.RReLU(0.3, 0.3, inplace=inplace)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z = x_t @ params["w"] + h
        h = act(z * 1.0) if place == "step" else z
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(act(out * 1.0) if place == "loss" else out, y)

    case = problem(step, loss)
    for mode in (True, False):
        act.train(mode)
        checked(case)


def test_random_numbers_around_a_mean_have_no_gradient() -> None:
    """As in torch, where ``mean + std * randn`` is the one that has."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        mean = x_t @ params["w"]
        action = torch.normal(mean, 0.0)
        return (action - mean).square() + action, h

    checked(problem(step))


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "fused"]))
def test_complex_numbers_of_two_real_ones(backend: str) -> None:
    """Outside the recurrence, for any K."""

    def step(params: Tree, x_t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.polar(torch.sigmoid(params["table"][0]), params["table"][1])
        z = z * turn + torch.complex(x_t @ params["w"], params["table"][2])
        return z.real + torch.polar(x_t @ params["w"], x_t).imag, z

    draw = Draw(1)
    case = problem(step, state=torch.complex(draw(B, H), draw(B, H)))
    segment = make_train_segment(case.step, case.loss, backend=backend)
    for steps in (K, 1, 2):
        check(segment, case, steps)


def buffered(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
    """A delay line whose position is a tensor of one number."""
    buffer, t = state
    new = torch.tanh(x_t + buffer[:, (t + 1) % 3] @ params["w"])
    buffer = buffer.clone()
    buffer[:, t % 3, 1:] = new[:, 1:]
    buffer[..., t % 3, 0] = 0.5 * new[:, 0]
    return buffer[:, t % 3 - 1], (buffer, t + 1)


def test_a_position_in_a_buffer() -> None:
    draw = Draw(1)
    case = problem(buffered, state=(draw(B, 3, H), torch.tensor(1)))
    segment = checked(case)
    params, _, x, y = case.data(K)
    calls = [(params, (draw(B, 3, H), torch.tensor(i)), x, y) for i in (0, 2)]
    batch = [stacked([call[i] for call in calls]) for i in range(1, 4)]
    mapped = vmap(segment, in_dims=(None, 0, 0, 0))(params, *batch)
    assert_close(mapped, looped(case, calls))


@pytest.mark.parametrize("selection", ["rows", "columns", "elements"])
def test_what_a_mask_chooses(selection: str) -> None:
    """Gets a value that is the same for all that is chosen along the axes of the mask."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = linear(params, x_t, h).clone()
        if selection == "rows":
            h[h[:, 0] > 0] = params["w"][0]
        elif selection == "columns":
            h[:, params["w"][0] > 0] = h.sum(1, keepdim=True)
        else:
            h.view(1, B, H)[:, h > 0] = params["w"][:1, :1]
        return h, h

    checked(problem(step))


# -- decompositions of torch ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_gradient_that_is_written_in_place() -> None:
    """affine_grid's is. The write was dropped, and uninitialized memory was the gradient."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = linear(params, x_t, h)
        return F.affine_grid(h[:, :6].reshape(B, 2, 3), [B, 1, 2, 3], align_corners=False), h

    case = problem(step, out=(B, 2, 3, 2))
    checked(case)
    segment = make_train_segment(step, mse, backend="eager")
    mapped = vmap(segment, in_dims=(None, 0, 0, 0))(
        case.params, *(stacked([leaf, leaf]) for leaf in case.data(K)[1:])
    )
    assert_close(mapped.loss[1], reference(case, K).loss)


def test_a_loss_whose_decomposition_is_wrong() -> None:
    """Classes until the first -1: one, two, none or all; also for any number of steps."""
    classes = torch.full((B, H), -1)
    classes[:, 0] = torch.arange(B) % H
    classes[1, :2] = torch.tensor([3, 1])
    classes[2, :3] = torch.tensor([-1, 2, 3])
    all_classes = torch.arange(H).flip(0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        targets = classes.expand(len(out), B, H).flatten(0, 1)
        return F.multilabel_margin_loss(out.flatten(0, 1), targets) + F.multilabel_margin_loss(
            out.mean((0, 1)), all_classes, reduction="sum"
        )

    checked(problem(tanh_step, loss))


# -- losses of one K ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_a_loss_that_is_written_for_one_length(backend: str, kernels: None) -> None:
    discount = 0.9 ** torch.arange(K, dtype=torch.float64)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return ((out - y).square().mean((1, 2)) * discount).sum()

    segment = checked(problem(tanh_step, loss), backend)
    with pytest.raises(RuntimeError, match=r"size of tensor|broadcast"):
        check(segment, problem(tanh_step, loss), K + 1)


def test_a_loss_that_is_compiled_for_many_lengths() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().reshape(len(out) * B, H).sum(0).mean() / float(len(out))

    case = problem(tanh_step, loss)
    segment = make_train_segment(tanh_step, loss, backend="eager")
    for steps in (2, 3, 4, 5, 3):
        check(segment, case, steps)
    with pytest.warns(RuntimeWarning, match="the loss is compiled anew for each number of steps"):
        check(segment, case, 6)
    check(segment, case, 7)


def test_a_loss_that_loops_over_pairs_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft dynamic time warping (Cuturi and Blondel, 2017): it is traced for the caller's K."""
    summed = Mock(wraps=torch.logsumexp)
    monkeypatch.setattr(torch, "logsumexp", summed)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        costs = (out.unsqueeze(1) - y).square().sum((-2, -1))
        far = costs.new_full((), 1e8)
        best = {(0, 0): costs.new_zeros(())}
        for i in range(len(out)):
            for j in range(len(y)):
                before = [best.get(at, far) for at in ((i, j), (i, j + 1), (i + 1, j))]
                best[i + 1, j + 1] = costs[i, j] - torch.logsumexp(-torch.stack(before), 0)
        return best[len(out), len(y)]

    case = problem(tanh_step, loss)
    segment = make_train_segment(tanh_step, loss, backend="eager")
    segment(*case.data(K))
    assert summed.call_count < 1000  # K * K cells in a few traces, and an attempt with another K
    check(segment, case, K)


def test_a_loss_over_pairs_of_steps_that_begins_with_one() -> None:
    """Of a single step it depends on no output; it is too long to be tried with another K."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = y.mean()
        for i in range(1, len(out)):
            for row in range(B * 20):
                value = value + (out[i, row % B] - out[i - 1, row % B]).square().mean()
        return value

    segment, case = make_train_segment(tanh_step, loss, backend="eager"), problem(tanh_step, loss)
    for steps in (1, 3, 2):
        check(segment, case, steps)


@pytest.mark.parametrize("symbolic", [True, False])
def test_a_loss_that_depends_on_more_outputs_for_another_length(symbolic: bool) -> None:
    """There are no gradients by an output that was not used when the reverse loop was made."""

    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        h = linear(params, x, h)
        return {"h": h, "size": h.square()}, h

    def loss(out: Tree, y: Tensor) -> Tensor:
        value = (out["h"] - y).square().mean()
        if not symbolic:
            value = value * float(len(out["h"]))
        return value + out["size"].mean() if len(out["h"]) > 70 else value

    segment = make_train_segment(step, loss, backend="eager")
    case = problem(step, loss)
    check(segment, case, 3)
    with pytest.raises(ValueError, match=r"of 71 steps it depends on out\['size'\], of 64"):
        segment(*case.data(71))


# -- states in parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float32", "empty"])
def test_a_state_joined_of_parts_of_other_dtypes(kind: str) -> None:
    def step(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, rest = state[:, :H], state[:, H:]
        h = linear(params, x_t, h) + 0.1 * rest
        if kind == "empty":
            return h, torch.cat([torch.empty(0, dtype=h.dtype), h, h], -1)
        other = h > 0.1 if kind == "bool" else (0.9 * rest + h).float()
        return h + other, torch.cat([h, other], -1)

    checked(problem(step, state=Draw(1)(B, 2 * H)))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_parts_of_other_dtypes(transposed: bool) -> None:
    """Such as tokens, one-hot, beside the state."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        tokens = F.one_hot(x_t[:, 0].abs().long().clamp(max=2), 3)
        weight = torch.cat([params["w"], params["table"]])[: 3 + H]
        weight = weight.T.contiguous().T if transposed else weight
        h = torch.tanh(torch.cat([tokens, h], -1) @ weight)
        return h, h

    checked(problem(step))


# -- pending conjugations -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_conjugated_tensors(backend: str, kernels: None) -> None:
    """In torch a conjugate is a flag on the same memory."""
    captured = Draw(3).complex(B, H).conj()

    def step(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        pole = torch.exp(torch.complex(-params["w"][0].exp(), params["w"][1]))
        state = state * pole + x_t + 0.1 * captured
        return state.abs() + x_t.real + (state.conj() * x_t).imag, state

    draw = Draw(0)
    case = problem(step, state=draw.complex(B, H).conj())
    x = draw.complex(K, B, H).conj()
    segment = make_train_segment(step, mse, backend=backend)
    params, state, _, y = case.data(K)
    expected = reference_segment(step, mse, params, state, x, y)
    for _ in range(2):  # the second call is recalled
        assert_close(segment(params, state, x, y), expected)
    captured.mul_(2)
    expected = reference_segment(step, mse, params, state, x, y)
    assert_close(segment(params, state, x, y), expected)


def test_the_default_dtype_may_change() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t + h @ params["w"] * torch.full((), 1 / 3).to(h.dtype))
        return h, h

    case = problem(step)
    segment = checked(case)
    torch.set_default_dtype(torch.float64)
    try:
        check(segment, case, K)
    finally:
        torch.set_default_dtype(torch.float32)
