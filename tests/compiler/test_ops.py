"""What users write inside a step, operation by operation, against the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ftbptt import make_train_segment, reference_segment

from ..cells import slow_but
from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import assert_close, check, check_low_precision
from .one_operation import check_both, problem_with

Tree = Any


def written_into(z: Tensor) -> Tensor:
    """In place, which autograd knows of a complex tensor, but not once it is functional."""
    written = torch.zeros_like(z)
    written[:, :3] = z[:, :3] * z[:, 1:4]
    written[:, -1] = z[:, 0] * 0.5
    return written


def joined_channels(x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([x[:, None], h[:, None], x[:, None]], 1)


def floored(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < 0] = 0.1
    return x


# Each is a recurrence of its own: (w, x, h) -> next h.
STEPS = {
    "sgn": lambda w, x, h: torch.tanh(torch.sgn(h @ w + x) * h.abs() + x @ w),
    "only_sgn": lambda w, x, h: torch.sgn(h @ w + x) * 1.0,  # its gradient has no memory
    "a conjugate weight": lambda w, x, h: torch.tanh(
        (torch.complex(h, x) @ torch.complex(w, w.T).conj()).imag
    ),
    "a number where a mask is": lambda w, x, h: torch.tanh(floored(x @ w) + floored(h) @ w),
    "max pooling": lambda w, x, h: torch.tanh(
        F.max_pool1d((x @ w)[None], 3, 1, 1)[0] + F.max_pool1d(h[None], 3, 1, 1)[0]
    ),
    "gather and scatter": lambda w, x, h: torch.tanh(
        h.gather(1, x.argsort(-1)) @ w + h.scatter_add(1, x.argsort(-1), x)
    ),
    "index by a list": lambda w, x, h: torch.tanh(h[:, [0, 2, 1, 3, 4, 6, 5]] @ w + x),
    "index_add": lambda w, x, h: torch.tanh(h.index_add(1, torch.tensor([0, 1]), x[:, :2]) @ w),
    "topk and sort": lambda w, x, h: torch.tanh(
        torch.cat([h.topk(3).values, h.sort(-1).values[:, :4]], -1) @ w + x
    ),
    "one_hot": lambda w, x, h: torch.tanh(F.one_hot(x.argmax(-1), H).to(x.dtype) @ w + h),
    "max and logsumexp": lambda w, x, h: torch.tanh(
        h.max(-1, keepdim=True).values + (h @ w).logsumexp(-1, keepdim=True) + x
    ),
    "prod and cumsum": lambda w, x, h: torch.tanh(
        h.prod(-1, keepdim=True) + (h @ w).cumsum(-1) / H + x
    ),
    "std over rows": lambda w, x, h: torch.tanh((h - h.mean(0)) / (h.std(0) + 0.1) @ w + x),
    "distances": lambda w, x, h: torch.tanh(
        torch.cdist(h, w) + torch.cdist(x, w, 1.0) + 0.1 * torch.cdist(h, h).sum(-1, keepdim=True)
    ),
    "powers": lambda w, x, h: sum(
        (1.5 + torch.tanh(h @ w + x)) ** n * 0.05 for n in (-2, -1, -0.5, 0.5, 1, 2, 3, 4)
    ),
    "power and norm": lambda w, x, h: (h.abs() + 0.1).pow(1.5) @ w / (1 + h.norm() + x.exp()),
    "glu and softplus": lambda w, x, h: F.glu(torch.cat([h + x, F.softplus(h @ w)], -1)),
    "bilinear": lambda w, x, h: torch.tanh(
        torch.einsum("bi,ij,bj->b", h, w, x)[:, None] * 0.3 + h + x
    ),
    "outer and flatten": lambda w, x, h: torch.tanh(
        (h[:, :, None] * x[:, None, :]).flatten(1) @ w.repeat(H, 1)
    ),
    "addmv of what does not count": lambda w, x, h: torch.tanh(
        x + torch.addmv(torch.full_like(x[0], math.nan), w, h[0], beta=0)
    ),
    "addcmul and addmm": lambda w, x, h: torch.tanh(
        torch.addcmul(torch.addmm(x, h, w, beta=0.5, alpha=2), h, x, value=0.3)
    ),
    "masked_fill": lambda w, x, h: torch.tanh((h @ w).masked_fill(x > 0, 0.2) + x),
    "roll and flip": lambda w, x, h: torch.tanh(h.roll(1, -1) @ w + h.flip(-1) + x),
    "cat of slices": lambda w, x, h: torch.tanh(torch.cat([x[:, :3], h[:, 3:]], -1) @ w),
    "cat and linear": lambda w, x, h: torch.tanh(
        F.linear(torch.cat([x[:, :2], h[:, 3:], x[:, 4:5]], -1), w, w[0])
        + torch.addmm(h, torch.cat([h[:, :4], x[:, 4:]], -1), w.T)
    ),
    "cat of vectors": lambda w, x, h: torch.tanh(
        (w @ torch.cat([x[0, :3], h[0, 3:]])) + torch.cat([h[1, 3:], x[1, :3]]) @ w + h
    ),
    "cat and a weight that changes": lambda w, x, h: torch.tanh(
        torch.cat([x[:, :3], h[:, 3:]], -1) @ (w * h[0])
        + torch.cat([x[:, :3], h[:, 3:]], -1) @ (w * x[0])
    ),
    "stack and sum": lambda w, x, h: torch.tanh(torch.stack([x, h, h @ w]).sum(0)),
    "attention": lambda w, x, h: torch.tanh(
        F.scaled_dot_product_attention((h @ w).view(B, 1, H), h.view(B, 1, H), x.view(B, 1, H))
        .squeeze(1)
        .add(h)
    ),
    "matrix_exp": lambda w, x, h: torch.tanh(h @ torch.linalg.matrix_exp(w - w.T) + x),
    "solve": lambda w, x, h: torch.linalg.solve(w @ w.T + torch.eye(H).to(w), (h + x).T).T / H,
    "triangles": lambda w, x, h: torch.tanh(h @ (w.tril() + torch.diag(w[0])) + x),
    "diagonals": lambda w, x, h: (
        torch.tanh(
            (h[:, :, None] * x[:, None] + torch.diag(w[0]).diagonal_scatter(w[1, 1:], 1)) @ w
        ).diagonal(1, 1, 2)
        @ w[1:]
        + (h[:, :, None] * w).diagonal(0, 1, 2)
    ),
    "normalised": lambda w, x, h: torch.tanh(h @ F.normalize(w, dim=0) + x),
    "an inner loop": lambda w, x, h: torch.tanh(torch.tanh(torch.tanh(h @ w + x) @ w + x) @ w),
    "complex exponential": lambda w, x, h: torch.tanh(torch.complex(h @ w, x).exp().real / 2),
    "part of a complex": lambda w, x, h: torch.tanh(written_into(torch.complex(h @ w, x)).real),
    "view as complex": lambda w, x, h: torch.tanh(
        torch.view_as_real(torch.view_as_complex(torch.stack([h @ w, x], -1)) ** 2)[..., 0]
    ),
    "convolutions": lambda w, x, h: torch.tanh(
        F.conv1d(h[:, None], w[:2, None, :3], w[:2, 3], padding=1).sum(1)
        + F.conv_transpose1d(x[:, None], w[None, :2, :3], padding=1).sum(1)
    ),
    "convolutions of joined channels": lambda w, x, h: torch.tanh(  # x, h, x: three parts
        F.conv1d(joined_channels(x, h), w[:4, :3, None], w[0, :4]).sum(1)
        + F.conv_transpose1d(joined_channels(x, h), w[:3, None, :3], padding=1).sum(1)
        + F.conv1d(joined_channels(x, h), w[:3, :1, None], groups=3).sum(1)
        + F.conv1d(joined_channels(x, h), w[:1, :3, None], h[0, :1]).sum(1)
    ),
    "convolutions by changing kernels": lambda w, x, h: torch.tanh(
        F.conv1d(h[None], (w[:B, :3] * x[:, :3])[:, None], groups=B, padding=1)[0]
        + F.conv1d(x[None], (w[:B, :3] * x[:, :3])[:, None], w[0, :B], groups=B, padding=1)[0]
    ),
    "Fourier transform": lambda w, x, h: torch.tanh(
        torch.fft.irfft(torch.fft.rfft(x @ w) * torch.fft.rfft(h), n=H) / H
        + torch.fft.ifft(torch.fft.fft(h, norm="ortho") * w[0]).real
    ),
    "Fourier transform of a parameter": lambda w, x, h: torch.tanh(
        torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(w)[0], n=H) / H + x
    ),
    "padded": lambda w, x, h: torch.tanh(F.pad(x @ w, (1, 0))[:, :H] + F.pad(h, (0, 1))[:, 1:] @ w),
    "checkpoint": lambda w, x, h: torch.utils.checkpoint.checkpoint(
        lambda a, b: torch.tanh(a @ w + b), h, x, use_reentrant=False
    ),
    "a constant made inside": lambda w, x, h: torch.tanh(
        h @ w + x + torch.linspace(0, 1, H, dtype=x.dtype).exp() * torch.tensor(0.5).to(x)
    ),
}


# Of a sign, which has none.
@pytest.mark.filterwarnings("ignore:ftbptt. the loss of step has no gradient with respect")
@pytest.mark.parametrize("name", STEPS)
def test_in_the_step(name: str) -> None:
    check_both(problem_with(STEPS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gather and scatter",
        "solve",
        "index_add",
        "attention",
        "convolutions",
        "convolutions of joined channels",
        "prod and cumsum",
        "cat and linear",
        "diagonals",
    ],
)
def test_in_the_step_compiled(name: str) -> None:
    check_both(problem_with(STEPS[name]), "compile")


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "compile"]))
def test_gradient_of_a_maximum(backend: str) -> None:
    """Inductor computed what is compared with its maximum in another way than the maximum."""

    def out(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        value = F.gelu(h @ w)
        return value - value.amax(-1, keepdim=True)

    made = problem_with(lambda w, x, h: torch.tanh(h @ w + x), out)
    check(make_train_segment(made.step, made.loss, backend=backend), made, 40)


@pytest.mark.parametrize("backend", ["fused", "compile"])
@pytest.mark.parametrize("by_the_step", [False, True])
def test_gradient_of_a_maximum_in_16_bits(backend: str, by_the_step: bool) -> None:
    """What it is compared with is not computed once more, from numbers that were rounded since."""

    def step(w: Tensor, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        value = h * w[0] + x * w[1]
        # The gradient of the first compares nothing.
        maximum = value.max(-1, keepdim=True)[0] if by_the_step else value.amax(-1, keepdim=True)
        h = torch.tanh(value) * 0.5 + maximum * w[2]
        return torch.where(value >= maximum, value * w[2], x) if by_the_step else h, h

    draw, units = Draw(0), 9
    data = draw.sequence(B, units), draw.sequence(B, units)
    made = Problem(step, draw(3, units), draw(B, units), *data, mse).to(torch.bfloat16)
    check_low_precision(make_train_segment(step, mse, backend=backend), made, 6, 9)


def test_factors_of_a_step_that_all_rows_are_solved_with() -> None:
    """For which vmap's own rule gives other numbers."""
    lu, pivots = torch.linalg.lu_factor(Draw(1)(H, H) + torch.eye(H).double())

    def out(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        factors = lu * (1.5 + torch.tanh(x.mean()))
        return torch.linalg.lu_solve(factors, pivots, (h @ w).unsqueeze(-1)).squeeze(-1)

    check_both(problem_with(lambda w, x, h: torch.tanh(x + h @ w), out))


@pytest.mark.parametrize("models", [False, True])
def test_solving_with_fewer_axes_under_vmap(models: bool) -> None:
    """For which vmap's own rule gives other numbers, or an error."""

    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        w = 0.1 * params["w"] + 3 * torch.eye(H).to(x)
        h = torch.tanh(h @ params["w"] + x)
        by_row = w + 0.1 * h[:, None]
        solved = [
            torch.linalg.solve(torch.stack([w, 2 * w]), h.T),
            torch.linalg.solve(w, torch.stack([h, x, h - x]), left=False),
            torch.linalg.solve(by_row, w),
            torch.linalg.solve(by_row, h),
            torch.linalg.solve(w, h[0]),
        ]
        return torch.cat([value.flatten() for value in solved]), h

    def loss(out: Tensor, y: Any) -> Tensor:
        return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().mean()

    draw = Draw(0)
    own = [({"w": draw(H, H)}, draw(B, H), draw.sequence(B, H)(3), None) for _ in range(2)]
    if not models:
        own[1] = (own[0][0], *own[1][1:])
    expected = [reference_segment(step, loss, *given) for given in own]
    segment = make_train_segment(step, loss, backend="eager")
    params, states, xs, _ = zip(*own, strict=True)
    given = torch.stack([p["w"] for p in params]) if models else params[0]["w"]
    found = torch.func.vmap(
        lambda w, state, x: segment({"w": w}, state, x, None), (0 if models else None, 0, 0)
    )(given, torch.stack(states), torch.stack(xs))
    for i, one in enumerate(expected):
        assert_close(found.out[i], one.out)
        assert_close(found.grads["w"][i], one.grads["w"])


def test_a_solution_that_is_not_there() -> None:
    """Where the loop raises an error: NaN also for one matrix and many right sides."""

    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.solve(params["w"] * x, torch.stack([h, 2 * h])), h + 1

    data = {"w": torch.eye(H)}, torch.ones(H, 2), torch.tensor([1.0, 0.0, 2.0]), None
    out = make_train_segment(step, lambda out, y: out.mean(), backend="eager")(*data).out
    assert out.isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert not out[::2].isnan().any()


def channels_last(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolved in that layout, of which a view is a matrix with a row for each pixel."""
    layout = torch.channels_last
    image = F.conv2d(x.view(B, 1, 1, H).to(memory_format=layout), kernel).clone(
        memory_format=layout
    )
    return image.permute(0, 2, 3, 1).contiguous().view(B, H)


@pytest.mark.parametrize("mapped", [False, True])
def test_layouts_of_images(mapped: bool) -> None:
    """They are for values of four axes, and of all steps or sequences there is one more."""

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        kernel = w[:1, :1, None, None]
        return torch.tanh(channels_last(h, kernel) + channels_last(x, kernel))

    made = problem_with(after, lambda w, x, h: channels_last(h, w[1:2, :1, None, None]))
    if not mapped:
        check_both(made)
        return
    params, *data = made.data(4)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    found = torch.func.vmap(segment, (None, 0, 0, 0))(params, *(leaf[None] for leaf in data))
    expected = reference_segment(made.step, made.loss, params, *data)
    assert_close(found.grads["w"][0], expected.grads["w"])


# By a single number, which most take for a vector of one.
BY_NUMBER = {
    "index_select": lambda x, i: x.index_select(-1, i),
    "index_add": lambda x, i: x.index_add(-1, i, x[..., :1]),
    "take": lambda x, i: x.take(i),
    "gather": lambda x, i: x[0].gather(0, i),
    "scatter": lambda x, i: x[0].scatter(-1, i, x[1, 0]),
    "scatter_reduce": lambda x, i: x[0].scatter_reduce(0, i, x[1, 0], "amax"),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_an_index_that_is_a_number(name: str) -> None:
    operation = BY_NUMBER[name]

    def after(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        place = x.argmax() % H
        return torch.tanh(h @ w + operation(h @ w, place).sum() + operation(x * w[0], place).sum())

    check_both(problem_with(after, lambda w, x, h: h + operation(h * w[0], torch.tensor(2)).sum()))


@pytest.mark.slow
def test_weighted_keys_and_values() -> None:
    """RWKV. Inductor let what reads the result of a loop run before the loop, fused with others."""

    def step(params: Any, x_t: Tensor, state: tuple[Tensor, ...]) -> Any:
        numerator, denominator, largest = state
        key, value = x_t @ params["key"], x_t @ params["value"]

        def average(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            new = torch.maximum(a, b)
            old_weight, weight = torch.exp(a - new), torch.exp(b - new)
            return old_weight * numerator + weight * value, old_weight * denominator + weight, new

        above, below, _ = average(largest, params["first"] + key)
        decayed = largest - torch.exp(params["decay"])
        return (above / below) @ params["out"], average(decayed, key)

    draw = Draw(1)
    params = {
        "key": draw(H, 5), "value": draw(H, 5), "first": draw(5), "decay": draw(5),
        "out": draw(5, H),
    }  # fmt: skip
    zeros = draw(B, 5) * 0
    made = Problem(
        step, params, (zeros, zeros, zeros - 9), draw.sequence(B, H), draw.sequence(B, H), mse
    )
    segment = make_train_segment(made.step, made.loss, backend="compile")
    check(segment, made, 5)
    check(segment, made, 2)


def test_an_operation_that_fixes_the_number_of_steps() -> None:
    def out(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        image = (h @ w).view(B, 1, 1, H)
        return F.interpolate(image, (1, H), mode="bilinear", antialias=True).view(B, H)

    made = problem_with(lambda w, x, h: torch.tanh(h @ w + x), out)
    with pytest.raises(RuntimeError, match="an operation fixed the number of steps to 64 while it"):
        make_train_segment(made.step, made.loss, backend="compile")(*made.data(4))


@pytest.mark.parametrize("backend", ["eager", pytest.param("fused", marks=pytest.mark.slow)])
def test_a_factorization_that_fails(backend: str) -> None:
    """Where the loop raises an error, the result is NaN in its row; it was finite and wrong."""

    def step(params: Tree, x_t: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        p = p + params["q"].diag() - x_t[:, None, None] * torch.eye(3, dtype=p.dtype)
        return torch.linalg.cholesky(p), p

    params = {"q": torch.ones(3, dtype=torch.float64)}
    state = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    x = torch.tensor([[0.5, 0.5], [0.5, 9.0], [0.5, 0.5]], dtype=torch.float64)
    segment = make_train_segment(step, lambda out, y: out.square().mean(), backend=backend)
    out = segment(params, state, x, None).out
    assert out.isnan().flatten(2).all(2).tolist() == [[False, False], [False, True], [False, True]]
    fine = params, state, x.clamp(max=0.5), None
    assert_close(segment(*fine), reference_segment(step, lambda out, y: out.square().mean(), *fine))


@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.LSTMCell, torch.nn.RNNCell])
def test_a_row_is_not_broadcast(kind: Any) -> None:
    """As torch's own cells refuse it."""
    segment = make_train_segment(kind(3, H), mse, backend="eager")
    params = dict(segment.recipe.step.module.named_parameters())
    for rows in ((1, 2), (2, 1), (3, 2)):
        x, h = torch.randn(4, rows[0], 3), torch.zeros(rows[1], H)
        words = (
            r"step: .* is given \[\d, 3\] as its input and \[\d, \d+\] as its state, which differ"
        )
        with pytest.raises(ValueError, match=words):
            segment(params, (h, h) if kind is torch.nn.LSTMCell else h, x, torch.zeros(4, 2, H))


def test_points_in_another_dtype_than_the_data() -> None:
    """As the loop rounds them: the edges of a value's bins in float32, of logits in float64."""

    def out(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        return h[..., None] * torch.linspace(-20, 20, 255).to(h) + torch.logspace(-1, 2, 255).to(h)

    def loss(out: Tensor, y: Any) -> Tensor:
        over_time = torch.linspace(0, 1, len(out)).to(out)  # of a K that is a symbol
        return (out.square().mean((1, 2)) @ torch.linspace(-20, 20, 255).to(out)) @ over_time

    check_both(problem_with(lambda w, x, h: torch.tanh(h @ w + x), out, loss))
