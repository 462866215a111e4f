"""``gradient_horizon`` against autograd, step by step and lag by lag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from ftbptt import GradientHorizon, as_step, gradient_horizon, make_train_segment

from ..cells import problem
from ..cells.problems import mse, named

Tree = Any
STEPS, MAX_LAG = 9, 4
CELLS = ["lstm_readout", "nested_everything", "counter_and_flag", "lru_complex", "delay_line"]


def has_gradient(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def by_autograd(step: Any, loss: Any, arguments: Any, t: int, lag: int) -> dict[str, Tensor]:
    """d loss_t / d state_{t-lag} by leaf, of those that the loss depends on; time is axis 0."""
    params, state, x, y = arguments
    step, outs, spec = as_step(step), [], None
    for s in range(len(tree_leaves(x)[0])):
        x_s = tree_map(lambda leaf, s=s: leaf[s], x)
        out, state = step.apply(params, step.buffers(), x_s, state)
        if s == t - lag:
            state = tree_map(lambda leaf: leaf.detach().requires_grad_(has_gradient(leaf)), state)
            state_after = tree_flatten_with_path(state)[0]
        leaves, spec = tree_flatten(out)
        # Keep only the part of the loss that reads step t.
        outs.append([leaf if s == t else leaf.detach() for leaf in leaves])
    assert spec is not None
    stacked = tree_unflatten([torch.stack(leaf) for leaf in zip(*outs, strict=True)], spec)
    value = loss(stacked, y).mean()
    inputs = {f"state{keystr(path)}": leaf for path, leaf in state_after if has_gradient(leaf)}
    if not value.requires_grad:
        return {}
    grads = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    return {name: grad for name, grad in zip(inputs, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("name", CELLS)
def test_norms_are_those_of_autograd(name: str) -> None:
    case = problem(name)
    segment = make_train_segment(case.step, case.loss, backend="eager")
    arguments = case.data(STEPS)
    horizon = gradient_horizon(segment, *arguments, max_lag=MAX_LAG)
    assert all(len(norms) == MAX_LAG for norms in horizon.norms.values())
    for t in (MAX_LAG, STEPS - 1):
        for lag in (1, MAX_LAG):
            expected = by_autograd(case.step, case.loss, arguments, t, lag)
            assert expected.keys() <= horizon.norms.keys()
            for name, norms in horizon.norms.items():
                norm = norms[lag - 1, t - MAX_LAG].square().sum().sqrt()
                d_state = expected.get(name, torch.zeros(1).double())
                torch.testing.assert_close(norm, d_state.norm().real, rtol=1e-10, atol=1e-13)


def test_a_loss_that_depends_on_no_state_is_an_error() -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h.detach() @ params["w"], torch.tanh(x_t + h)

    segment = make_train_segment(step, mse, backend="eager")
    arguments = {"w": torch.randn(2, 2)}, torch.zeros(3, 2), torch.randn(5, 3, 2)
    with pytest.raises(ValueError, match="state: the loss depends on no leaf of it"):
        gradient_horizon(segment, *arguments, torch.randn(5, 3, 2))


def gru(rows: int = 3) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module = nn.GRU(2, 5, num_layers=2).double()
    x, y = torch.randn(STEPS, rows, 2).double(), torch.randn(STEPS, rows, 5).double()
    return module, (named(module), torch.randn(2, rows, 5).double(), x, y)


def test_row_by_row() -> None:
    """The batch axis of nn.GRU's state is its second; each row has its own norm."""
    module, arguments = gru()
    horizon = gradient_horizon(
        make_train_segment(module, mse, backend="eager"), *arguments, max_lag=MAX_LAG
    )
    (name, norms) = next(iter(horizon.norms.items()))
    assert (name, norms.shape) == ("state", (MAX_LAG, STEPS - MAX_LAG, 3))
    d_state = by_autograd(module, mse, arguments, STEPS - 1, 2)["state"]
    torch.testing.assert_close(norms[1, -1], d_state.movedim(1, 0).flatten(1).norm(dim=1))


@pytest.mark.parametrize("kind", ["batch_first", "in_dims", "zeros", "one sequence", "long blocks"])
def test_axes_of_time_and_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (params, state, x, y) = gru()
    segment = make_train_segment(module, mse, backend="eager")
    if kind == "zeros":
        state = torch.zeros_like(state)
    expected = gradient_horizon(segment, params, state, x, y, max_lag=3).norms["state"]
    if kind == "zeros":
        state = None
    if kind == "batch_first":
        batch_first = nn.GRU(2, 5, num_layers=2, batch_first=True).double()
        segment, x, y = make_train_segment(batch_first, mse, backend="eager"), x.mT, y.mT
        x, y = (leaf.permute(2, 0, 1) if leaf.shape[0] == STEPS else leaf for leaf in (x, y))
    if kind == "in_dims":
        segment = make_train_segment(module, mse, backend="eager", in_dims=(None, 1, 1, 1))
    if kind == "one sequence":
        state, x, y = state[:, 0], x[:, 0], y[:, 0]
        # With one row instead of three, the mean has a third of the terms.
        expected = expected[:, :, :1] * 3
    if kind == "long blocks":
        monkeypatch.setattr("ftbptt.debug.lags._BATCH_BYTES", 1)  # a window at a time
    norms = gradient_horizon(segment, params, state, x, y, max_lag=3).norms["state"]
    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=1e-13)


