"""What is known of a run: means by weight, few readings of the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftbptt.training import (
    Chunk,
    EarlyStop,
    Events,
    PackedSequences,
    Update,
)
from ftbptt.training.reports import report as report_module
from ftbptt.training.reports.report import Meter
from ftbptt.training.updates.nonfinite import Guard
from ftbptt.training.updates.window_stats import WindowStats

from .reported_runs import made, train
from .streams import stream


class Clock:
    """A clock that stands still until it is told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(report_module, "time", made)
    return made


def measured(
    loss: float | list[float], weight: Any = 1, steps: int = 4, tokens: int = 8
) -> WindowStats:
    return WindowStats(torch.tensor(loss), weight, steps, tokens)


def update(index: int = 0, norm: float = 0.5, rate: float | None = None) -> Update:
    loss = torch.tensor(0.0)
    return Update(index, 0, 4 * index, loss, 1, {}, None, 0.0, rate, [], torch.tensor(norm))


# -- numbers ------------------------------------------------------------------------------------


def test_the_mean_is_weighted(clock: Clock) -> None:
    meter = Meter(interval=1.0)
    meter.start()
    for loss, weight in ((1.0, 3), (5.0, 1), (math.pi, 0)):
        meter.add(measured(loss, weight))
        assert not meter.is_due()
    clock.now += 2
    meter.add(measured(2.0, 4))
    assert meter.is_due()
    report = meter.report(update(3, norm=0.25, rate=0.01))
    assert report.loss == (3 + 5 + 8) / 8
    assert (report.index, report.position, report.grad_norm) == (3, 12, 0.25)
    assert report.learning_rate == 0.01
    assert (report.steps_per_second, report.tokens_per_second) == (8, 16)
    # The next one is of what comes after it.
    clock.now += 0.5
    meter.add(measured(7.0, 2))
    assert not meter.is_due()
    report = meter.report(update(4))
    assert report.loss == 7.0
    assert report.steps_per_second == 8
    assert report.seconds == 2.5
    assert [own.index for own in meter.history] == [3, 4]


def test_weights_that_are_on_the_device() -> None:
    meter = Meter(0)
    meter.add(measured(1.0, torch.tensor(3)))
    meter.add(measured(5.0, 1))
    assert meter.report(update()).loss == 2.0
    meter.add(measured(5.0, torch.tensor(0)))
    assert meter.report(update()) is None
    assert len(meter.history) == 1
    meter.add(measured(3.0, torch.tensor(2)))
    assert meter.report(update()).loss == 3.0


def test_losses_of_many_models() -> None:
    meter = Meter(0)
    meter.add(measured([1.0, 3.0], 3))
    meter.add(measured([5.0, 3.0], 1))
    assert meter.report(update()).loss == 2.5


def test_few_losses_are_kept(clock: Clock) -> None:
    """However long the interval is: an hour of updates is no tensor each."""
    meter = Meter(interval=3600)
    losses = torch.rand(5000, generator=torch.Generator().manual_seed(0)).tolist()
    for i, loss in enumerate(losses):
        meter.add(measured(loss, i % 3))
        assert len(meter._losses) == len(meter._weights) < 1024
    expected = sum(loss * (i % 3) for i, loss in enumerate(losses)) / sum(
        i % 3 for i in range(5000)
    )
    assert meter.report(update()).loss == pytest.approx(expected, rel=1e-6)
    meter.add(measured(4.0))
    assert meter.report(update()).loss == 4.0


def test_time_goes_on_after_a_resume(clock: Clock) -> None:
    meter = Meter(interval=0)
    clock.now += 7
    meter.add(measured(1.0))
    meter.report(update())
    again = Meter(interval=0)
    again.load_state_dict(meter.state_dict(), torch.device("cpu"))
    again.start()
    clock.now += 2
    assert again.seconds == 9
    assert again.history == meter.history


def test_the_speed_after_a_resume(clock: Clock) -> None:
    """Steps that were not reported took the time that they took."""
    meter = Meter(interval=0)
    meter.add(measured(1.0))
    clock.now += 3
    state = meter.state_dict()
    clock.now += 100
    again = Meter(interval=0)
    again.load_state_dict(state, torch.device("cpu"))
    again.start()
    clock.now += 1
    again.add(measured(1.0))
    assert again.report(update()).steps_per_second == 2 * measured(1.0).steps / 4


def test_a_report_of_each_update() -> None:
    """``interval=0``: each loss, norm, rate and place as the update has them."""
    updates, reports = [], []
    run = train(interval=0, epochs=2, events=Events(report=reports.append))
    updates = list(run)
    assert reports == run.history
    assert len(reports) == len(updates) == 12
    for report, own in zip(reports, updates, strict=True):
        assert report.loss == own.loss.item()
        assert report.grad_norm == own.grad_norm.item()
        assert (report.index, report.epoch, report.position) == (own.index, own.epoch, own.position)
        assert report.learning_rate == 0.5
        assert report.steps_per_second > 0
        assert report.tokens_per_second == pytest.approx(2 * report.steps_per_second)
    seconds = [report.seconds for report in reports]
    assert seconds == sorted(seconds)
    assert run.seconds >= seconds[-1]


