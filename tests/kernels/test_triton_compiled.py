"""Kernels compiled for an H200, without one: they fit a multiprocessor, and no type is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ftbptt.kernels.gpu.module import options_for, options_of_split

from ..cells import CELLS, WITH_ROWS

SHARED = 227 << 10  # bytes that one program can have
SPILLED = 512  # bytes written to memory for want of registers, in the whole kernel


def compiled(*names: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    own = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", *names]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# Those that spill most: in one program, split over several, of 32 rows, and with a reduction.
MOST = ["lstm-128-bf16", "lstm-256-fp32-256-rows", "lstm-512-tf32-128-rows", "norm-256-bf16"]
# With resets a product's operand comes from a mask, from which Triton took its layout.
RESETS = ["elman:float64:resets", "elman_by_head:float64:resets"]


@pytest.mark.parametrize(
    ("names", "count"),
    [(MOST, 8), pytest.param([], 40, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_they_fit(names: list[str], count: int) -> None:
    found = compiled(*names)
    assert len(found) == count
    found |= compiled("min_gru", *RESETS)
    assert sum(name.endswith("run_composed") for name in found) == 2
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED, (name, kernel)
        assert kernel["spilled"] <= SPILLED, (name, kernel)


@pytest.mark.parametrize(
    ("rows", "row_bytes", "exact", "expected"),
    [
        (4096, 256, False, 32),  # one turn of 128 programs; of 16 rows it would be two of 256
        (2112, 256, False, 16),
        (1 << 20, 128, False, 64),
        (1 << 20, 128, True, 32),  # more would not stay in registers
        (1 << 20, 4, False, 128),
    ],
)
def test_the_rows_of_a_tile(rows: int, row_bytes: int, exact: bool, expected: int) -> None:
    assert options_for(rows, 1, row_bytes, 132, exact)[0] == expected


@pytest.mark.parametrize(
    ("rows", "groups", "precision", "expected"),
    [
        (16, 1, "ieee", (2, "ieee")),
        (17, 1, "ieee", (4, "ieee")),
        (128, 1, "ieee", (16, "ieee")),
        (2, 5, "ieee", (2, "ieee")),
        (16, 2, "tf32", (16, "tf32")),
        (16, 1, "tf32", (2, "ieee")),  # no slower, and exact
    ],
)
def test_the_rows_of_a_shared_tile(
    rows: int, groups: int, precision: str, expected: tuple[int, str]
) -> None:
    module = SimpleNamespace(PARTS=16, TILE_ROWS=16, EXACT_ROWS=2)
    assert options_of_split(module, rows, groups, 132, precision) == expected
    module.EXACT_ROWS = 16  # there are weights in bfloat16
    assert options_of_split(module, rows, groups, 132, precision) == (16, precision)


@pytest.mark.slow
def test_every_cell() -> None:
    """The interpreter has no types: what changes its own from step to step is found here."""
    names = [*CELLS, *(f"{name}:float64:resets" for name in WITH_ROWS)]
    found = compiled(*names, *(f"{name}:split" for name in names))
    assert len({name.split("-")[0] for name in found}) > 1.6 * len(names)
    assert all(kernel["shared"] <= SHARED for kernel in found.values())