def test_a_leaf_that_is_one_number() -> None:
    """Such as a gain that fades: it has no axis, so that the norms are those of all rows."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, gain = state
        h = torch.tanh(x_t + gain * (h @ params["u"]))
        return h, (h, gain * 0.9 + 0.1 * h.mean())

    torch.manual_seed(0)
    arguments = (
        {"u": torch.randn(2, 2).double()}, (torch.zeros(3, 2).double(), torch.ones(()).double()),
        torch.randn(STEPS, 3, 2).double(), torch.randn(STEPS, 3, 2).double(),
    )  # fmt: skip
    segment = make_train_segment(step, mse, backend="eager")
    norms = gradient_horizon(segment, *arguments, max_lag=MAX_LAG).norms
    d_state = by_autograd(step, mse, arguments, STEPS - 1, 2)
    for name in ("state[0]", "state[1]"):
        assert norms[name].shape == (MAX_LAG, STEPS - MAX_LAG, 1)
        torch.testing.assert_close(norms[name][1, -1, 0], d_state[name].norm())


def test_nothing_reaches_over_a_reset() -> None:
    module, arguments = gru()
    segment = make_train_segment(module, mse, backend="eager")
    reset = torch.zeros(STEPS, 3, dtype=torch.bool)
    reset[6, 1] = True  # before step 6
    norms = gradient_horizon(segment, *arguments, max_lag=MAX_LAG, reset=reset).norms["state"]
    for t in range(MAX_LAG, STEPS):
        for lag in range(1, MAX_LAG + 1):
            crossed = t - lag < 6 <= t
            zero = norms[lag - 1, t - MAX_LAG] == 0
            assert zero.tolist() == [False, crossed, False]


def test_context_has_no_loss() -> None:
    module, arguments = gru()
    segment = make_train_segment(module, mse, backend="eager", context=6)
    horizon = gradient_horizon(segment, *arguments, max_lag=2)
    assert horizon.norms["state"].shape[1] == STEPS - 6
    assert (horizon.norms["state"] > 0).all()


# -- statistics and the suggested truncation ------------------------------------------------------


def fading(factor: float, steps: int = 60, max_lag: int = 20) -> GradientHorizon:
    """The horizon of h' = factor * h + w * x, whose gradient decays by that factor."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = factor * h + params["w"] * x_t
        return h, h

    segment = make_train_segment(step, lambda out, y: (out * y).mean(), backend="eager")
    ones = torch.ones(steps, 2, 1).double()
    params = {"w": torch.ones(1).double()}
    state = torch.zeros(2, 1).double()
    return gradient_horizon(segment, params, state, ones, ones, max_lag=max_lag)


def test_decay_and_statistics() -> None:
    horizon = fading(0.8)
    assert horizon.decay == pytest.approx(0.8)
    expected = 0.8 ** torch.arange(1, 21).double() / 120  # the loss is a mean over 60 x 2
    for norms in (horizon.mean(), horizon.mean("state"), horizon.quantile(0.9, "state")):
        torch.testing.assert_close(norms, expected)
    assert fading(1.05).decay == pytest.approx(1.05)


def test_suggested_k2_keeps_within_the_tolerance() -> None:
    """Lags above k2 make up 0.8^k2 of the gradient, except at the start of the segment."""
    horizon = fading(0.8, steps=400)
    assert list(horizon.bias) == [1, 2, 4, 8, 16, 21]
    k2s = [horizon.suggest_k2(tolerance) for tolerance in (0.5, 0.1, 0.01, 1e-4)]
    assert k2s == sorted(k2s)
    for k2, tolerance in zip(k2s, (0.5, 0.1, 0.01, 1e-4), strict=True):
        assert 0.8**k2 < tolerance * 1.1
        assert 0.8 ** (k2 - 3) > tolerance  # and k2 is not much larger than necessary
    assert k2s[-1] > horizon.max_lag  # extrapolated


def test_suggested_k2_of_a_cell_keeps_within_the_tolerance() -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(3, 5).double()
    segment = make_train_segment(cell, mse, backend="eager")
    x, y = torch.randn(80, 2, 3).double(), torch.randn(80, 2, 5).double()
    zeros = (torch.zeros(2, 5).double(),) * 2
    horizon = gradient_horizon(segment, named(cell), zeros, x, y, max_lag=24)
    full_grads = segment(named(cell), zeros, x, y).grads
    for tolerance in (0.3, 0.03):
        k2 = horizon.suggest_k2(tolerance)
        short = make_train_segment(cell, mse, backend="eager", window=k2)
        grads = short(named(cell), zeros, x, y).grads
        error = torch.cat([(grads[n] - full).flatten() for n, full in full_grads.items()]).norm()
        assert error < tolerance * torch.cat([g.flatten() for g in full_grads.values()]).norm()


