"""When a caller is called, with what, and what is no function."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import SegmentOutput, TrainSegment, make_train_segment
from ftbptt.training import Chunk, Events, Report, SequenceEnd, Stream, Update, Window, train_stream

from .streams import Tagger, cross_entropy, stream, tagger, zeros

MOMENTS = [
    "before_window", "after_window", "before_update", "after_update", "sequence_end",
    "epoch_start", "epoch_end", "report",
]  # fmt: skip


@cache
def made() -> tuple[Tagger, TrainSegment]:
    module = tagger()
    return module, make_train_segment(module, cross_entropy, backend="eager")


def params() -> dict[str, Tensor]:
    return dict(made()[0].named_parameters())


def train(data: Any, rows: int = 2, **options: Any) -> Stream:
    module, segment = made()
    module.load_state_dict(tagger().state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    options = {"k1": 4, "progress": False, "interval": 0} | options
    return train_stream(segment, params(), zeros(rows), data, optimizer, **options)


class Log:
    """All calls of a run, in order."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.events = Events(**{name: self.of(name) for name in names or MOMENTS})

    def of(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, args))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def args(self, name: str) -> list[Any]:
        found = [args for own, args in self.calls if own == name]
        return [args[0] if len(args) == 1 else args for args in found]


WINDOW = ["before_window", "after_window"]
UPDATE = ["before_update", "report", "after_update"]


def test_order_and_arguments() -> None:
    """10 steps in windows of 4, twice."""
    log = Log()
    updates = list(train(stream(10), events=log.events, epochs=2))
    epoch = ["epoch_start", *3 * (WINDOW + UPDATE), "sequence_end", "epoch_end"]
    assert log.names() == 2 * epoch
    assert log.args("epoch_start") == log.args("epoch_end") == [0, 1]
    assert log.args("sequence_end") == 2 * [SequenceEnd(10, None)]
    assert log.args("after_update") == updates
    kinds = {
        "before_window": (Window, Chunk),
        "after_window": (Window, SegmentOutput),
        "before_update": (list,),
        "after_update": (Update,),
        "sequence_end": (SequenceEnd,),
        "epoch_start": (int,),
        "epoch_end": (int,),
        "report": (Report,),
    }
    for name, args in log.calls:
        assert tuple(map(type, args)) == kinds[name]
    for (window, chunk), (same, result), update in zip(
        log.args("before_window"), log.args("after_window"), updates, strict=True
    ):
        assert window == same
        assert window.end == update.position
        assert len(chunk.x) == len(result.out) == window.end - window.start
        assert torch.equal(result.loss, update.loss)
        assert all(map(torch.equal, result.state, update.state))


def test_a_window_is_given_with_its_data() -> None:
    """The steps with a gradient, without those that warm the state up."""
    log = Log("before_window")
    x, y = stream(14)
    list(train((x, y), events=log.events, k1=4, k2=3, burn_in=2))
    assert [window for window, _ in log.args("before_window")] == [
        Window(0, 0, 1, 4),
        Window(1, 3, 5, 8),
        Window(2, 7, 9, 12),
        Window(3, 11, 13, 14),
    ]
    for window, chunk in log.args("before_window"):
        assert torch.equal(chunk.x, x[window.start : window.end])
        assert torch.equal(chunk.y, y[window.start : window.end])


def test_accumulation() -> None:
    """3 windows to 2 updates, since an update ends with its epoch."""
    log = Log()
    list(train(stream(10), events=log.events, accumulate=2, epochs=2))
    epoch = [
        "epoch_start", *WINDOW, *WINDOW, *UPDATE, *WINDOW, *UPDATE, "sequence_end", "epoch_end",
    ]  # fmt: skip
    # The epoch ends where the next window is asked for.
    assert log.names() == 2 * epoch
    assert [own.position for own in log.args("after_update")] == [8, 10, 8, 10]


def test_micro_batches() -> None:
    """Around each of the parts of a window, which have the rows between them."""
    log = Log()
    x, y = stream(7, rows=3)
    list(train((x, y), 3, events=log.events, micro_batches=2))
    assert log.names() == [
        "epoch_start", *2 * (WINDOW + WINDOW + UPDATE), "sequence_end", "epoch_end",
    ]  # fmt: skip
    pairs = log.args("before_window")
    assert [window.index for window, _ in pairs] == [0, 0, 1, 1]
    assert [chunk.x.shape[1] for _, chunk in pairs] == [2, 1, 2, 1]
    assert torch.equal(torch.cat([pairs[0][1].x, pairs[1][1].x], 1), x[:4])
    for (_, chunk), (_, result) in zip(pairs, log.args("after_window"), strict=True):
        assert result.out.shape[:2] == chunk.y.shape


