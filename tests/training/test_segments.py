"""The parts of a window: what each weighs, and what the loss is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

from ftbptt import make_train_segment
from ftbptt.training import Chunk, Evaluation, evaluate_stream, train_stream
from ftbptt.training.data.layout import DataLayout

IN_DIMS = (None, 0, 1, 1)


def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x_t @ params["w"] + h @ params["u"])
    return h, h


def square_error(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(-1)


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, 5, generator=generator).double().requires_grad_()
        for name, size in (("w", 3), ("u", 5))
    }


def masked_data(axes: int) -> Chunk:
    """24 steps of 4 sequences, the first of which has hardly a valid step (mask[K, B])."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, 3, generator=generator).double()
    y = torch.randn(24, 4, 5, generator=generator).double()
    mask = torch.rand(24, 4, generator=generator) < 0.6
    mask[:, 0] = torch.rand(24, generator=generator) < 0.1
    return Chunk(x, y, None, mask if axes == 2 else mask[:, 1])


def one_update(data: Any, in_dims: Any = IN_DIMS, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss of the first update, and the parameters after it."""
    segment = make_train_segment(step, square_error, backend="eager", in_dims=in_dims)
    params = parameters()
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    update = next(train_stream(
        segment, params, torch.zeros(4, 5).double(), data, optimizer, progress=False,
        **({"k1": 24} | options),
    ))  # fmt: skip
    return update.loss, [leaf.detach() for leaf in params.values()]


def test_micro_batches_with_an_initial_state_of_each_row() -> None:
    start, params = torch.zeros(4, 5).double(), parameters()
    segment = make_train_segment(step, square_error, backend="eager", initial_state=start)
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    data = masked_data(2)._replace(mask=None)
    with pytest.raises(ValueError, match="initial_state") as caught:
        next(train_stream(segment, params, start, data, optimizer, k1=4, micro_batches=2,
                          progress=False))  # fmt: skip
    assert "micro_batches splits the rows of the data and of the state" in caught.value.__notes__[0]


@pytest.mark.parametrize("axes", [1, 2])
def test_micro_batches_of_data_that_all_rows_share(axes: int) -> None:
    """It is not split, whichever leaf of x it is, and rows are those of the other leaf."""

    def step_with_time(params: Any, x_t: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        return step(params, x_t[1] * x_t[0], h)

    times, (x, y, _, mask) = torch.rand(24, 2).double(), masked_data(2)
    times = times[:, 0] if axes == 1 else times[:, [0, 1, 1]]
    segment = make_train_segment(step_with_time, square_error, backend="eager")
    found = []
    for parts in (1, 2):
        params = parameters()
        optimizer = torch.optim.SGD(params.values(), lr=1.0)
        update = next(train_stream(
            segment, params, torch.zeros(4, 5).double(), Chunk((times, x), y, None, mask),
            optimizer, k1=24, micro_batches=parts, progress=False,
        ))  # fmt: skip
        found.append([update.loss, *(leaf.detach() for leaf in params.values())])
    torch.testing.assert_close(*found)


def test_another_error_of_micro_batches_is_told_as_it_is() -> None:
    x, _, *_ = masked_data(2)
    wrong = torch.zeros(24, 4, 6).double()
    for initial_state in (None, torch.zeros(5).double()):
        segment = make_train_segment(
            step, square_error, backend="eager", initial_state=initial_state
        )
        params, state = parameters(), torch.zeros(4, 5).double()
        run = train_stream(
            segment, params, state, (x, wrong), torch.optim.SGD(params.values(), lr=1.0), k1=4,
            micro_batches=2, progress=False,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="broadcast a dimension of length 6") as caught:
            next(run)
        assert not any("initial_state" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("in_dims", "axes"), [(None, 1), (None, 2), (IN_DIMS, 2)])
def test_micro_batches_do_not_change_an_update(in_dims: Any, axes: int) -> None:
    """With in_dims the loss is a mean over sequences, however many valid steps each one has."""
    expected = one_update(masked_data(axes), in_dims)
    for micro_batches in (2, 3, 4):
        actual = one_update(masked_data(axes), in_dims, micro_batches=micro_batches)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_part_of_y_without_rows() -> None:
    """A weight for each step, beside targets of each row: it goes with all rows."""

    def weighted(out: Tensor, y: Any) -> Tensor:
        return (square_error(out, y["target"]) * y["weight"].unsqueeze(-1)).mean()

    segment = make_train_segment(step, weighted, backend="eager")
    x, y, *_ = masked_data(2)
    found = []
    for micro_batches in (1, 3):
        params = parameters()
        data = x, {"target": y, "weight": torch.arange(24).double()}
        optimizer = torch.optim.SGD(params.values(), lr=1.0)
        run = train_stream(
            segment, params, torch.zeros(4, 5).double(), data, optimizer, k1=24,
            micro_batches=micro_batches, progress=False,
        )  # fmt: skip
        found.append((next(run).loss, [leaf.detach() for leaf in params.values()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("counted_first", [False, True])
def test_rows_that_only_the_mask_shows(counted_first: bool) -> None:
    segment = make_train_segment(step, square_error, backend="eager")
    layout = DataLayout(segment, None)
    chunk = Chunk(torch.zeros(6, 3), torch.zeros(6), None, torch.ones(6, 3, dtype=torch.bool))
    if counted_first:
        assert layout.count(chunk, torch.zeros(3), 0).tokens == 18
    assert layout.rows(chunk, torch.zeros(3)) == 3
    assert layout.count(chunk, torch.zeros(3), 0).tokens == 18


def evaluate(data: Chunk, in_dims: Any, k: int) -> Evaluation:
    segment = make_train_segment(step, square_error, backend="eager", in_dims=in_dims)
    return evaluate_stream(segment, parameters(), torch.zeros(4, 5).double(), data, k=k)


def test_chunks_of_sequences_weigh_their_steps() -> None:
    """With in_dims and mask[K, B]: each chunk's loss counts by its steps, valid or not."""
    data = masked_data(2)
    segment = make_train_segment(step, square_error, backend="eager", in_dims=IN_DIMS)
    params, state, weighted = parameters(), torch.zeros(4, 5).double(), 0.0
    for start in (0, 10, 20):
        x, y, mask = (part[start : start + 10] for part in (data.x, data.y, data.mask))
        result = segment.evaluate(params, state, x, y, mask=mask)
        state, weighted = result.state, weighted + float(result.loss) * len(x)
    evaluation = evaluate(data, IN_DIMS, k=10)
    assert evaluation.loss == pytest.approx(weighted / 24, abs=1e-12)
    assert evaluation.steps == int(data.mask.sum())


def test_chunks_of_a_batch_weigh_their_valid_steps() -> None:
    """Without in_dims, the loss does not depend on how the data is cut."""
    for data in (masked_data(1), masked_data(2)):
        expected = evaluate(data, None, k=24)
        for k in (1, 5, 7):
            actual = evaluate(data, None, k=k)
            assert actual.loss == pytest.approx(expected.loss, abs=1e-12)
            assert (
                actual.steps
                == expected.steps
                == int(data.mask.sum()) * (4 if data.mask.dim() == 1 else 1)
            )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("in_dims", [None, IN_DIMS, (None, 0, 1, None), (None, 0, 0, 1)])
def test_a_scaler_without_a_target(in_dims: Any, micro_batches: int) -> None:
    x = masked_data(1).x
    if in_dims is not None and in_dims[2] == 0:
        x = x.transpose(0, 1)

    def one(scaler: GradScaler | None) -> list[Tensor]:
        segment = make_train_segment(
            step, lambda out, y: out.square().mean(-1), backend="eager", in_dims=in_dims
        )
        params = parameters()
        optimizer = torch.optim.SGD(params.values(), lr=1.0)
        list(train_stream(
            segment, params, torch.zeros(4, 5).double(), (x, None), optimizer, k1=10,
            scaler=scaler, micro_batches=micro_batches, progress=False,
        ))  # fmt: skip
        return [leaf.detach() for leaf in params.values()]

    torch.testing.assert_close(one(GradScaler("cpu", init_scale=8.0)), one(None))


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_scale_by_which_the_loss_would_overflow(mode: str) -> None:
    """Its gradients do, as in a loop: the scaler leaves the update out and lowers its scale."""
    x, y, *_ = masked_data(2)
    segment = make_train_segment(
        step, lambda out, y: 1e3 + (out - y).square().mean(), backend="eager"
    )
    params = {name: p.detach().float().requires_grad_() for name, p in parameters().items()}
    scaler = GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    run = train_stream(
        segment, params, torch.zeros(4, 5), (x.float(), y.float()), optimizer, k1=1,
        scaler=scaler, on_nonfinite=mode, progress=False,
    )  # fmt: skip
    losses, scales = [], []
    for update in run:
        losses.append(float(update.loss))
        scales.append(scaler.get_scale())
    assert len(losses) == 24
    assert all(1e3 < loss < 1e4 for loss in losses)
    assert max(scales) >= 2.0**125


def test_a_loss_that_overflows_in_half_precision() -> None:
    """Its gradient is finite. The scaler has to see the overflow, and leaves the update out."""
    x, y, *_ = masked_data(2)
    segment = make_train_segment(
        step, lambda out, y: ((300 * out.half()) ** 2).sum() * 0.1, backend="eager"
    )
    params = {name: p.detach().float().requires_grad_() for name, p in parameters().items()}
    before = {name: p.detach().clone() for name, p in params.items()}
    scaler = GradScaler("cpu", init_scale=2.0**16)
    run = train_stream(
        segment, params, torch.zeros(4, 5), (x.float(), y.float()),
        torch.optim.SGD(params.values(), lr=1.0), k1=24, scaler=scaler, progress=False,
        interval=1e6,  # no report before the end
    )  # fmt: skip
    run._guard.reads_now = lambda value: False  # type: ignore[method-assign]  # as on a GPU
    assert float(next(run).loss) == float("inf")
    with pytest.warns(RuntimeWarning, match="the mean loss up to update 0 is inf"):
        run.finish()
    assert scaler.get_scale() == 2.0**15
    torch.testing.assert_close(dict(params), before)