def test_a_gradient_that_does_not_decay_has_no_k2() -> None:
    with pytest.raises(ValueError, match=r"max_lag: within 20 steps the gradient does not fade"):
        fading(1.0).suggest_k2(0.1)
    with pytest.raises(ValueError, match=r"max_lag: what may lie beyond 20 steps is as large as"):
        fading(0.999).suggest_k2(0.1)
    with pytest.raises(ValueError, match="tolerance: expected a number above 0, found 0"):
        fading(0.8).suggest_k2(0)
    for max_lag in (1, 2):
        with pytest.raises(ValueError, match=rf"within {max_lag} steps, so k2 cannot.*at least 3"):
            fading(0.8, max_lag=max_lag).suggest_k2(0.1)
    assert fading(0.8, max_lag=3).suggest_k2(0.1) > 1


def test_a_quantile_beyond_all() -> None:
    with pytest.raises(ValueError, match=r"q: expected a number from 0 to 1, found 2\.0"):
        fading(0.8).quantile(2.0)


def test_gradients_that_are_not_finite() -> None:
    cell = nn.GRUCell(2, 3)
    segment = make_train_segment(cell, mse, backend="eager")
    x, y = torch.randn(20, 4, 2), torch.randn(20, 4, 3)
    x[3, 1] = torch.nan
    with pytest.raises(ValueError, match="params, state, x, y: a gradient of the loss is not fini"):
        gradient_horizon(segment, dict(cell.named_parameters()), None, x, y)


def test_without_recurrence_one_step_is_enough() -> None:
    horizon = fading(0.0)
    assert horizon.decay == 0
    assert horizon.suggest_k2(1e-6) == 1


def test_without_parameters() -> None:
    """The norms are those of the state alone; there is no gradient that could be biased."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * h + x_t
        return h, h

    segment = make_train_segment(step, lambda out, y: out.mean(), backend="eager")
    x, state = torch.ones(9, 2).double(), torch.zeros(2).double()
    horizon = gradient_horizon(segment, {}, state, x, None, max_lag=4)
    assert horizon.decay == pytest.approx(0.5)
    assert set(horizon.reached.values()) == set(horizon.bias.values()) == {0.0}


def test_print_and_plot(tmp_path: Path) -> None:
    horizon = fading(0.8)
    lines = str(horizon).splitlines()
    assert lines[0] == (
        "gradient horizon over 20 lags: a factor of 0.8 from lag to lag in the last half"
    )
    assert [line.split()[0] for line in lines[3:9]] == ["1", "2", "4", "8", "16", "20"]
    assert lines[9].startswith("bias of the gradient if each loss reaches back k2 steps")
    with torch.device("meta"):  # another default than where the norms are
        assert str(horizon).splitlines() == lines
        horizon.plot(tmp_path / "made" / "horizon.png")
    assert (tmp_path / "made" / "horizon.png").stat().st_size > 10_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch has no quantile of it, NumPy no bfloat16; and means of norms would be rounded."""
    module, (params, state, x, y) = gru()
    exact = gradient_horizon(
        make_train_segment(module, mse, backend="eager"), params, state, x, y, max_lag=MAX_LAG
    )
    module = module.to(dtype)
    segment = make_train_segment(module, mse, backend="eager")
    arguments = [leaf.to(dtype) for leaf in (state, x, y)]
    horizon = gradient_horizon(segment, named(module), *arguments, max_lag=MAX_LAG)
    for found, expected in [
        (horizon.mean(), exact.mean()),
        (horizon.quantile(0.9), exact.quantile(0.9)),
        (horizon.norms["state"], exact.norms["state"]),
    ]:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=1e-5)
    assert horizon.decay == pytest.approx(exact.decay, rel=0.1)
    lines = str(horizon).splitlines()
    assert lines[0].startswith(f"gradient horizon over {MAX_LAG} lags: a factor of 0.")
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "4"]
    horizon.plot(tmp_path / "horizon.png")
    assert (tmp_path / "horizon.png").stat().st_size > 10_000


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_lag", "kind", "message"),
    [
        (0, ValueError, "max_lag: expected at least 1, found 0"),
        (2.5, TypeError, "max_lag: expected a whole number, found 2.5"),
        (STEPS, ValueError, f"max_lag: no step of the {STEPS} in x has {STEPS} before it"),
    ],
)
def test_bad_lags(max_lag: Any, kind: type[Exception], message: str) -> None:
    module, arguments = gru()
    segment = make_train_segment(module, mse, backend="eager")
    with pytest.raises(kind, match=message):
        gradient_horizon(segment, *arguments, max_lag=max_lag)


def test_no_train_segment() -> None:
    with pytest.raises(TypeError, match="train_segment: expected what make_train_segment returns"):
        gradient_horizon(lambda *args: None, None, None, None, None)  # type: ignore[arg-type]


def test_unknown_leaf() -> None:
    with pytest.raises(ValueError, match="the state has no 'h' with a gradient; it has state"):
        fading(0.8).mean("h")
