"""What users write inside a step and a loss, operation by operation, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, MultivariateNormal, Normal
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ftbptt import make_train_segment, reference_segment

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import assert_close, check

Tree = Any


def problem_with(after: Any, out: Any = None, loss: Any = mse) -> Problem:
    """``after(w, x, h)`` is the next state, ``out(w, x, h)`` the output (default: the state)."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        new = after(params["w"], x_t, h)
        return (new if out is None else out(params["w"], x_t, new)), new

    draw = Draw(0)
    params, state = {"w": draw(H, H)}, draw(B, H)
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(B, H), loss)


def check_both(made: Problem, backend: str = "eager") -> None:
    segment = make_train_segment(made.step, made.loss, backend=backend)
    for steps in (4, 1):
        check(segment, made, steps)


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


def plain(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ w + x)


def _covariance(out: Tensor) -> Tensor:
    rows = out.flatten(0, 1)
    return rows.T @ rows / len(rows) + torch.eye(H).to(rows)


LOSSES = {
    "last step": lambda out, y: (out[-1] - y[-1]).square().mean(),
    "a Python loop": lambda out, y: sum(
        (out[t] - y[t]).square().mean() * (t + 1) for t in range(out.shape[0])
    ),
    "weights by step": lambda out, y: (
        (out - y).square().mean((1, 2)) * torch.arange(out.shape[0])
    ).sum(),
    "discounted": lambda out, y: (
        (out - y).square().mean((1, 2)) @ (0.9 ** torch.arange(len(out))).to(out)
    ),
    "reshaped by K": lambda out, y: (
        (out.reshape(out.shape[0] * out.shape[1], -1) - y.view(-1, H)).square().mean()
    ),
    "divided by K": lambda out, y: (out - y).square().sum() / len(out),
    "mixes the steps": lambda out, y: (out.cumsum(0) - y).square().mean(),
    "differences": lambda out, y: (out.diff(dim=0, prepend=out[:1]) - y).square().mean(),
    "mean of the steps": lambda out, y: (out.mean(0) - y.mean(0)).square().mean(),
    "classes": lambda out, y: F.cross_entropy(
        out.flatten(0, 1), y[..., 0].flatten().abs().long().clamp(max=3)
    ),
    "classes with options": lambda out, y: F.cross_entropy(
        out.movedim(-1, 1),
        y[..., 0].abs().long().clamp(max=3),
        torch.arange(1, H + 1).to(out),
        ignore_index=1,
        label_smoothing=0.1,
    ),
    "soft classes": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(0, 1).softmax(-1)),
    "gathered": lambda out, y: -out.log_softmax(-1).gather(-1, y.argsort(-1)[..., :1]).mean(),
    "cosine similarity": lambda out, y: 1 - F.cosine_similarity(out, y, dim=-1).mean(),
    "spectrum": lambda out, y: (torch.fft.rfft(out) - torch.fft.rfft(y)).abs().mean(),
    "divergence": lambda out, y: F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="sum"),
    "huber and l1": lambda out, y: F.smooth_l1_loss(out, y) + F.l1_loss(out, y),
    "without y": lambda out, y: out.var(),
    # The gradient is the same for all sequences, and has no axis of theirs.
    "linear": lambda out, y: out[-1].mean(),
    "in part detached": lambda out, y: F.mse_loss(out.detach(), y) + 2 * out.sum(),
    "density": lambda out, y: -Normal(out, 1.0).log_prob(y).mean(),
    "classes drawn": lambda out, y: -Categorical(logits=out).log_prob(y.argmax(-1)).mean(),
    "without out": lambda out, y: y.mean(),
    "one of the classes": lambda out, y: (
        (out.softmax(-1) - F.one_hot(y.argmax(-1), H)).square().sum(-1).mean()
    ),
    "Cholesky": lambda out, y: (
        torch.linalg.cholesky(_covariance(out)).diagonal().log().sum() + y.mean()
    ),
    "Gaussian": lambda out, y: (
        -MultivariateNormal(out.mean((0, 1)), _covariance(out)).log_prob(y).mean()
    ),
    "solved": lambda out, y: (
        torch.linalg.solve(_covariance(out), y.flatten(0, 1).T).square().mean()
    ),
    "time last": lambda out, y: F.mse_loss(out.permute(1, 2, 0), y.permute(1, 2, 0)),
}
told_of_zeros = pytest.mark.filterwarnings("ignore:ftbptt. the loss of step has no gradient")
LOSS_NAMES = [
    pytest.param(name, marks=told_of_zeros) if name == "without out" else name for name in LOSSES
]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_in_the_loss(name: str) -> None:
    check_both(problem_with(plain, loss=LOSSES[name]))


