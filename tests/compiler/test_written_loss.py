"""Losses that cannot be traced: they run as they are written, between the compiled loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import ftbptt
from ftbptt import make_train_segment, reference_segment
from ftbptt.training import train_stream

from ..oracle import assert_close, unchanged

K, B, D, H, LABELS = 7, 3, 2, 4, 5
Tree = Any


class Speller(nn.Module):
    """An LSTM with a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = nn.LSTMCell(D, H), nn.Linear(H, LABELS)

    def forward(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, c = self.cell(x_t, state)
        return self.readout(h), (h, c)


def ctc(out: Tensor, y: Tensor) -> Tensor:
    """Targets of one to three labels."""
    lengths = torch.arange(B) % 3 + 1
    steps = torch.full((B,), len(out))
    return F.ctc_loss(out.log_softmax(-1), y[0].long(), steps, lengths, reduction="sum")


def branch(out: Tensor, y: Tensor) -> Tensor:
    """A loss for each step and row."""
    distance = (out - y[..., :1]).square().mean(-1)
    return distance if float(y.sum()) > 0 else 2 * distance


def numpy_scale(out: Tensor, y: Tensor) -> Tensor:
    return out[y[..., 0] > 2].square().sum() + out.detach().numpy().max() * out[0].mean()


def packed(out: Tensor, y: Tensor) -> Tensor:
    lengths = torch.tensor([len(out), len(out) - 1, 1])
    out, y = (nn.utils.rnn.pack_padded_sequence(v, lengths).data for v in (out, y[..., :1]))
    return (out - y).square().mean()


def data(steps: int = K, *axes: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    params = {name: p.detach() for name, p in MODEL.named_parameters()}
    state = tuple(0.3 * torch.randn(*axes, B, H).double() for _ in range(2))
    x = torch.randn(*axes, steps, B, D).double()
    return params, state, x, torch.randint(1, LABELS, (*axes, steps, B, 3)).double()


MODEL = Speller().double()
WARNING = r"loss .*(cannot be compiled|packs)(.|\n)*test_written_loss(.|\n)*\nIt runs as it is"


def made(loss: Callable[..., Tensor], **options: Any) -> ftbptt.TrainSegment:
    """Such that a loss that runs as it is written is meant."""
    return make_train_segment(
        MODEL, torch.compiler.disable(loss), **{"backend": "eager", **options}
    )


@pytest.mark.parametrize("loss", [ctc, branch, numpy_scale, packed])
def test_it_is_told_once(loss: Any) -> None:
    segment = make_train_segment(MODEL, loss, backend="eager")
    with pytest.warns(RuntimeWarning, match=WARNING):
        segment(*data())
    for steps in (K, 4, K + 2):
        given = data(steps)
        with unchanged(*given):
            found = segment(*given)
        expected = reference_segment(MODEL, loss, *given)
        assert_close(found, expected)
        assert_close(segment.evaluate(*given)[1:], expected[1:])
    assert segment.trace_count == 1


@pytest.mark.parametrize("backend", ["compile", "fused", "cudagraph"])
def test_loops_are_compiled(backend: str) -> None:
    segment = made(ctc, backend=backend)
    for steps in (K, 5):
        assert_close(segment(*data(steps)), reference_segment(MODEL, ctc, *data(steps)))
    assert segment.compile_count == 2  # forward and reverse
    assert "\nloss: as it is written, in eager torch" in str(segment.explain(*data()))


def test_options_of_a_segment() -> None:
    params, state, x, y = data()
    mask = torch.rand(K, B) > 0.3
    reset = torch.rand(K, B) > 0.7
    found = made(branch)(params, state, x, y, reset=reset, mask=mask)
    expected = reference_segment(MODEL, branch, params, state, x, y, reset=reset, mask=mask)
    assert_close(found, expected)
    found = made(branch, context=2)(params, state, x, y)
    assert_close(found, reference_segment(MODEL, branch, params, state, x, y, context=2))
    found = made(branch, time_dim=1)(params, state, x.transpose(0, 1), y.transpose(0, 1))
    assert_close(
        found._replace(out=found.out.transpose(0, 1)),
        reference_segment(MODEL, branch, params, state, x, y),
    )
    windows = made(branch, window=3)(params, state, x, y)
    traced = make_train_segment(
        MODEL, lambda out, y: (out - y[..., :1]).square().mean(), window=3, backend="eager"
    )
    assert_close(windows, traced(params, state, x, y))


@pytest.mark.parametrize("loss", [ctc, branch])
def test_under_vmap(loss: Any) -> None:
    """Also of models: each in turn."""
    N = 2
    params, state, x, y = data(K, N)
    segment = made(loss)
    expected = [
        reference_segment(MODEL, loss, params, tuple(s[i] for s in state), x[i], y[i])
        for i in range(N)
    ]
    found = vmap(segment, in_dims=(None, 0, 0, 0))(params, state, x, y)
    evaluated = vmap(segment.evaluate, in_dims=(None, 0, 0, 0))(params, state, x, y)
    for i in range(N):
        assert_close(torch.utils._pytree.tree_map(lambda leaf, i=i: leaf[i], found), expected[i])
        torch.testing.assert_close(evaluated.loss[i], expected[i].loss)
    models = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    found = vmap(segment, in_dims=(0, 0, 0, 0))(models, state, x, y)
    other = {name: 2 * p for name, p in params.items()}
    own = reference_segment(MODEL, loss, other, tuple(s[1] for s in state), x[1], y[1])
    assert_close(torch.utils._pytree.tree_map(lambda leaf: leaf[1], found), own)


def test_of_a_step_for_one_sequence() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(params["w"] @ h + x_t.sum())
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return out.square().sum() if float(y.sum()) > K else out.sum()

    w, h, x = torch.randn(H, H).double(), torch.randn(B, H).double(), torch.randn(K, B, D).double()
    y = torch.stack([torch.zeros(K), torch.ones(K) * 2, torch.ones(K)], 1).double()
    segment = make_train_segment(
        step, torch.compiler.disable(loss), in_dims=(None, 0, 1, 1), backend="eager"
    )
    found = segment({"w": w}, h, x, y)
    each = [reference_segment(step, loss, {"w": w}, h[i], x[:, i], y[:, i]) for i in range(B)]
    torch.testing.assert_close(found.loss, sum(r.loss for r in each) / B)
    torch.testing.assert_close(found.grads["w"], sum(r.grads["w"] for r in each) / B)


def test_what_it_reads_is_read_at_each_call() -> None:
    scale, calls = [1.0], []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        calls.append(len(out))
        return out.square().mean() * scale[0]

    segment = made(loss)
    first = segment(*data()).loss
    scale[0] = 3.0
    torch.testing.assert_close(segment(*data()).loss, 3 * first)
    assert (segment.trace_count, calls) == (1, [K, K])


def test_a_module_with_a_forward_that_is_not_compiled() -> None:
    class Distance(nn.Module):
        @torch.compiler.disable
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return branch(out, y)

    segment = make_train_segment(MODEL, Distance(), backend="eager")
    assert_close(segment(*data()), reference_segment(MODEL, branch, *data()))


def test_its_own_errors_are_not_those_of_a_backend() -> None:
    """Else ``auto`` would run it once more on another one."""
    calls = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        raise ArithmeticError("of the loss")

    with pytest.raises(ArithmeticError, match="of the loss"):
        made(loss, backend="auto")(*data())
    assert len(calls) == 1


def test_a_parameter_of_its_own() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    segment = made(lambda out, y: ctc(out, y) * weight)
    with pytest.raises(ValueError, match=r"loss: uses a tensor of shape \[\] that requires grad"):
        segment(*data())


def test_a_loss_without_a_gradient() -> None:
    segment = made(lambda out, y: ctc(out.detach(), y))
    with pytest.warns(RuntimeWarning, match="the loss has no gradient with respect to its outputs"):
        found = segment(*data())
    assert not any(grad.any() for grad in found.grads.values())
    segment(*data())  # it is told once


def test_a_loss_that_writes_to_what_it_is_given() -> None:
    """The caller's targets, and the outputs that are returned, stay as they are."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        out[out > 0] *= 2
        y += 1
        return (out - y[..., :1]).square().mean()

    segment, (params, state, x, y) = made(loss), data()
    expected = reference_segment(
        MODEL, lambda out, y: loss(out.clone(), y.clone()), params, state, x, y
    )
    before = y.clone()
    assert_close(segment(params, state, x, y), expected)
    assert_close(segment.evaluate(params, state, x, y)[1:], expected[1:])
    assert torch.equal(y, before)


def test_a_stream_and_what_looks_into_one() -> None:
    params, state, x, y = data(2 * K)
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    run = train_stream(
        made(branch), params, state, (x, y), optimizer, k1=K, k2=2 * K, progress=False
    )
    assert [update.position for update in run] == [K, 2 * K]
    horizon = ftbptt.gradient_horizon(made(branch), *data(), max_lag=3)
    traced = make_train_segment(
        MODEL, lambda out, y: (out - y[..., :1]).square().mean(-1), backend="eager"
    )
    expected = ftbptt.gradient_horizon(traced, *data(), max_lag=3)
    torch.testing.assert_close(horizon.mean("state[0]"), expected.mean("state[0]"))
    assert ftbptt.compare_to_reference(made(ctc), *data()).agrees


def test_autocast_and_inference_mode() -> None:
    params, state, x, y = torch.utils._pytree.tree_map(Tensor.float, data())
    model = Speller()
    dtypes = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        dtypes.append((out @ out.transpose(1, 2)).dtype)
        return out.float().square().mean()

    segment = make_train_segment(model, torch.compiler.disable(loss), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        segment(params, state, x, y)
    with torch.inference_mode():
        grads = segment(params, state, x, y).grads
    assert dtypes == [torch.bfloat16, torch.float32]
    assert any(grad.any() for grad in grads.values())


def test_a_partial() -> None:
    loss = torch.compiler.disable(functools.partial(branch))
    segment = make_train_segment(MODEL, loss, backend="eager")
    assert_close(segment(*data()), reference_segment(MODEL, branch, *data()))
