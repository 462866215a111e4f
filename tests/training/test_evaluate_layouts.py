"""``evaluate_stream`` of data that is batch first, has no rows, or goes to a step for one row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError

from ftbptt import make_train_segment
from ftbptt.training import Chunk, evaluate_stream, train_stream

from .evaluations import accuracy, evaluate, flags
from .streams import stream, tagger


def square_error(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(-1)


def test_batch_first() -> None:
    layer = nn.GRU(3, 4, batch_first=True)
    params = dict(layer.named_parameters())
    segment = make_train_segment(layer, square_error, backend="eager")
    x, y = torch.randn(2, 17, 3), torch.randn(2, 17, 4)
    with torch.no_grad():
        out, state = layer(x)
    for mask in (None, flags(2, 17, 0.5)):
        valid = torch.ones(2, 17, dtype=torch.bool) if mask is None else mask
        found = evaluate_stream(
            segment, params, None, Chunk(x, y, None, mask), k=5,
            metrics={"error": MeanSquaredError(), "mean": FirstOfTwo()},
        )  # fmt: skip
        if mask is None:
            torch.testing.assert_close(found.state, state)
            expected = (out - y)[valid].square().mean().item()
            assert found.loss == pytest.approx(expected, rel=1e-5)
        assert found.steps == int(valid.sum())
        assert found.metrics["error"].item() == pytest.approx(found.loss, rel=1e-5)
        # In the order of time, rows within: as for data that is time first.
        assert torch.equal(torch.cat(found.metrics["mean"]), y.transpose(0, 1)[valid.t()])


@pytest.mark.parametrize("shared", [(17,), (17, 3)], ids=["time", "features"])
def test_a_first_input_that_all_rows_share(shared: tuple[int, ...]) -> None:
    """Its axes say nothing of rows, which only one of two chunks has flags to tell by."""

    def step(params: Any, x_t: Any, h: Tensor) -> Any:
        h = torch.tanh(x_t[1] @ params["w"] + h * x_t[0].mean())
        return h, h

    segment = make_train_segment(step, square_error, backend="eager")
    params, state = {"w": torch.randn(3, 4)}, torch.zeros(2, 4)
    x, y = (torch.rand(shared), torch.randn(17, 2, 3)), torch.randn(17, 2, 4)
    mask = flags(17, 2, 0.5)
    mask[:9] = True
    expected = segment.evaluate(params, state, x, y, mask=mask).loss
    halves = [slice(9), slice(9, 17)]
    chunks = [Chunk((x[0][part], x[1][part]), y[part]) for part in halves]
    chunks[1] = chunks[1]._replace(mask=mask[9:])
    found = evaluate_stream(
        segment, params, state, chunks, k=9,
        metrics={"error": MeanSquaredError(), "y": FirstOfTwo()},
    )  # fmt: skip
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    assert found.metrics["error"].item() == pytest.approx(found.loss, rel=1e-5)
    assert found.steps == int(mask.sum()) == len(torch.cat(found.metrics["y"]))


class FirstOfTwo:
    """Gives the targets back as they came."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.seen.append(target)

    def compute(self) -> list[Tensor]:
        return self.seen


@pytest.mark.parametrize("features", [3, 5])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.GRU])
def test_data_without_rows(kind: Any, features: int) -> None:
    """Also with as many features as hidden units: features are not taken for rows."""
    module = kind(features, 5)
    segment = make_train_segment(module, square_error, backend="eager")
    x, y = torch.randn(13, features), torch.randn(13, 5)
    mask = flags(13, None, 0.6)
    found = evaluate_stream(
        segment, dict(module.named_parameters()), None, Chunk(x, y, None, mask), k=5,
        metrics={"error": MeanSquaredError(), "targets": FirstOfTwo()},
    )  # fmt: skip
    assert found.steps == int(mask.sum())
    assert torch.equal(torch.cat(found.metrics["targets"]), y[mask])
    assert found.metrics["error"].item() == pytest.approx(found.loss, rel=1e-5)


def test_classes_without_rows() -> None:
    """x [K, F] and y [K], in a module that the library knows nothing of."""
    module = tagger()
    segment = make_train_segment(module, mean_of_one, backend="eager")
    state = tuple(torch.zeros(5).double() for _ in range(2))
    x = torch.randn(13, 3).double()
    found = evaluate_stream(
        segment, dict(module.named_parameters()), state, (x, torch.arange(13) % 4), k=5,
        metrics={"accuracy": accuracy()},
    )  # fmt: skip
    assert found.steps == 13


