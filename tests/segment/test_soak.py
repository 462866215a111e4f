"""Very many segments in one process: nothing grows, is compiled anew, or gets slower."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from ftbptt import make_train_segment
from ftbptt.training import train_stream

from ..cells.problems import mse, named

WARM = 2_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def handles() -> tuple[int, int]:
    """Open files and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@contextmanager
def as_it_is_now(seconds: Callable[[], float]) -> Iterator[Callable[[], float]]:
    """(seconds) -> what returns its result in this process as it is now, kept as a fork of it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def serve(pipe: Connection) -> None:
        while pipe.recv():
            pipe.send(seconds())

    def ask() -> float:
        ours.send(True)
        answer: float = ours.recv()
        return answer

    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ask
    finally:
        ours.send(False)
        process.join()
        ours.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_hundred_thousand_segments(count: int, threads: Callable[[int], None]) -> None:
    threads(1)  # a fork has no others, and would wait for them
    cell = nn.GRUCell(3, 5)
    segment = make_train_segment(cell, mse)
    params = named(cell)
    x, y, h = torch.randn(8, 2, 3), torch.zeros(8, 2, 5), torch.zeros(2, 5)

    def run(calls: int, state: torch.Tensor) -> torch.Tensor:
        for i in range(calls):
            k = 8 - i % 3  # ragged
            state = segment(params, state, x[:k], y[:k]).state
        return state

    def seconds() -> float:
        began = time.perf_counter()
        run(100, h)
        return time.perf_counter() - began

    h = run(WARM, h)
    # The old process and the young one in turns: a machine's speed drifts by more than 3%.
    with as_it_is_now(seconds) as seconds_when_young:
        before, open_before = resident_bytes(), handles()
        counts = segment.trace_count, segment.compile_count
        h = run(count, h)
        assert resident_bytes() <= 1.01 * before
        assert handles() == open_before
        assert (segment.trace_count, segment.compile_count) == counts
        assert h.isfinite().all()
        if count > 50_000:
            slower = [seconds() / seconds_when_young() for _ in range(300)]
            assert statistics.median(slower) <= 1.03


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_updates_of_a_stream() -> None:
    cell = nn.GRUCell(3, 5)
    params = named(cell)
    segment = make_train_segment(cell, mse, backend="eager")
    data = (torch.randn(400, 2, 3), torch.zeros(400, 2, 5))
    run = train_stream(
        segment, params, torch.zeros(2, 5), data, torch.optim.SGD(params.values(), lr=1e-3), k1=4,
        epochs=None, progress=False, interval=1e9,
    )  # fmt: skip
    for _ in range(WARM // 2):
        next(run)
    before, open_before = resident_bytes(), handles()
    for _ in range(2_000):
        next(run)
    assert resident_bytes() <= 1.01 * before
    assert handles() == open_before
