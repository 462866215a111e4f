"""Runs that are killed at random moments, again and again, and in the end are as if in one go."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from ftbptt.training import load_checkpoint

from ..forks import fork_context
from .killable import NAME, train, train_until_interrupted
from .resuming import IN_RANDOM_ORDER, Run, assert_same

pytestmark = IN_RANDOM_ORDER

Start = Callable[[Callable[[Path], None], Path], BaseProcess]


@pytest.fixture(scope="module")
def start() -> Start:
    context = fork_context()

    def start(target: Callable[[Path], None], folder: Path) -> BaseProcess:
        process = context.Process(target=target, args=(folder,), daemon=True)
        process.start()
        return process

    return start


def _stamp(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # none yet, or between the two renames
        return None


def _wait_for_another(file: Path, before: int | None, process: BaseProcess) -> None:
    until = time.monotonic() + 60
    while _stamp(file) in (None, before):
        assert process.is_alive()
        assert time.monotonic() < until
        time.sleep(0.001)


def _check(file: Path) -> None:
    """Resumed for three updates more, it is a run that was never cut off."""
    updates = int(load_checkpoint(file)["index"]) + 3
    resumed = Run(NAME, 99, file, resume=True, epochs=None, updates=updates).go()
    once = Run(NAME, 0, epochs=None, updates=updates).go()
    assert_same(resumed.seen, once.seen[-3:])
    assert_same(resumed.left(), once.left())


@pytest.mark.parametrize("kills", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_many_times(kills: int, start: Start, tmp_path: Path) -> None:
    """The last checkpoint is always whole, and never older than one that was there before."""
    file, index, moments = tmp_path / "run.pt", 0, random.Random(0)
    for kill in range(kills):
        before = _stamp(file)
        process = start(train, tmp_path)
        makes_one = kill % 5 > 0 or not index
        if makes_one:  # else it may be killed while it is being resumed
            _wait_for_another(file, before, process)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found = load_checkpoint(file)["index"]  # without a warning, which would be an error
        assert found >= index + makes_one
        index = found
    assert {f.name for f in tmp_path.iterdir()} <= {"run.pt", "run.pt.previous", "run.pt.tmp"}
    _check(file)


def test_interrupted_again_and_again(start: Start, tmp_path: Path) -> None:
    file, index, moments = tmp_path / "run.pt", 0, random.Random(1)
    for _ in range(15):
        process = start(train_until_interrupted, tmp_path)
        _wait_for_another(file, _stamp(file), process)
        time.sleep(moments.uniform(0, 0.05))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == 0
        found = load_checkpoint(file)["index"]
        assert found > index
        index = found
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run.pt", "run.pt.previous"]
    _check(file)