@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_before_the_update(clip: float | None) -> None:
    """They are clipped, those of the optimizer itself; the parameters are still as before."""
    seen: list[tuple[list[Tensor], list[Tensor]]] = []

    def look(grads: list[Tensor]) -> None:
        own = list(params().values())
        assert all(p.grad is grad for p, grad in zip(own, grads, strict=True))
        seen.append(([p.detach().clone() for p in own], [grad.clone() for grad in grads]))

    def change(grads: list[Tensor]) -> None:
        grads[0].zero_()

    run = train(stream(8), events=Events(before_update=[look, change]), clip_norm=clip)
    before = [p.detach().clone() for p in params().values()]
    next(run)
    values, grads = seen[0]
    assert all(map(torch.equal, values, before))
    norm = torch.nn.utils.get_total_norm(grads).item()
    assert (norm == pytest.approx(clip, rel=1e-3)) if clip else norm > 0.01
    after = list(params().values())
    assert torch.equal(after[0], before[0])  # the caller has taken its gradient away
    for p, old, grad in list(zip(after, before, grads, strict=True))[1:]:
        assert torch.equal(p.detach(), old - 0.5 * grad)


def test_a_report_comes_before_the_update_is_told() -> None:
    """So that a function of updates finds it in the history."""
    log = Log("report", "after_update")
    run = train(stream(10), events=log.events, interval=3600)
    list(run)
    assert log.names() == [*3 * ["after_update"], "report"]
    assert log.args("report") == run.history


def test_an_end_of_an_epoch_is_told_once(tmp_path: Path) -> None:
    """Also by a run that goes on from a checkpoint of its end; the parameters are the same then."""
    whole = train(stream(10), epochs=3)
    expected = [update.loss for update in whole]
    log, losses = Log("epoch_start", "epoch_end", "sequence_end"), []
    for epochs in (1, 1, 2, 3):
        options = {"epochs": epochs, "checkpoint": tmp_path / "run.pt", "resume": True}
        losses += [update.loss for update in train(stream(10), events=log.events, **options)]
    assert log.args("epoch_start") == log.args("epoch_end") == [0, 1, 2]
    assert len(log.args("sequence_end")) == 3
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)


def test_an_error_where_an_epoch_starts(tmp_path: Path) -> None:
    """The run goes on behind the epoch before, whose end is not told again."""
    log = Log("epoch_end")
    starts = []

    def start(epoch: int) -> None:
        starts.append(epoch)
        if starts == [0, 1]:
            raise ZeroDivisionError

    log.events.epoch_start = (start,)
    run = train(stream(10), events=log.events, epochs=2, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ZeroDivisionError):
        list(run)
    assert [update.index for update in run] == [3, 4, 5]
    assert starts == [0, 1, 1]
    assert log.args("epoch_end") == [0, 1]


def test_several_functions_are_called_in_order() -> None:
    called: list[str] = []
    events = Events(
        epoch_start=lambda epoch: called.append("one"),
        epoch_end=[lambda epoch: called.append("two"), lambda epoch: called.append("three")],
    )
    list(train(stream(4), events=events))
    assert called == ["one", "two", "three"]


def test_an_error_of_the_caller_comes_through() -> None:
    def fail(window: Window, chunk: Chunk) -> None:
        raise KeyError(window.index)

    run = train(stream(10), events=Events(before_window=fail))
    with pytest.raises(KeyError, match="0"):
        next(run)


def test_stop_holds_if_the_report_fails() -> None:
    """The caller goes on, but the run has ended."""

    def fail(report: Report) -> None:
        raise ZeroDivisionError

    run = train(stream(10), events=Events(report=fail), stop=lambda loss: True)
    with pytest.raises(ZeroDivisionError):
        next(run)
    assert list(run) == []


def test_a_scaled_window_has_its_own_loss() -> None:
    """What a gradient scaler multiplies is the gradients alone."""
    losses = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**16)):
        log = Log("after_window")
        list(train(stream(8), events=log.events, scaler=scaler))
        losses.append(torch.stack([output.loss for _, output in log.args("after_window")]))
    torch.testing.assert_close(losses[1], losses[0])


# -- ends of sequences --------------------------------------------------------------------------


def ends(reset: Tensor, **options: Any) -> list[SequenceEnd]:
    log = Log("sequence_end")
    x, y = stream(len(reset))
    list(train(Chunk(x, y, reset), events=log.events, **options))
    return log.args("sequence_end")


