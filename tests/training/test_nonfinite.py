"""Losses that are not finite: where it began is said, and the parameters stay what they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ftbptt import make_train_segment
from ftbptt.training import Chunk, train_stream

from .nonfinite_runs import (
    MASKED,
    MODES,
    STOPS,
    THEN,
    bad_stream,
    copied,
    noted,
    params_of,
    started,
)
from .resuming import Embedded, assert_same
from .stream_runs import sgd
from .streams import Tagger, mean_cross_entropy, stream, tagger, zeros

# -- where it began -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_number_in_the_input(mode: str) -> None:
    """Step 9 of row 1: in the third window of 4."""
    good = started((bad_stream(19, 3, 9, 1)[0][:8], stream(19, 3)[1][:8]))
    list(good)
    updates = started(bad_stream(19, 3, 9, 1), on_nonfinite=mode)
    made, (said,) = noted(updates)
    words = (
        "ftbptt: the loss of update 2 is nan: x is first not finite at step 9, row 1; "
        "out is first not finite at step 9, row 1; "
        "grads['cell.weight_ih'] is the first gradient that is not finite."
    )
    assert said == f"{words} {THEN[mode]}".strip()
    assert made == ([4, 8, 16, 19] if mode == "skip" else [4, 8])
    if mode != "skip":
        assert_same(updates.params, good.params)
        assert updates.index == 2


def test_batch_first_and_overlapping_windows() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(3, 4, batch_first=True).double()
    x, y = stream(13, 3)
    x, y = x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()
    x[2, 7] = float("inf")
    updates = started((x, y), layer, state=None, k1=3, k2=5, on_nonfinite="raise")
    made, (said,) = noted(updates)
    assert "x is first not finite at step 7, row 2; out is first not finite at step 7" in said
    assert made == [3, 6]


def test_several_inputs_and_no_rows() -> None:
    """The first step in any of them is meant; without rows only the step is said."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 5)
            self.double()

        def forward(self, x_t: Any, h: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(x_t["a"] + x_t["b"], h)
            return h, h

    x = {"a": torch.randn(11, 3).double(), "b": torch.randn(11, 3).double()}
    x["a"][9, 0], x["b"][6, 2] = float("nan"), float("nan")
    module = Both()
    params = params_of(module)
    train_segment = make_train_segment(module, lambda out, y: out.square().mean(), backend="eager")
    updates = train_stream(
        train_segment, params, torch.zeros(5).double(), (x, None),
        torch.optim.SGD(params.values(), 0.1), k1=4, progress=False,
    )  # fmt: skip
    made, (said,) = noted(updates)
    assert "is nan: x['b'] is first not finite at step 6; out is first not finite at" in said
    assert "step 6; grads[" in said
    assert made == [4]


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_number_in_the_target(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.GRU(3, 4, batch_first=batch_first).double()
    x, y = stream(13, 3)[0], torch.zeros(13, 3, 4).double()
    y[9, 2, 1] = float("nan")
    if batch_first:
        x, y = x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()
    updates = started((x, y), layer, state=None, loss=nn.functional.mse_loss, on_nonfinite="raise")
    made, (said,) = noted(updates)
    assert "the loss of update 2 is nan: y is first not finite at step 9, row 2; grads[" in said
    assert made == [4, 8]


def test_a_number_in_a_leaf_of_the_target() -> None:
    """The leaf is named; whole numbers beside it are fine."""

    def loss(out: Tensor, y: Any) -> Tensor:
        return mean_cross_entropy(out, y["class"]) * y["weights"][0].mean()

    x, classes = stream(11, 3)
    weights = torch.ones(11, 3).double()
    weights[6, 1] = float("inf")
    y = {"class": classes, "weights": [weights]}
    made, (said,) = noted(started((x, y), loss=loss))
    assert "is inf: y['weights'][0] is first not finite at step 6, row 1; grads['cell" in said
    assert made == [4]
    y["weights"] = [weights[:, 1].clone()]  # the same for all rows
    made, (said,) = noted(started((x, y), loss=loss))
    assert "is inf: y['weights'][0] is first not finite at step 6; grads['cell" in said


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"context": 2, "k2": 6}, {"scaler": GradScaler("cpu")}])
def test_in_the_loss_alone(batch_first: bool, options: dict[str, Any]) -> None:
    """The logarithm of a target: data, outputs and gradients are finite."""
    torch.manual_seed(0)
    layer = nn.GRU(3, 4, batch_first=batch_first).double()
    x, y, mask = stream(13, 3)[0], torch.ones(13, 3).double(), torch.ones(13, 3).bool()
    y[9, 2], y[8, 0], mask[8, 0] = -1, -1, False
    if batch_first:
        x, y, mask = (leaf.transpose(0, 1).contiguous() for leaf in (x, y, mask))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return y.log() * torch.rand(()) - out.mean(-1)

    updates = started(Chunk(x, y, None, mask), layer, state=None, loss=loss, **options)
    made, (said,) = noted(updates)
    assert "the loss of update 2 is nan: the loss is first not finite at step 9, row 2" in said
    assert made == [4, 8]