@pytest.mark.parametrize(
    "in_dims", slow_but([None], [None, (None, 0, 1, 1)]), ids=["vmap", "in_dims"]
)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_in_the_loss_of_many_sequences(name: str, in_dims: Any) -> None:
    made = problem_with(plain, loss=LOSSES[name])
    params, *rest = made.data(4)
    given = [torch.stack([leaf, -leaf]) for leaf in rest]
    segment = make_train_segment(made.step, made.loss, backend="eager", in_dims=in_dims)
    alone = make_train_segment(made.step, made.loss, backend="eager")
    own = [alone(params, *pair) for pair in zip(*given, strict=True)]
    if in_dims is None:
        found = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))(params, *given)
        assert_close(found.loss, torch.stack([one.loss for one in own]))
        assert_close(found.grads["w"], torch.stack([one.grads["w"] for one in own]))
    else:
        state, x, y = given
        found = segment(params, state, x.movedim(0, 1), y.movedim(0, 1))
        assert_close(found.loss, (own[0].loss + own[1].loss) / 2)
        assert_close(found.grads["w"], (own[0].grads["w"] + own[1].grads["w"]) / 2)


ONE_PROGRAM = ["classes", "classes with options", "soft classes", "gathered", "time last"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_dims", [None, (None, 0, 1, 1)], ids=["vmap", "in_dims"])
@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_one_program_of_the_loss_for_every_k(name: str, in_dims: Any, backend: str) -> None:
    made = problem_with(plain, loss=LOSSES[name])
    segment = make_train_segment(made.step, made.loss, backend=backend, in_dims=in_dims)
    call = segment if in_dims else torch.func.vmap(segment, (None, 0, 1, 1))
    counts = []
    for steps in (5, 3, 8):
        params, *rest = made.data(steps)
        state, x, y = (torch.stack([leaf, -leaf], min(i, 1)) for i, leaf in enumerate(rest))
        assert call(params, state, x, y).loss.isfinite().all()
        counts.append(segment.compile_count)
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a Python loop", "weights by step", "reshaped by K"])
def test_in_the_loss_compiled(name: str) -> None:
    check_both(problem_with(plain, loss=LOSSES[name]), "compile")


def test_a_loss_written_for_one_k_is_traced_again_for_another_and_the_step_is_not() -> None:
    made = problem_with(plain, loss=LOSSES["a Python loop"])
    segment = make_train_segment(made.step, made.loss, backend="eager")
    for steps in (4, 2, 4, 3):
        check(segment, made, steps)
    assert segment.trace_count == 1


LOOKS_AT_ONE_STEP = {
    "a branch": lambda out, y: (
        F.mse_loss(out[1:], out[:-1] + y[1:]) if out.shape[0] > 1 else F.mse_loss(out, y)
    ),
    "a constant": lambda out, y: (
        F.mse_loss(out, y) * torch.tensor(2.0 if out.shape[0] > 1 else 3.0, dtype=y.dtype)
    ),
    "squeezed": lambda out, y: out.squeeze(0).softmax(0).square().mean(),
    "divided by K - 1": lambda out, y: (
        F.mse_loss(out, y) / (out.shape[0] - 1 if out.shape[0] > 1 else 1)
    ),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("context", [0, 1])
@pytest.mark.parametrize("name", LOOKS_AT_ONE_STEP)
def test_a_loss_that_looks_whether_there_is_one_step(name: str, context: int, mapped: bool) -> None:
    made = problem_with(plain, loss=LOOKS_AT_ONE_STEP[name])
    segment = make_train_segment(made.step, made.loss, backend="eager", context=context)
    for steps in (5, 1, 2, 1):
        given = made.data(steps + context)
        wanted = reference_segment(made.step, made.loss, *given, context=context)
        if mapped:
            given = (given[0], *(leaf.unsqueeze(0) for leaf in given[1:]))
            found = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))(*given)
            found = tree_map(lambda leaf: leaf[0], found)
        else:
            found = segment(*given)
        assert_close(found, wanted)


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_a_single_step_has_the_graphs_of_more_where_they_are_the_same(name: str) -> None:
    made = problem(name)
    segment = make_train_segment(
        made.step, made.loss, backend="eager", time_dim=made.time_dim or None
    )
    plan, _ = segment.plan(*made.data(3))
    assert plan.loss.graphs_for(1).key is None


