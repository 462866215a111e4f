"""What users write inside a loss, operation by operation, against the oracle."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, MultivariateNormal, Normal
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ftbptt import make_train_segment, reference_segment

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..cells.problems import H
from ..oracle import assert_close, check
from .one_operation import check_both, problem_with


def plain(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ w + x)


def _covariance(out: Tensor) -> Tensor:
    rows = out.flatten(0, 1)
    return rows.T @ rows / len(rows) + torch.eye(H).to(rows)


PROTOTYPE = torch.arange(1, H + 1).double()

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
    "cosine similarity to a constant": lambda out, y: (
        1 - F.cosine_similarity(out, PROTOTYPE, -1).mean() + F.cosine_similarity(0 * out, y).mean()
    ),
    "parts of an empty axis": lambda out, y: (
        (torch.cat([*out[..., :0].chunk(2, -1), *out[..., :0].split(3, -1), out], -1) - y)
        .abs()
        .mean()
    ),
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


def names(quick: Collection[str] = LOSSES) -> list[Any]:
    """Those of all losses, marked slow but for the quick ones."""
    told_of_zeros = "ignore:ftbptt. the loss of step has no gradient"
    marks = {"without out": [pytest.mark.filterwarnings(told_of_zeros)]}
    return [
        pytest.param(name, marks=marks.get(name, []) + [pytest.mark.slow] * (name not in quick))
        for name in LOSSES
    ]


@pytest.mark.parametrize("name", names())
def test_in_the_loss(name: str) -> None:
    check_both(problem_with(plain, loss=LOSSES[name]))


@pytest.mark.parametrize(
    "in_dims", slow_but([None], [None, (None, 0, 1, 1)]), ids=["vmap", "in_dims"]
)
@pytest.mark.parametrize(
    "name",
    names(
        {"a Python loop", "weights by step", "reshaped by K", "linear", "in part detached",
         "without y", "gathered", "classes drawn", "one of the classes", "Gaussian", "time last"}
    ),
)  # fmt: skip
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


MEANS = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "binary": lambda out, y: F.binary_cross_entropy(out.sigmoid(), y.sigmoid()),
    "logits": lambda out, y: F.binary_cross_entropy_with_logits(out, y.sigmoid()),
    "divergence": lambda out, y: F.kl_div(out, y.exp(), reduction="batchmean"),
    "classes": lambda out, y: F.cross_entropy(torch.stack([out, -out], 1), (y > 0).long()),
    "soft margin": lambda out, y: F.soft_margin_loss(out, y.sign()),
}


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "eager") for name in MEANS), ("huber", "auto")]
)
def test_a_mean_over_nothing(name: str, backend: str) -> None:
    """A segment in which nothing has a target: NaN, as in the loop, and no division by zero."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        targets = y[..., 0].flatten()
        at = (~targets.isnan()).nonzero().squeeze(1)
        return MEANS[name](out[..., 0].flatten().index_select(0, at), targets.index_select(0, at))

    given = problem("elman", dtype=torch.float32)
    segment = make_train_segment(given.step, loss, backend=backend)
    params, state, x, y = given.data(5)
    for targets in (y, torch.where(y > 0, y, torch.nan), y * torch.nan):
        found = segment(params, state, x, targets)
        expected = reference_segment(given.step, loss, params, state, x, targets)
        torch.testing.assert_close(tuple(found), tuple(expected), equal_nan=True)
    assert found.loss.isnan()
