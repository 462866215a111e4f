"""torch's own dropout between the layers of an nn.LSTM, and dropout in the step of a user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, D, Draw, H, mse, named
from ..oracle import assert_close

K = 5
Tree = Any


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_between_layers(kind: type[nn.Module]) -> None:
    draw = Draw(0)
    layer = draw.module(lambda: kind(D, H, 2, dropout=0.5))
    x, y = draw(1, B, D).expand(K, B, D), draw(K, B, H)
    segment = make_train_segment(layer, mse, backend="eager")
    train = [segment(named(layer), None, x, y) for _ in range(2)]
    assert not torch.equal(train[0].out, train[1].out)
    # The first layer sees no dropout: its final state is the same in each call.
    h = [found.state[0] if kind is nn.LSTM else found.state for found in train]
    assert_close(h[0][0], h[1][0])
    assert not torch.allclose(h[0][1], h[1][1])


def test_no_dropout_in_eval_mode_and_at_zero() -> None:
    draw = Draw(0)
    x, y, state = draw(K, B, D), draw(K, B, H), (draw(2, B, H), draw(2, B, H))
    dropped = draw.module(lambda: nn.LSTM(D, H, 2, dropout=0.5)).eval()
    expected = reference_segment(dropped, mse, named(dropped), state, x, y)
    segment = make_train_segment(dropped, mse, backend="eager")
    assert_close(segment(named(dropped), state, x, y), expected)
    none = nn.LSTM(D, H, 2, dropout=0.0).double()
    none.load_state_dict(dropped.state_dict())
    segment = make_train_segment(none, mse, backend="eager")
    assert_close(segment(named(none), state, x, y), expected)


def test_train_and_eval_are_seen_at_each_call() -> None:
    """``module.eval()`` after the first segment counts: it is no part of the traced past."""
    draw = Draw(0)
    layer = draw.module(lambda: nn.LSTM(D, H, 2, dropout=0.5))
    x, y, state = draw(K, B, D), draw(K, B, H), (draw(2, B, H), draw(2, B, H))
    segment = make_train_segment(layer, mse, backend="eager")
    noisy = segment(named(layer), state, x, y)
    layer.eval()
    expected = reference_segment(layer, mse, named(layer), state, x, y)
    assert_close(segment(named(layer), state, x, y), expected)
    assert not torch.allclose(noisy.out, expected.out)
    layer.train()
    again = segment(named(layer), state, x, y)
    assert not torch.allclose(again.out, expected.out)
    assert segment.trace_count == 2


def ones_out(p: float) -> Any:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        noise = nn.functional.dropout(torch.ones_like(h), p)
        return noise * params["w"], h + noise

    return step


@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_noise_is_fresh_at_each_step_and_call(backend: str) -> None:
    k = 6
    segment = make_train_segment(ones_out(0.5), mse, backend=backend)
    arguments = {"w": torch.ones(H)}, torch.zeros(B, H), torch.zeros(k, B, H), torch.zeros(k, B, H)
    one, two = segment(*arguments), segment(*arguments)
    for found in (one, two):
        assert set(found.out.unique().tolist()) == {0.0, 2.0}
        assert not any(torch.equal(found.out[t], found.out[t + 1]) for t in range(k - 1))
        # The backward saw the same noise as the forward: d mse / d w = 2 * mean(noise^2 * w).
        expected = 2 * found.out.square().sum((0, 1)) / found.out.numel()
        torch.testing.assert_close(found.grads["w"], expected)
        torch.testing.assert_close(found.state, found.out.sum(0))
    assert not torch.equal(one.out, two.out)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_noise_is_the_same_noise(recompute: bool) -> None:
    segment = make_train_segment(ones_out(0.3), mse, backend="eager", recompute=recompute)
    data = {"w": torch.ones(H)}, torch.zeros(B, H), torch.zeros(9, B, H), torch.zeros(9, B, H)
    found = segment(*data)
    expected = 2 * found.out.square().sum((0, 1)) / found.out.numel()
    torch.testing.assert_close(found.grads["w"], expected)


def test_a_seed_repeats_a_segment() -> None:
    segment = make_train_segment(ones_out(0.5), mse, backend="eager")
    data = {"w": torch.ones(H)}, torch.zeros(B, H), torch.zeros(5, B, H), torch.zeros(5, B, H)
    segment(*data)  # the first call may draw while tracing
    torch.manual_seed(3)
    one = segment(*data)
    torch.manual_seed(3)
    assert torch.equal(segment(*data).out, one.out)


@pytest.mark.parametrize("recompute", [False, True])
def test_noise_under_a_view_that_changes_nothing_is_drawn_once(recompute: bool) -> None:
    """The reverse loop reads the state, which is a view of what the noise was added to."""

    def step(params: Tree, x: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        new = (h * params["w"] + x + torch.randn_like(x)).view(B, H)
        return (new * params["v"], new), new

    draw = Draw(0)
    params, y = {"w": draw(H), "v": draw(H)}, draw(K, B, H)
    segment = make_train_segment(
        step, lambda out, y: (out[0] - y).square().mean(), backend="eager", recompute=recompute
    )
    found = segment(params, draw(B, H), draw(K, B, H), y)
    scaled, new = found.out
    expected = 2 * ((scaled - y) * new).sum((0, 1)) / y.numel()
    torch.testing.assert_close(found.grads["v"], expected)
