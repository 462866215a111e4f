"""Very many segments in one process: nothing grows, is compiled anew, or gets slower."""

from __future__ import annotations

import os
import statistics
import sys
import time
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_hundred_thousand_segments(count: int) -> None:
    cell = nn.GRUCell(3, 5)
    segment = make_train_segment(cell, mse)
    params = named(cell)
    x, y, h = torch.randn(8, 2, 3), torch.zeros(8, 2, 5), torch.zeros(2, 5)
    blocks: list[float] = []

    def run(calls: int, state: torch.Tensor) -> torch.Tensor:
        for first in range(0, calls, 500):
            times = []
            for i in range(first, first + 500):
                k = 8 - i % 3  # ragged
                began = time.perf_counter()
                result = segment(params, state, x[:k], y[:k])
                times.append(time.perf_counter() - began)
                state = result.state
            blocks.append(statistics.median(times))
        return state

    h = run(WARM, h)
    blocks.clear()
    before, open_before = resident_bytes(), handles()
    counts = segment.trace_count, segment.compile_count
    h = run(count, h)
    assert resident_bytes() <= 1.01 * before
    assert handles() == open_before
    assert (segment.trace_count, segment.compile_count) == counts
    assert h.isfinite().all()
    if count > 50_000:  # the best of a third: other work on the machine should not count
        third = len(blocks) // 3
        assert min(blocks[-third:]) <= 1.03 * min(blocks[:third])


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