def test_whole_numbers_in_and_a_loss_that_overflows() -> None:
    """x cannot be at fault; the output is finite, and so are the parameters."""

    def huge(out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(out, y) * 1e200 * 1e200

    torch.manual_seed(0)
    module = Embedded()
    x = torch.randint(7, (9, 2))
    before = copied(params_of(module))
    updates = started((x, x), module, loss=huge)
    made, (said,) = noted(updates)
    words = "ftbptt: the loss of update 0 is inf: grads['embedding.weight'] is the first gradient"
    assert said == f"{words} that is not finite. {STOPS}"
    assert not made
    assert_same(updates.params, before)


def test_nothing_is_found() -> None:
    """A loss that is infinite of finite outputs, with gradients that are finite."""

    def shifted(out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(out, y) + float("inf")

    made, (said,) = noted(started(stream(9), loss=shifted))
    words = "the loss of update 0 is inf: parameters, inputs, outputs and gradients are finite. The"
    assert words in said
    assert not made


def test_a_mean_over_no_target() -> None:
    """A prompt that is longer than a window."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)

    x, y = stream(9)
    y = y.clone()
    y[:4] = -100
    made, (said,) = noted(started((x, y), loss=loss))
    words = (
        "the loss of update 0 is nan: parameters, inputs, outputs and gradients are finite, and "
        "the gradients are 0: a mean over nothing is NaN, as where every target is ignore_index. "
        'Return the loss of each step, 0 for such steps, or pass on_nonfinite="skip"; if they are '
        "padding, give them a mask."
    )
    assert words in said
    assert not made


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_is_not_finite_already(mode: str) -> None:
    """Leaving windows out would go on for ever: skipping ends as well."""
    module = tagger()
    with torch.no_grad():
        module.readout.weight[1, 2] = float("nan")
    updates = started(stream(22), module, on_nonfinite=mode, epochs=None)
    made, (said,) = noted(updates)
    words = (
        "ftbptt: the loss of update 0 is nan: out is first not finite at step 0, row 0; "
        "params['readout.weight'] is not finite already; "
        "grads['cell.weight_ih'] is the first gradient that is not finite."
    )
    then = THEN | {"skip": "The run stops: parameters that are not finite stay so."}
    assert said == f"{words} {then[mode]}".strip()
    assert not made


def test_the_warning_points_to_the_callers_line() -> None:
    updates = started(bad_stream(9, 2, 6, 1))
    with pytest.warns(RuntimeWarning, match="the loss of update 1 is nan") as caught:
        list(updates)
    assert caught[0].filename == __file__


# -- parts of the batch, and parts of an update ---------------------------------------------------


@pytest.mark.parametrize("row", [0, 2, 3, 4])
def test_rows_are_those_of_the_whole_batch(row: int) -> None:
    """Micro-batches of 2, 2 and 1 rows."""
    updates = started(bad_stream(9, 5, 6, row), micro_batches=3)
    made, (said,) = noted(updates)
    assert f"x is first not finite at step 6, row {row}; out is first not finite at" in said
    assert made == [4]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_window_is_left_out_as_a_whole(parts: int) -> None:
    """However the rows are run: those that are finite neither count nor restart."""
    updates = started(bad_stream(14, 5, 6, 3), micro_batches=parts, on_nonfinite="skip")
    made, (said,) = noted(updates)
    assert "step 6, row 3" in said
    assert made == [4, 12, 14]
    # By hand: the first window, the second only for the state, and the rest.
    module, state = tagger(), zeros(5)
    x, y = bad_stream(14, 5, 6, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for start in range(0, 14, 4):
        outs = []
        state = tuple(leaf.detach() for leaf in state)
        for t in range(start, min(start + 4, 14)):
            out, state = module(x[t], state)
            outs.append(out)
        if start == 4:
            bad = torch.arange(5).unsqueeze(1) == 3
            state = tuple(torch.where(bad, 0.0, leaf) for leaf in state)
            continue
        optimizer.zero_grad()
        mean_cross_entropy(torch.stack(outs), y[start : start + 4]).backward()
        optimizer.step()
    for found, expected in zip(updates.params.values(), module.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(updates.state, state, rtol=0, atol=1e-12)


def test_rows_restart_from_the_state_that_was_given() -> None:
    state = tuple(torch.randn(3, 5).double() for _ in range(2))
    updates = started(bad_stream(4, 3, 1, 2), state=state, on_nonfinite="skip", updates=1)
    made, (_,) = noted(updates)
    assert not made
    for found, given in zip(updates.state, state, strict=True):
        assert torch.equal(found[2], given[2])
        assert not torch.isclose(found[:2], given[:2]).any()


@pytest.mark.parametrize("learned", [False, True])
def test_rows_restart_from_the_state_that_the_segment_knows(learned: bool) -> None:
    module = tagger()
    own = tuple(torch.randn(5).double() for _ in range(2))
    train_segment = make_train_segment(
        module, mean_cross_entropy, backend="eager",
        initial_state=(lambda params: tuple(leaf.expand(3, 5) for leaf in own)) if learned
        else tuple(leaf.expand(3, 5) for leaf in own),
    )  # fmt: skip
    params = params_of(module)
    updates = train_stream(
        train_segment, params, None, bad_stream(4, 3, 1, 2),
        torch.optim.SGD(params.values(), 0.1), k1=4, progress=False, on_nonfinite="skip",
    )  # fmt: skip
    noted(updates)
    for found, given in zip(updates.state, own, strict=True):
        assert torch.equal(found[2], given)
        assert not torch.isclose(found[:2], given).any()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"k1": 4}, [8, 12, 13]),
        ({"k1": 3, "k2": 6}, [9, 12, 13]),
        ({"k1": 3, "burn_in": 3}, [9, 12, 13]),
        ({"k1": 2, "k2": 4, "fresh": True}, [8, 10, 12, 13]),
    ],
)
def test_rows_restart_from_no_state(options: dict[str, Any], expected: list[int]) -> None:
    """A window that begins at the start of the stream has no state yet in which rows could be."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(3, 5).double()
    updates = started(
        (bad_stream(13, 3, 2, 1)[0], None), cell, state=None, on_nonfinite="skip",
        loss=lambda out, y: out.square().mean(), **options,
    )  # fmt: skip
    made, said = noted(updates)
    assert made == expected
    assert "x is first not finite at step 2, row 1" in said[0]
    assert all(leaf.isfinite().all() for leaf in updates.state)


def test_a_state_without_rows_restarts_whole() -> None:
    module = Tagger()
    params = params_of(module)
    x, y = bad_stream(9, 1, 2, 0)
    train_segment = make_train_segment(
        module, lambda out, y: nn.functional.cross_entropy(out, y), backend="eager"
    )
    updates = train_stream(
        train_segment, params, tuple(leaf[0] for leaf in zeros()), (x[:, 0], y[:, 0]),
        torch.optim.SGD(params.values(), 0.1), k1=4, progress=False, on_nonfinite="skip", epochs=1,
    )  # fmt: skip
    states = []
    with pytest.warns(RuntimeWarning, match=r"x is first not finite at step 2; out is first"):
        states += [update.state for update in updates]
    assert len(states) == 2
    assert all(leaf.isfinite().all() for state in states for leaf in state)


@pytest.mark.parametrize("step", [1, 6, 9])
def test_in_an_update_of_several_windows(step: int) -> None:
    """Three windows to an update: with "skip" the two others make it, else there is none."""
    data = bad_stream(12, 2, step, 1)
    good = [start for start in range(0, 12, 4) if not start <= step < start + 4]
    updates = started(data, accumulate=3, on_nonfinite="skip")
    with pytest.warns(RuntimeWarning, match=f"the loss of update 0 is nan.*step {step}, row 1"):
        (update,) = updates
    assert update.steps == 16
    assert len(good) == 2
    assert all(p.isfinite().all() for p in updates.params.values())
    before = copied(params_of(tagger()))
    for mode in ("stop", "raise"):
        updates = started(data, accumulate=3, on_nonfinite=mode)
        assert noted(updates)[0] == []
        assert_same(updates.params, before)


def test_overlapping_windows_are_left_out_till_it_is_past() -> None:
    """And each of them is said."""
    updates = started(bad_stream(20, 2, 7, 0), k1=2, k2=6, on_nonfinite="skip")
    made, said = noted(updates)
    assert made == [2, 4, 6, 14, 16, 18, 20]
    assert len(said) == 3
    assert all("x is first not finite at step 7, row 0" in words for words in said)
    assert all(leaf.isfinite().all() for leaf in updates.state)


# -- the gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_norm_that_is_clipped_by(mode: str) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        # sqrt has no derivative at 0, which is where its argument is if no target is 3.
        return mean_cross_entropy(out, y) + 0.1 * (out[..., 0] * (y == 3)).square().sum().sqrt()

    x, y = stream(17)
    y[:] = 3
    y[8:12] = 1
    good = started((x[:8], y[:8]), loss=loss, clip_norm=1.0)
    list(good)
    updates = started((x, y), loss=loss, clip_norm=1.0, on_nonfinite=mode)
    made, (said,) = noted(updates)
    words = f"ftbptt: the gradient's norm is nan in update 2, though its {MASKED}"
    assert said == f"{words} {THEN[mode]}".strip()
    assert made == ([4, 8, 16, 17] if mode == "skip" else [4, 8])
    if mode != "skip":
        assert_same(updates.params, good.params)
    assert all(p.isfinite().all() for p in updates.params.values())


class Steep(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("inf")


def test_a_norm_that_is_clipped_by_under_a_scaler_that_is_off() -> None:
    """It leaves no update out, as one that is on would: the run has to stop before it."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(Steep.apply(out), y)

    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = copied(params_of(tagger()))
    updates = started(stream(9), loss=loss, clip_norm=1.0, scaler=scaler)
    made, (said,) = noted(updates)
    assert said.startswith("ftbptt: the gradient's norm is ")
    assert said.endswith(f" in update 0, though its {MASKED} {STOPS}")
    assert not made
    assert_same(updates.params, before)


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_number_in_the_target(mode: str) -> None:
    """Its loss does not count, but 0 times NaN is in the gradient."""
    x, y = stream(16)
    target = y.double()
    target[9, 0] = float("nan")

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y.unsqueeze(-1)).square().mean(-1)

    data = Chunk(x, target, mask=~target.isnan())
    updates = started(data, loss=loss, lr=0.01, on_nonfinite=mode)
    made, said = noted(updates)
    assert made == ([4, 8, 16] if mode == "skip" else [4, 8])
    assert len(said) == 1
    assert "the gradient's norm is nan in update 2, though its loss is finite" in said[0]
    assert said[0].endswith(THEN[mode])
    assert all(p.isfinite().all() for p in updates.params.values())


def test_a_target_that_the_loss_leaves_out() -> None:
    """By ``torch.where``, whose gradient is 0 times NaN where it takes the other."""
    x, y = stream(16)
    target = y.double()
    target[9, 0] = float("nan")

    def loss(out: Tensor, y: Tensor) -> Tensor:
        y = y.unsqueeze(-1)
        return torch.where(y.isnan(), 0.0, (out - y).square()).mean()

    made, (said,) = noted(started((x, target), loss=loss, clip_norm=math.inf))
    assert said == f"ftbptt: the gradient's norm is nan in update 2, though its {MASKED} {STOPS}"
    assert made == [4, 8]

    made, (said,) = noted(started((x, target), loss=loss))
    assert said.startswith("ftbptt: the loss of update 3 is nan: ")
    advice = (
        "If a gradient under a finite loss made it so, clip_norm=math.inf notices that before the "
        "update."
    )
    assert said.endswith(f"{advice} {STOPS}")
    assert made == [4, 8, 12]


def test_a_norm_of_half_precision_that_overflows() -> None:
    """Nothing is clipped by it, and all gradients are finite."""
    params = {"w": torch.zeros(64, dtype=torch.float16)}

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x_t * params["w"], h

    train_segment = make_train_segment(step, lambda out, y: out.sum(-1), backend="eager")
    optimizer = torch.optim.SGD(params.values(), lr=0.0)
    data = Chunk(torch.full((4, 1, 64), 20000.0).half(), mask=torch.ones(4, dtype=torch.bool))
    run = train_stream(
        train_segment, params, torch.zeros(1, 64).half(), data, optimizer, k1=2, progress=False
    )
    assert [float(update.grad_norm) for update in run] == [math.inf, math.inf]


def test_one_model_of_an_ensemble() -> None:
    """It is named; the axes of out under vmap are not those of data that all models share."""
    cell = nn.RNNCell(3, 5, nonlinearity="relu").double()
    segment = make_train_segment(cell, lambda out, y: out.square().mean(), backend="eager")
    params, _ = torch.func.stack_module_state([cell] * 4)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    with torch.no_grad():
        params["bias_ih"][2, 3] = math.inf
    ensemble = torch.func.vmap(segment, in_dims=(0, None, None, None))
    updates = train_stream(
        ensemble, params, torch.zeros(2, 5).double(), (stream(8, rows=2)[0], None), sgd(params),
        k1=4, time_dim=0, progress=False, on_nonfinite="raise",
    )  # fmt: skip
    with pytest.raises(FloatingPointError) as error:
        next(updates)
    assert str(error.value).startswith(
        "ftbptt: the loss of update 0 is not finite in 1 of 4 entries of vmap, first in [2]: "
        "out is not finite; params['bias_ih'] is not finite already; grads["
    )
