"""What ends a run of many ranks before its time: all of them stop, and say why."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DeviceMesh

from ftbptt.distributed import RankFailed
from ftbptt.training import Events

from .rank_runs import ROWS, STEPS, new_run, train
from .ranks import Ranks
from .streams import stream


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


def _left(mesh: DeviceMesh) -> str:
    try:
        for update in new_run(mesh):
            if mesh.get_rank() == 0 and update.index == 2:
                break
    except RankFailed as error:
        return str(error)
    return "left"


def test_a_loop_that_one_rank_leaves(two: Ranks) -> None:
    assert two.call(_left) == ["left", "rank 0 has left the run: its loop over the run was left"]


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


def _hung(mesh: DeviceMesh) -> tuple[float, str]:
    """The second rank stops answering; the group waits two seconds for it."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=2))
    slept: list[float] = []

    def sleep(update: Any) -> None:
        if mesh.get_rank() == 1 and update.index == 3:
            slept.append(time.sleep(9) or 0)

    began = time.monotonic()
    try:
        train(group, "tensors", events=Events(after_update=sleep))  # type: ignore[arg-type]
    except RankFailed as error:
        return time.monotonic() - began, str(error)
    return 0.0, "no error"


def test_a_rank_that_hangs() -> None:
    ranks = Ranks(2)
    (took, said), (_, own_said) = ranks.call(_hung)
    ranks.stop()
    assert 2 <= took < 9  # the other one was still asleep
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
