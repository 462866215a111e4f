"""Small kernels run on one thread, which waits for no other (see tiles.h)."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from ftbptt.kernels.cpu import loop
from ftbptt.kernels.cpu.build import load, start

from .scans import Scan, source_of
from .test_fused_shapes import data_for, gated

WAKING = loop._WAKING  # as it is imported: tests change it

SOURCE = """
#include "tiles.h"

extern "C" void run(void* const* memory, const int64_t* numbers) {
  *static_cast<int64_t*>(memory[0]) = ftbptt::threads_for(numbers[0], numbers[1]);
}
"""


@pytest.mark.parametrize(
    ("count", "work", "waking", "used"),
    [
        (1, 10**12, 1, 1),
        (2, 5, 1, 1),
        (2, 6, 1, 2),  # 6 / (3 + 1) is 1.5
        (16, 47, 29, 1),
        (16, 48, 29, 16),  # 48 / (3 + 29) as well
        (3, 0, 1, 1),
        (64, 10**15, 1 << 22, 64),
    ],
)
def test_all_threads_or_one(
    count: int, work: int, waking: int, used: int, threads: Callable[[int], None]
) -> None:
    """All if they are at least 1.5 times as fast, with the time that it takes to wake them."""
    threads(count)
    found = torch.zeros(1, dtype=torch.int64)
    pointers, numbers = torch.tensor([found.data_ptr()]), torch.tensor([work, waking])
    load(str(start(SOURCE)))(pointers.data_ptr(), numbers.data_ptr())
    assert found.item() == used


@pytest.mark.parametrize("units", [16, 32])
def test_work_of_a_kernel(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 5 units^2, 14 elementwise results for each unit, and one for the row."""
    monkeypatch.setattr(loop, "_WAKING", WAKING)
    source = source_of(Scan(gated, *data_for(1, (1,), units)).block)
    found = re.search(r"threads_for\(steps \* total \* (\d+), (\d+)\)", source)
    assert found is not None
    work, waking = map(int, found.groups())
    assert work == 5 * units**2 + 16 * (14 * units + 1)
    assert waking == WAKING > 0
