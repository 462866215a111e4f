"""What ends a run of many ranks before its time: all of them stop, and say why."""

from __future__ import annotations

import re
import signal
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import DeviceMesh

from ftbptt.distributed import RankFailed, ranks, reduction
from ftbptt.distributed.reduction import Reduction
from ftbptt.segment import execute
from ftbptt.training import Chunk, Events, train_stream
from ftbptt.training.checkpoints.shared import SharedCheckpoints
from ftbptt.training.updates.rank_sync import RankSync

from ..training.streams import Tagger, stream
from .rank_runs import ROWS, STEPS, data_of, new_run, numbers_ahead, segment_of, train
from .ranks import Ranks


def _failing(mesh: DeviceMesh, where: str, sharded: bool) -> str:
    def fail(*_: Any) -> None:
        seen.append(1)
        if mesh.get_rank() == 1 and len(seen) == 3:
            raise KeyError("my own mistake")

    seen: list[int] = []
    try:
        train(mesh, "tensors", events=Events(**{where: fail}), sharded=sharded)
    except (KeyError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("where", ["before_window", "before_update", "after_update"])
def test_an_error_on_one_rank_ends_all(where: str, sharded: bool, two: Ranks) -> None:
    other, own = two.call(_failing, where, sharded)
    assert own == "KeyError: 'my own mistake'"
    assert other == "RankFailed: rank 1 has left the run: KeyError: 'my own mistake'"


def _left(mesh: DeviceMesh, by_an_error: bool) -> str:
    try:
        for update in new_run(mesh):
            if mesh.get_rank() == 0 and update.index == 2:
                if by_an_error:
                    raise ArithmeticError("my own mistake")
                break
    except (ArithmeticError, RankFailed) as error:
        return str(error)
    return "left"


@pytest.mark.parametrize(
    ("by_an_error", "told", "line"),
    [(False, "left", "break"), (True, "my own mistake", 'raise ArithmeticError("my own mistake")')],
)
def test_a_loop_that_one_rank_leaves(by_an_error: bool, told: str, line: str, two: Ranks) -> None:
    own, other = two.call(_left, by_an_error)
    assert own == told
    left = r"rank 0 has left the run: its loop over the run was left in line \d+ of "
    assert re.fullmatch(f"{left}{re.escape(__file__)}: {re.escape(line)}", other)


def _not_finite(mesh: DeviceMesh, mode: str) -> tuple[int, list[str], list[Any]]:
    x, y = stream(STEPS, ROWS)
    x[9, 4] = float("nan")  # in a row of the second rank, in the third window
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = new_run(mesh, data=(x, y), on_nonfinite=mode)
        count = sum(1 for _ in run)
    said = [str(warning.message) for warning in caught]
    return count, said, [p.tolist() for p in run.params.values()]


@pytest.mark.parametrize(("mode", "updates"), [("stop", 2), ("skip", 14)])
def test_a_loss_that_is_not_finite_on_one_rank(mode: str, updates: int, two: Ranks) -> None:
    (first, other_said, params), (second, own_said, own_params) = two.call(_not_finite, mode)
    assert first == second == updates
    assert params == own_params
    assert len(own_said) == 1
    assert "the loss of update 2 is nan" in own_said[0]
    assert "x is first not finite at step 9, row 4;" in own_said[0]  # of all rows
    stopped = ["ftbptt: rank 1 stops the run before update 2."]
    assert other_said == (stopped if mode == "stop" else [])


def _stopped(mesh: DeviceMesh) -> tuple[int, int]:
    reports: list[float] = []

    def stop(loss: float) -> bool:
        reports.append(loss)
        return len(reports) == 3

    # The clock of the first rank says when: the others' would differ.
    interval = 0.0 if mesh.get_rank() == 0 else 1e9
    return len(train(mesh, "tensors", stop=stop, interval=interval)["losses"]), len(reports)


def test_all_stop_at_the_same_update(two: Ranks) -> None:
    first, second = two.call(_stopped)
    assert first == second
    assert first[1] == 3
    assert first[0] < 50


def _stopped_by_one(mesh: DeviceMesh) -> tuple[int, list[str], dict[str, Any]]:
    """As by an evaluation of its own."""
    reports: list[float] = []

    def stop(loss: float) -> bool:
        reports.append(loss)
        return len(reports) == 3 and mesh.get_rank() == 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(mesh, "tensors", stop=stop, interval=0.0)
    return len(found["losses"]), [str(own.message) for own in caught], found["params"]


def test_a_rank_that_stops_stops_all(two: Ranks) -> None:
    first, second = two.call(_stopped_by_one)
    assert first[0] == second[0] < 50
    assert first[1] == [f"ftbptt: rank 1 stops the run before update {first[0]}."]
    assert second[1] == []
    assert first[2] == second[2]


def _hung(mesh: DeviceMesh) -> tuple[float, float, list[float], str]:
    """The second rank stops answering; the group waits two seconds for it.

    When the rank began, failed and, if it slept, woke; and its error.
    """
    group = torch.distributed.new_group(timeout=timedelta(seconds=2))
    woke: list[float] = []

    def sleep(update: Any) -> None:
        if mesh.get_rank() == 1 and update.index == 3:
            time.sleep(6)
            woke.append(time.monotonic())

    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        train(group, "tensors", events=Events(after_update=sleep))  # type: ignore[arg-type]
    return began, time.monotonic(), woke, str(failed.value)


def test_a_rank_that_hangs() -> None:
    ranks = Ranks(2)
    (began, failed, _, said), (_, _, (woke,), own_said) = ranks.call(_hung)
    ranks.stop()
    assert began + 2 <= failed < woke  # the other one was still asleep
    assert said.startswith("rank 0: another rank died, or did not answer in time (")
    assert own_said.startswith("rank 1: another rank died, or did not answer in time (")


def _gone_on(mesh: DeviceMesh, folder: str) -> list[int]:
    """The loop is left on all ranks, and then gone on with."""
    run = new_run(mesh, updates=8, checkpoint=folder, checkpoint_every=2)
    seen = []
    for update in run:
        seen.append(update.index)
        if update.index == 2:
            break
    return seen + [update.index for update in run]


def test_a_loop_that_all_leave_and_go_on_with(two: Ranks, tmp_path: Path) -> None:
    for seen in two.call(_gone_on, str(tmp_path / "run")):
        assert seen == list(range(8))
    # The first rank deletes the ones before when the last one is whole: not before both are done.
    assert sorted(path.name[-1] for path in (tmp_path / "run").iterdir()) == ["6", "8"]


def _stopped_before_a_checkpoint(mesh: DeviceMesh, folder: str) -> int:
    run = new_run(
        mesh, checkpoint=folder, checkpoint_every=2, interval=1e9,
        stop=lambda loss: mesh.get_rank() == 0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the other rank stops the run
        return sum(1 for _ in run)


def test_a_rank_that_stops_where_all_would_save(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_stopped_before_a_checkpoint, str(tmp_path / "run")) == [2, 2]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["update-000000002"]


PLACES: dict[str, tuple[type, str, int]] = {
    "before a save": (RankSync, "check", 1),
    "in a save": (ranks.Ranks, "gather", 4),
    "while a save is waited for": (SharedCheckpoints, "wait", 3),
    "in an update": (Reduction, "finish", 3),
    "in a part of its gradients": (Reduction, "_send", 4),
    "while numbers go ahead of them": (ranks.Ranks, "sum_numbers", 3),
}


def _interrupted(mesh: DeviceMesh, where: str, folder: str) -> tuple[str, Any]:
    """Ctrl-C on one rank; then all go on."""
    owner, name, when = PLACES[where]
    before, calls = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> Any:
        result = before(*args, **options)
        calls.append(0)
        if mesh.get_rank() == 0 and len(calls) == when:
            signal.raise_signal(signal.SIGINT)
        return result

    with (
        mock.patch.object(execute, "_UNCUT_BYTES", 0),  # gradients in parts
        mock.patch.multiple(reduction, _LEAST_BYTES=1, _BUCKET_BYTES=300),
        numbers_ahead(mesh) if name == "sum_numbers" else nullcontext(),
    ):
        run = new_run(mesh, checkpoint=folder, checkpoint_every=2)
        said = "no error"
        with mock.patch.object(owner, name, call):
            try:
                for _ in run:
                    pass
            except (KeyboardInterrupt, RankFailed) as error:
                said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        there = Path(folder, f"update-{run.index:09d}", ".metadata").exists()
        for _ in run:
            pass
    return said, (there, run.index, [p.tolist() for p in run.params.values()])


def _undisturbed(mesh: DeviceMesh) -> Any:
    run = new_run(mesh)
    for _ in run:
        pass
    return True, run.index, [p.tolist() for p in run.params.values()]


@pytest.mark.parametrize("where", PLACES)
def test_ctrl_c_on_one_rank(where: str, two: Ranks, tmp_path: Path) -> None:
    """It ends all, a checkpoint has all updates, and what comes after is as it would have been."""
    expected = two.call(_undisturbed)[0]
    (own, found), (other, same) = two.call(_interrupted, where, str(tmp_path / "run"))
    assert own == "KeyboardInterrupt:  "
    assert other == "RankFailed: rank 0 has left the run: KeyboardInterrupt:  "
    assert found[:2] == same[:2] == expected[:2]
    assert found[2] == same[2]
    for value, wanted in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(torch.tensor(value), torch.tensor(wanted))


def _failing_in_a_save(mesh: DeviceMesh, folder: str) -> str:
    run = new_run(mesh, checkpoint=folder, checkpoint_every=2)

    def broken() -> Any:
        raise KeyError("state of my own")

    if mesh.get_rank() == 0:
        run._monitor.state_dict = broken  # type: ignore[method-assign]
    try:
        for _ in run:
            pass
    except (KeyError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_in_a_save_ends_all(two: Ranks, tmp_path: Path) -> None:
    own, other = two.call(_failing_in_a_save, str(tmp_path / "run"))
    assert own == "KeyError: 'state of my own'"
    assert other == "RankFailed: rank 0: KeyError: 'state of my own'"


def _failing_before_the_first_save(mesh: DeviceMesh, folder: str) -> str:
    def start(epoch: int) -> None:
        if mesh.get_rank() == 0:
            raise KeyError("my own mistake")

    run = new_run(mesh, checkpoint=folder, resume=False, events=Events(epoch_start=start))
    try:
        next(run)
    except (KeyError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_before_an_older_run_is_replaced(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run" / "update-000000007").mkdir(parents=True)
    own, other = two.call(_failing_before_the_first_save, str(tmp_path / "run"))
    assert own == "KeyError: 'my own mistake'"
    assert other == "RankFailed: rank 0 has left the run: KeyError: 'my own mistake'"


def _without_windows(mesh: DeviceMesh) -> str:
    x, y = stream(3, ROWS)
    with pytest.raises(ValueError, match="data: no window has a step with a loss") as caught:
        list(new_run(mesh, data=(x, y), k1=2, k2=8, context=5, epochs=None))
    return str(caught.value)


def test_data_without_a_loss_on_any_rank(two: Ranks) -> None:
    first, second = two.call(_without_windows)
    assert first == second


def _gone_on_without_a_checkpoint(mesh: DeviceMesh, after_a_break: bool) -> Any:
    """One rank fails in the second of three windows of an update, the other has run them all."""
    seen: list[int] = []

    def fail(*_: Any) -> None:
        seen.append(1)
        if mesh.get_rank() == 1 and len(seen) == 5:
            raise KeyError("my own mistake")

    run = new_run(mesh, accumulate=3, events=Events(before_window=fail))
    if after_a_break:
        for _ in run:
            break
    with pytest.raises((KeyError, RankFailed)):
        list(run)
    left = run.index
    for _ in run:
        pass
    return left, run.index, [p.tolist() for p in run.params.values()]


def _in_one_go(mesh: DeviceMesh) -> Any:
    run = new_run(mesh, accumulate=3)
    for _ in run:
        pass
    return 1, run.index, [p.tolist() for p in run.params.values()]


@pytest.mark.parametrize("after_a_break", [False, True])
def test_ranks_go_on_from_the_same_window(after_a_break: bool, two: Ranks) -> None:
    assert two.call(_gone_on_without_a_checkpoint, after_a_break) == two.call(_in_one_go)


def _shuffled(mesh: DeviceMesh, interrupted: bool) -> Any:
    """Ctrl-C on one rank, when its data has drawn the order of the epoch."""
    segment_of(Tagger)  # the first time, this draws

    def start(_: Any) -> None:
        seen.append(1)
        if interrupted and mesh.get_rank() == 1 and len(seen) == 1:
            raise KeyboardInterrupt

    seen: list[int] = []
    run = new_run(mesh, data=data_of("shuffled"), events=Events(epoch_start=start))
    if interrupted:
        with pytest.raises((KeyboardInterrupt, RankFailed)):
            next(run)
    for _ in run:
        pass
    return [p.tolist() for p in run.params.values()]


def test_a_rank_that_is_interrupted_while_it_begins(two: Ranks) -> None:
    """It reads the chunks in the order of the others when all go on."""
    assert two.call(_shuffled, True) == two.call(_shuffled, False)


def _reported(mesh: DeviceMesh) -> list[int]:
    run = new_run(mesh, interval=0.0, updates=5)
    for _ in run:
        pass
    return [report.index for report in run.history]


def test_all_updates_are_reported(two: Ranks) -> None:
    assert two.call(_reported) == [[0, 1, 2, 3, 4]] * 2


def _with_a_gap(mesh: DeviceMesh, mode: str) -> tuple[int, bool]:
    """One row of the second rank has a NaN, masked: it is in the gradient, but not in the loss."""
    x, y = stream(STEPS, ROWS)
    mask = torch.ones(STEPS, ROWS, dtype=torch.bool)
    x[9, ROWS - 1], mask[9, ROWS - 1] = float("nan"), False
    module = Tagger()
    params = dict(module.named_parameters())
    run = train_stream(
        segment_of(Tagger, padded=True), params, (torch.zeros(ROWS, 5).double(),) * 2,
        Chunk(x, y, mask=mask), torch.optim.SGD(params.values(), lr=0.1), k1=4, mesh=mesh,
        on_nonfinite=mode, progress=False,
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="the gradient's norm is nan in update 2, though its l"):
        updates = list(run)
    return len(updates), all(bool(p.isfinite().all()) for p in params.values())


def test_a_gradient_that_is_not_finite_under_a_mask(two: Ranks) -> None:
    """As on one process, where the window's own weight says that there is a mask."""
    assert two.call(_with_a_gap, "stop") == [(2, True)] * 2