# What a readout often ends with: batched over the steps, so torch must have a rule for vmap.
READOUTS = {
    "softmax": lambda o: F.softmax(o, -1),
    "log_softmax": lambda o: F.log_softmax(o, -1),
    "attention": lambda o: F.scaled_dot_product_attention(o, o + 1, o - 1),
    "layer norm": lambda o: F.layer_norm(o, o.shape[-1:]),
    "gelu": F.gelu,
    "lerp by unit": lambda o: torch.lerp(o, o.sin(), o[0, 0]),
    "addcmul by unit": lambda o: torch.addcmul(o[0, 0], o, o[0, 0], value=0.5),
    "addcdiv by unit": lambda o: torch.addcdiv(o, o[0, 0], 2 + o.sin(), value=0.5),
    "average pooling": lambda o: F.avg_pool1d(o, 3, 1, 1),
    "max pooling": lambda o: F.max_pool1d(o, 3, 1, 1),
    "resizing": lambda o: F.interpolate(F.interpolate(o, 5), H, mode="linear"),
    "padding": lambda o: F.pad(o, (1, 2), mode="replicate"),
    "sampling": lambda o: F.grid_sample(
        o.unsqueeze(2), _grid(o).view(1, 1, 5, 2).expand(B, -1, -1, -1), align_corners=False
    ).squeeze(2),
    "spectrum": lambda o: torch.fft.rfft(o).abs(),
    "bilinear": lambda o: F.bilinear(o, o.sin(), o[0, 0].outer(o[0, 0]).expand(2, H, H)),
    "solve a vector": lambda o: torch.linalg.solve(_definite(o), o.squeeze(1)).unsqueeze(1),
    "solve by one": lambda o: torch.linalg.solve(_definite(o)[0], o.mT).mT,
    "triangular": lambda o: torch.linalg.solve_triangular(_definite(o), o.mT, upper=True).mT,
}  # fmt: skip


# By the same rules as some of those.
MORE_READOUTS = {
    "sampling up to the corners": lambda o: F.grid_sample(
        o.unsqueeze(2), _grid(o).view(1, 1, 5, 2).expand(B, -1, -1, -1), align_corners=True
    ).squeeze(2),
    "adaptive pooling": lambda o: F.adaptive_max_pool1d(o, 3) + F.adaptive_avg_pool1d(o, 3),
    "solve by row": lambda o: torch.linalg.solve(_definite(o), o.mT).mT,
    "solve one": lambda o: torch.linalg.solve(_definite(o), o[0].T).mT,
    "Cholesky": lambda o: torch.linalg.cholesky(_definite(o))[:, :1],
}


def _grid(o: Tensor) -> Tensor:
    return torch.linspace(-0.9, 0.9, 10, dtype=o.dtype)


def _definite(o: Tensor) -> Tensor:
    return torch.eye(H).to(o) + o * o.mT


# Over the steps, of which a loss sees all.
OVER_TIME = {
    "spectrum": lambda out: torch.fft.rfft(out, dim=0).abs(),
    "short spectra": lambda out: torch.stft(
        out[..., 0].T, 4, return_complex=True, window=torch.ones(4).to(out)
    ).abs(),
    "coarser": lambda out: F.avg_pool1d(out.permute(1, 2, 0), 2),
    "finer": lambda out: F.interpolate(out.permute(1, 2, 0), scale_factor=2, mode="linear"),
}


def with_readouts(readouts: dict[str, Any]) -> Problem:
    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.tanh(x_t @ params["w"] + h)
        return {name: of(h.view(B, 1, H)) for name, of in readouts.items()}, h

    def loss(out: Any, y: Tensor) -> Tensor:
        errors = sum((o - y.mean()).square().mean() for o in out.values())
        last = list(out.values())[-1].flatten(2)
        return errors + sum(of(last).square().mean() for of in OVER_TIME.values())

    draw = Draw(1)
    params, state = {"w": draw(H, H)}, draw(B, H)
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(B, H), loss)


def test_readouts() -> None:
    made = with_readouts(MORE_READOUTS)
    check(make_train_segment(made.step, made.loss, backend="eager"), made, 4)


@pytest.mark.slow
def test_readouts_run_compiled_for_every_length() -> None:
    made = with_readouts(READOUTS)
    segment = make_train_segment(made.step, made.loss, backend="fused")
    check(segment, made, 4)
    compiled = segment.compile_count
    check(segment, made, 9)
    assert segment.compile_count == compiled


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "compile"]))
def test_gradient_of_a_maximum(backend: str) -> None:
    """Inductor computed what is compared with its maximum in another way than the maximum."""

    def out(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
        value = F.gelu(h @ w)
        return value - value.amax(-1, keepdim=True)

    made = problem_with(lambda w, x, h: torch.tanh(h @ w + x), out)
    check(make_train_segment(made.step, made.loss, backend=backend), made, 40)


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