def at(steps: int, *places: tuple[int, int]) -> Tensor:
    reset = torch.zeros(steps, 2, dtype=torch.bool)
    for t, row in places:
        reset[t, row] = True
    return reset


PLACES = ((0, 0), (0, 1), (3, 1), (4, 0), (4, 1), (9, 0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k1": 1},
        {"k1": 2, "k2": 7},
        {"k1": 3, "burn_in": 2, "k2": 5, "context": 1},
        {"k1": 4, "k2": 2},
        {"k1": 2, "k2": 5, "fresh": True},
        {"k1": 4, "micro_batches": 2},
        {"k1": 4, "accumulate": 3},
        {"k1": 50},
    ],
)
def test_each_end_is_told_once(options: dict[str, Any]) -> None:
    """However windows overlap; the very start is no end of anything."""
    told = ends(at(11, *PLACES), **options)
    assert told == [*(SequenceEnd(*place) for place in PLACES[2:]), SequenceEnd(11, None)]


def test_ends_in_each_epoch() -> None:
    told = ends(at(6, (0, 0), (2, 1)), epochs=2)
    assert told == 2 * [SequenceEnd(2, 1), SequenceEnd(6, None)]


def test_all_rows_at_once() -> None:
    reset = torch.zeros(9, dtype=torch.bool)
    reset[[0, 5]] = True
    assert ends(reset) == [SequenceEnd(5, None), SequenceEnd(9, None)]


def test_fresh_windows_with_gaps() -> None:
    """Windows [0, 3), [6, 9), [12, 15): what lies between them is not read."""
    told = ends(at(15, (2, 0), (4, 1), (6, 0), (7, 1), (14, 1)), k1=6, k2=3, fresh=True)
    assert told == [
        SequenceEnd(2, 0), SequenceEnd(6, 0), SequenceEnd(7, 1), SequenceEnd(14, 1),
        SequenceEnd(15, None),
    ]  # fmt: skip


def test_an_end_is_told_before_its_window() -> None:
    log = Log("sequence_end", "before_window")
    x, y = stream(8)
    list(train(Chunk(x, y, at(8, (5, 1))), events=log.events))
    assert log.names() == ["before_window", "sequence_end", "before_window", "sequence_end"]


def test_time_behind_the_rows() -> None:
    layer = torch.nn.GRU(3, 5, batch_first=True).double()
    segment = make_train_segment(layer, lambda out, y: out.mean(2), backend="eager")
    log = Log("sequence_end")
    x, _ = stream(11)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    data = Chunk(x.transpose(0, 1), None, at(11, (4, 1), (6, 0)).t())
    list(train_stream(segment, dict(layer.named_parameters()), None, data, optimizer, k1=3,
                      events=log.events, progress=False))  # fmt: skip
    assert log.args("sequence_end") == [
        SequenceEnd(4, 1),
        SequenceEnd(6, 0),
        SequenceEnd(11, None),
    ]


@pytest.mark.parametrize(("time_dim", "axis"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)])
def test_with_the_sequences_on_an_axis_of_their_own(time_dim: int, axis: int) -> None:
    """``reset`` has its axes in the order of x, though fewer of them."""
    segment = make_train_segment(
        lambda params, x_t, h: (x_t * params["w"] + h, h),
        lambda out, y: out.square().mean(), backend="eager", time_dim=time_dim,
        in_dims=(None, 0, axis, None),
    )  # fmt: skip
    params = {"w": torch.ones(())}
    x = torch.zeros(11, 3).movedim(0, time_dim).unsqueeze(axis)
    x = x.repeat_interleave(2, axis)  # of two sequences
    reset = at(11, (4, 1), (6, 0))
    log = Log("sequence_end")
    data = Chunk(x, None, reset if axis > time_dim else reset.t())
    run = train_stream(segment, params, torch.zeros(2, 3), data,
                       torch.optim.SGD(params.values(), lr=0.1), k1=3, events=log.events,
                       progress=False)  # fmt: skip
    assert len(list(run)) == 4
    assert log.args("sequence_end") == [
        SequenceEnd(4, 1), SequenceEnd(6, 0), SequenceEnd(11, None)
    ]  # fmt: skip


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("value", [None, 5, [print, "print"], "print"])
def test_what_cannot_be_called(name: str, value: Any) -> None:
    bad = value[-1] if isinstance(value, list) else value[0] if isinstance(value, str) else value
    words = re.escape(f"Events: {name} has {bad!r}, which cannot be called.")
    with pytest.raises(TypeError, match=words):
        Events(**{name: value})


def test_a_moment_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'after_epoch'"):
        Events(after_epoch=print)