def mean_of_one(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize("y_dim", [1, None])
def test_a_step_for_one_sequence(y_dim: int | None) -> None:
    """Rows that the step does not see, here behind the features of x."""
    cell = nn.GRUCell(3, 5).double()
    params = dict(cell.named_parameters())
    segment = make_train_segment(cell, square_error, backend="eager", in_dims=(None, 0, 2, y_dim))
    x, y = torch.randn(13, 3, 2).double(), torch.randn(13, 2, 5).double()
    if y_dim is None:
        y = y[:, 0]
    found = evaluate_stream(
        segment, params, torch.zeros(2, 5).double(), (x, y), k=5,
        metrics={"error": MeanSquaredError()},
    )  # fmt: skip
    usual = make_train_segment(cell, square_error, backend="eager")
    wide = y if y_dim else y.unsqueeze(1).expand(13, 2, 5)
    expected = evaluate_stream(
        usual, params, torch.zeros(2, 5).double(), (x.movedim(2, 1), wide),
        metrics={"error": MeanSquaredError()},
    )  # fmt: skip
    assert found.steps == expected.steps == 26
    assert found.loss == pytest.approx(expected.loss, abs=1e-12)
    assert found.metrics["error"].item() == pytest.approx(expected.metrics["error"].item())


@pytest.mark.parametrize("k", [4, 13])
def test_a_mask_of_rows_that_the_step_sees_and_rows_that_it_does_not(k: int) -> None:
    """x [R, T, B, 3] with in_dims 0: the mask has three axes, and metrics are of all its steps."""
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 5).double()
    params = dict(cell.named_parameters())
    segment = make_train_segment(cell, square_error, backend="eager", in_dims=(None, 0, 0, 0))
    x, y = torch.randn(4, 13, 2, 3).double(), torch.randn(4, 13, 2, 5).double()
    mask = torch.rand(4, 13, 2, generator=torch.Generator().manual_seed(1)) < 0.6
    found = evaluate_stream(
        segment, params, torch.zeros(4, 2, 5).double(), Chunk(x, y, None, mask), k=k,
        metrics={"error": MeanSquaredError()},
    )  # fmt: skip
    usual = make_train_segment(cell, square_error, backend="eager")
    flat = [leaf.transpose(0, 1).flatten(1, 2) for leaf in (x, y, mask)]
    expected = evaluate_stream(
        usual, params, torch.zeros(8, 5).double(), Chunk(flat[0], flat[1], None, flat[2]),
        metrics={"error": MeanSquaredError()},
    )  # fmt: skip
    assert found.steps == expected.steps == int(mask.sum())
    assert found.metrics["error"].item() == pytest.approx(expected.metrics["error"].item())


def test_a_step_of_numbers_for_one_sequence() -> None:
    """x [K, B] and targets [K] that all rows have: in_dims tells what the rows are."""

    def step(params: Any, x_t: Tensor, total: Tensor) -> Any:
        total = params["decay"] * total + x_t
        return total, total

    segment = make_train_segment(
        step, lambda out, y: (out - y).square(), backend="eager", in_dims=(None, 0, 1, None)
    )
    x, y = torch.randn(13, 3), torch.randn(13)
    found = evaluate_stream(
        segment, {"decay": torch.tensor(0.5)}, torch.zeros(3), (x, y), k=5,
        metrics={"error": MeanSquaredError()},
    )  # fmt: skip
    assert found.steps == 39
    assert found.metrics["error"].item() == pytest.approx(found.loss, rel=1e-5)


def test_an_average_of_the_loss_itself() -> None:
    """A metric of one argument is wrapped by its caller; here it agrees with the loss."""

    class MeanLoss(MeanMetric):
        def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
            losses = nn.functional.cross_entropy(preds, target, reduction="none")
            super().update(losses)

    found = evaluate(stream(22, rows=3), k=5, metrics={"loss": MeanLoss()})
    assert found.metrics["loss"].item() == pytest.approx(found.loss, rel=1e-5)


def test_a_part_of_the_state_that_all_rows_share() -> None:
    """Such as a count of steps: there are rows nevertheless, which are counted and flattened."""

    def step(params: Any, x_t: Tensor, state: Any) -> Any:
        h, count = state
        h = torch.tanh(x_t @ params["w"] + h)
        return h, (h, count + 1)

    segment = make_train_segment(step, square_error, backend="eager")
    params, state = {"w": torch.randn(3, 4)}, (torch.zeros(2, 4), torch.zeros(()))
    x, y = torch.randn(17, 2, 3), torch.randn(17, 2, 4)
    found = evaluate_stream(
        segment, params, state, (x, y), k=9,
        metrics={"error": MeanSquaredError(), "y": FirstOfTwo()},
    )  # fmt: skip
    assert torch.equal(torch.cat(found.metrics["y"]), y.flatten(0, 1))
    assert found.metrics["error"].item() == pytest.approx(found.loss, rel=1e-5)
    assert found.steps == 34
    x[4, 1] = math.nan
    options: dict[str, Any] = {"k1": 5, "progress": False}
    updates = list(
        train_stream(
            segment, params, state, (x[5:], y[5:]), torch.optim.SGD(params.values()), **options
        )
    )
    assert [update.steps for update in updates] == [10, 10, 4]
    with pytest.warns(RuntimeWarning, match="x is first not finite at step 4, row 1"):
        updates = list(
            train_stream(
                segment, params, state, (x, y), torch.optim.SGD(params.values()),
                on_nonfinite="skip", **options,
            )
        )  # fmt: skip
    assert updates[0].position == 10
    assert float(updates[0].state[1]) == 5
    run = train_stream(
        segment, params, state, (x, y), torch.optim.SGD(params.values()), micro_batches=2, **options
    )
    with pytest.raises(ValueError, match=r"micro_batches: state\[1\] has shape \[\], without the"):
        next(run)