def test_a_report_of_many_updates() -> None:
    """With masks; the last one comes at the end, whatever the interval is."""
    x, y = stream(22)
    mask = torch.rand(22, 2, generator=torch.Generator().manual_seed(1)) < 0.4
    run = train(Chunk(x, y, None, mask), interval=3600)
    updates = list(run)
    (report,) = run.history
    total = sum(own.loss.item() * int(own.steps) for own in updates)
    assert report.loss == pytest.approx(total / int(mask.sum()), abs=1e-12)
    assert report.index == 5


def test_windows_of_padding_alone_give_no_report() -> None:
    """They have no loss; a 0 would be the best one ever, and stop the run for want of a gain."""
    x, y = stream(30)
    mask = torch.ones(30, 2, dtype=torch.bool)
    mask[4:12] = mask[24:] = False
    seen, stop = [], EarlyStop(patience=4)

    def watched(loss: float) -> bool:
        seen.append(loss)
        return stop(loss)

    run = train(Chunk(x, y, None, mask), interval=0, stop=watched)
    updates = list(run)
    losses = [float(own.loss) for own in updates if int(own.steps)]
    assert len(updates) > len(losses) == 4
    assert [report.loss for report in run.history] == seen == pytest.approx(losses, abs=1e-12)
    assert stop.best == min(losses) > 0
    assert [report.position for report in run.history] == [4, 16, 20, 24]


def test_the_speed_of_packed_rows_counts_all_of_their_steps(clock: Clock) -> None:
    x, y = stream(12, rows=1)
    packed = PackedSequences([(x[:9, 0], y[:9, 0]), (x[:3, 0], y[:3, 0])], 2)
    run = train(packed, k1=9, interval=3600)
    for _ in run:
        clock.now += 3
    (report,) = run.history
    assert (report.steps_per_second, report.tokens_per_second) == (3, 6)


# -- waiting for the device ---------------------------------------------------------------------


class Readings(TorchDispatchMode):
    """Counts what would wait for a device: each value that becomes a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += func in waits
        return func(*args, **(kwargs or {}))


@contextmanager
def readings() -> Iterator[Callable[[], int]]:
    with Readings() as mode:
        yield lambda: mode.count


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are not looked at before a report; on a CPU they are, where it costs nothing."""
    monkeypatch.setattr(Guard, "reads_now", lambda self, value: False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k1": 2, "k2": 5, "burn_in": 1, "context": 1},
        {"accumulate": 2, "micro_batches": 2},
        {"clip_norm": 1.0, "clip_value": 0.5},
        {"ema_decay": 0.9},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_nothing_is_read_between_reports(options: dict[str, Any], masked: bool) -> None:
    x, y = stream(22)
    flags = (torch.rand(22, 2) < 0.2, torch.rand(22, 2) < 0.7) if masked else (None, None)
    run = train(Chunk(x, y, *flags), interval=3600, updates=3, **options)
    next(run)
    with readings() as count:
        next(run)
        next(run)
        assert count() == 0
        run.finish()
        assert count() == 2  # the mean loss and the norm
    assert len(run.history) == 1


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_each_report_reads_two_numbers() -> None:
    run = train(interval=0, epochs=3)
    next(run)
    with readings() as count:
        for _ in range(6):
            next(run)
        assert count() == 12


# -- stopping -----------------------------------------------------------------------------------


def test_a_run_is_stopped_by_a_report() -> None:
    losses: list[float] = []

    def stop(loss: float) -> bool:
        losses.append(loss)
        return len(losses) == 3

    run = train(interval=0, stop=stop)
    assert [own.index for own in run] == [0, 1, 2]
    assert losses == [report.loss for report in run.history]


def test_bad_interval() -> None:
    with pytest.raises(ValueError, match="interval: expected at least 0 seconds, found -1"):
        train(interval=-1)


def test_a_long_history_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftbptt.training.reports.report._MAX_REPORTS", 4)
    run = train(interval=0)
    indices = [update.index for update in run]
    kept = [report.index for report in run.history]
    assert len(indices) > 5
    assert len(kept) <= 4
    assert kept == sorted(kept)
    assert kept[-1] == indices[-1]


def test_the_norm_is_that_of_the_gradients_before_the_step() -> None:
    """Nesterov's momentum over many tensors at once is added to the gradients themselves."""
    norms = []
    for together in (False, True):
        params = made()[0].parameters()
        optimizer = torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True, foreach=together)
        norms.append([float(own.grad_norm) for own in train(optimizer=optimizer)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def test_losses_that_were_added_up_before_a_checkpoint_count() -> None:
    whole, first, second = Meter(1e9), Meter(1e9), Meter(1e9)
    losses = torch.rand(3000, generator=torch.Generator().manual_seed(0)).tolist()
    for i, loss in enumerate(losses):
        whole.add(measured(loss, 1 + i % 3))
        if i == 2500:
            second.load_state_dict(first.state_dict(), torch.device("cpu"))
        (first if i < 2500 else second).add(measured(loss, 1 + i % 3))
    found, expected = (own.report(update(2999)) for own in (second, whole))
    assert found.loss == pytest.approx(expected.loss, rel=1e-9)
    assert second.first_nonfinite is None
    first.add(measured(math.nan))
    assert not first.unread_is_finite()


def test_norm_is_a_tensor_until_it_is_read() -> None:
    own = update(norm=2.0)
    assert isinstance(own.grad_norm, Tensor)
    assert repr(own) == "Update(index=0, epoch=0, position=0)"
