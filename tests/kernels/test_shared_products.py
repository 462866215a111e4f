"""Threads that share the products of the same rows, and wait for each other (see tiles.h)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment
from ftbptt.kernels.cpu.build import load, start

from ..cells import problem
from ..oracle import check, check_low_precision
from .scans import Scan, random, share_all_products, source_of
from .test_fused_shapes import data_for, gated, grouped

SetThreads = Callable[[int], None]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    share_all_products(monkeypatch)


def chained(
    given: Sequence[Tensor], x: Sequence[Tensor], carried: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Products that read what products have written; the last one is the next carry."""
    into, back = given
    wide = carried[0] @ into
    other = (wide @ back) @ into + x[0]
    return [other @ back], [wide]


def chained_data(rows: int, units: int) -> tuple[list[Tensor], ...]:
    given = [random(units, 3 * units, seed=1) / units, random(3 * units, units, seed=2) / units]
    return given, [random(4, rows, 3 * units, seed=3)], [random(rows, units, seed=4)]


@pytest.mark.parametrize("units", [3, 33])
def test_units_rows_and_threads(units: int, threads: SetThreads, shared: None) -> None:
    for count in (2, 3):
        threads(count)
        for rows in (1, 7, 100):
            Scan(gated, *data_for(3, (rows,), units)).check()
            Scan(chained, *chained_data(rows, units)).check()


def test_models(threads: SetThreads, shared: None) -> None:
    for count in (2, 3):
        threads(count)
        for models, rows in ((2, 1), (3, 67)):
            weight = random(models, 17, 17, seed=2)
            x, h = random(3, models, rows, 17), random(models, rows, 17, seed=1)
            Scan(grouped, [0.5 * weight], [x], [h]).check()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lstm_readout", torch.float64), ("layer_norm_lstm", torch.float32),
     ("lstm_readout", torch.bfloat16)],
)  # fmt: skip
def test_cells(
    name: str, dtype: torch.dtype, threads: SetThreads, shared: None, kernels: None
) -> None:
    threads(3)
    given = problem(name, dtype)
    segment = make_train_segment(given.step, given.loss, backend="fused")
    if dtype == torch.float64:
        check(segment, given, 5)
    else:
        check_low_precision(segment, given, 1, 5)


def test_no_thread_reads_ahead_of_another(threads: SetThreads, shared: None) -> None:
    """The same bits, whoever is late."""
    data: Any = data_for(100, (5,), 65)
    scans = Scan(gated, *data), Scan(chained, *chained_data(5, 65))
    threads(1)
    alone = [scan.fused() for scan in scans]
    for count in (2, 3, 4) * 5:
        threads(count)
        for scan, wanted in zip(scans, alone, strict=True):
            assert all(map(torch.equal, scan.fused(), wanted))


@pytest.mark.parametrize(
    ("units", "dtype", "few", "most"),
    [(16, torch.float32, 0, 0), (256, torch.float32, 2, 10), (1024, torch.float32, 8, 160),
     (1024, torch.float64, 8, 320), (1024, torch.bfloat16, 8, 80)],
)  # fmt: skip
def test_products_with_large_weights_are_shared(
    units: int, dtype: torch.dtype, few: int, most: int
) -> None:
    """If a thread has at most so many rows, and between so many; here 5 units^2 weights, twice."""
    given = [[t.to(dtype) for t in own] for own in data_for(1, (1,), units)]
    source = source_of(Scan(gated, *given).block)
    found = re.search(r"Tiles tiles\(threads, total, 1, \d+, {(\d+), (\d+)}\)", source)
    assert found is not None
    assert tuple(map(int, found.groups())) == (few, most)


# What a kernel makes of so many rows in groups: who shares, and how often each row is taken.
TILES = """
#include "tiles.h"
using namespace ftbptt;

extern "C" void run(void* const* memory, const int64_t* numbers) {
  int64_t* const taken = static_cast<int64_t*>(memory[0]);
  int64_t* const found = static_cast<int64_t*>(memory[1]);
  const Tiles tiles(omp_get_max_threads(), numbers[0], numbers[1], 3, {numbers[2], numbers[3]});
  found[0] = tiles.shared;
  found[1] = tiles.threads;
#pragma omp parallel num_threads(tiles.threads)
  for (const Tile tile : tiles.of_thread())
    for (int64_t r = tile.begin; r < tile.end; ++r) {
#pragma omp atomic
      ++taken[tile.first + r];
    }
}
"""


@pytest.mark.parametrize(
    ("rows", "groups", "few", "most", "is_shared", "sharers"),
    [
        (0, 1, 8, 99, False, 1),
        (1, 1, 8, 99, True, 4),
        (1, 1, 0, 99, False, 1),
        (32, 1, 8, 99, True, 4),
        (33, 1, 8, 99, False, 4),
        (16, 1, 8, 2, True, 2),
        (17, 1, 8, 2, False, 4),  # two threads would take longer than four that do not share
        (8, 1, 8, 1, False, 4),
        (8, 2, 8, 99, True, 4),
        (8, 4, 8, 99, False, 4),  # a group for each thread
    ],
)
def test_who_shares(
    rows: int, groups: int, few: int, most: int, is_shared: bool, sharers: int, threads: SetThreads
) -> None:
    """With four threads. Each row is taken once."""
    threads(4)
    taken, found = torch.zeros(rows, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    pointers = torch.tensor([taken.data_ptr(), found.data_ptr()])
    numbers = torch.tensor([rows, groups, few, most])
    load(str(start(TILES)))(pointers.data_ptr(), numbers.data_ptr())
    assert found.tolist() == [is_shared, sharers]
    assert (taken == 1).all()
