"""Recurrences whose steps compose, many steps at once, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt.backends import EAGER
from ftbptt.backends.fused import _source_for
from ftbptt.kernels.gpu import module as triton_module
from ftbptt.kernels.gpu.affine import affine_next
from ftbptt.kernels.gpu.module import steps_at_once

from ..cells import problem
from ..oracle import check
from ..segment.test_parity import flags
from ..segment.test_parity import where_time_is as over_time
from .scans import Scan, assert_same, random
from .test_fused import make

pytestmark = pytest.mark.usefixtures("interpreted")
Next = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# (carry, x, y, w) -> the next carry; x and y have numbers for each step and row, w for no row.
AFFINE: dict[str, Next] = {
    "decay": lambda h, x, y, w: w * h + x,
    "gate": lambda h, x, y, w: torch.sigmoid(x) * h + (1 - torch.sigmoid(x)) * y,
    "between": lambda h, x, y, w: h + torch.sigmoid(x) * (y - h),
    "from": lambda h, x, y, w: torch.tanh(x) - h / (2 + y * y),
    "twice": lambda h, x, y, w: 0.5 * (h - x) - (-h * 0.3 + w * h),
    "sum": lambda h, x, y, w: h + x,
    "reset": lambda h, x, y, w: torch.where(x > 0.5, y, 0.9 * h + x),
    "masked": lambda h, x, y, w: torch.where(y > 0, w * h + x, h),
    "reset, then masked": lambda h, x, y, w: torch.where(
        y > 0, w * torch.where(x > 1, y, h) + x, torch.where(x > 1, y, h)
    ),
}  # fmt: skip
OTHER: dict[str, Next] = {
    "tanh": lambda h, x, y, w: torch.tanh(h) + x,
    "square": lambda h, x, y, w: 0.1 * h * h + x,
    "below": lambda h, x, y, w: x / (2 + h * h),
    "by itself": lambda h, x, y, w: torch.where(h > 0, x, y * h),
    "forgotten": lambda h, x, y, w: x + y,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tiles of 16 steps; returns the functions that are run."""
    monkeypatch.setattr(triton_module, "_NUMBERS_OF_A_TILE", 16 * 8)
    ran: list[str] = []
    chosen = triton_module.steps_at_once

    def noted(*numbers: int) -> Any:
        found = chosen(*numbers)
        ran.append("loop" if found is None else "composed")
        return found

    monkeypatch.setattr(triton_module, "steps_at_once", noted)
    return ran


def scan_of(function: Next, steps: int, rows: tuple[int, ...], **options: Any) -> Scan:
    def step(given: Any, x: Any, carried: Any) -> Any:
        before, after = carried[0], function(carried[0], *x, given[0])
        return [after], [torch.tanh(before) * x[0], after > before]

    sequences = [random(steps, *rows, seed=1), random(steps, *rows, seed=2)]
    return Scan(step, [random(rows[-1], seed=3)], sequences, [random(*rows)], **options)


def source(scan: Scan) -> str:
    return _source_for(scan.block)[2]


@pytest.mark.parametrize("name", AFFINE)
def test_composed(name: str, small_tiles: list[str]) -> None:
    for steps, rows in ((16, (2, 3)), (17, (1, 1)), (37, (3, 3)), (48, (8,))):
        scan = scan_of(AFFINE[name], steps, rows)
        assert "def run_composed(" in source(scan)
        scan.check()
    assert small_tiles == ["composed"] * 8


@pytest.mark.parametrize("name", OTHER)
def test_what_does_not_compose(name: str) -> None:
    assert "def run_composed(" not in source(scan_of(OTHER[name], 17, (2, 3)))


@pytest.mark.parametrize("is_result", [True, False])
def test_what_reads_joined_values_does_not_compose(is_result: bool) -> None:
    """They lie in memory: also what of them depends on the carry, and only of one step."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        pair = torch.stack([torch.tanh(carried[0]), x[0]], -1)
        if is_result:
            return [0.3 * carried[0] + pair[..., 0]], [pair]
        return [0.3 * carried[0] + x[0]], [torch.sin(pair[..., 0])]

    scan = Scan(step, [], [random(37, 2, 3, seed=1)], [random(2, 3)])
    assert "def run_composed(" not in source(scan)
    scan.check()


def test_fewer_steps_than_a_tile_are_a_loop(small_tiles: list[str]) -> None:
    scan_of(AFFINE["gate"], 15, (2, 3)).check()
    assert small_tiles == ["loop"] * 2


def test_without_a_history() -> None:
    scan_of(AFFINE["gate"], 37, (2, 3), history=[False]).check()


def test_what_was_infinite_before_a_reset_is_gone() -> None:
    scan = scan_of(AFFINE["reset"], 37, (2, 3))
    sequences = [tensor.clone() for tensor in scan.given[1]]
    sequences[0][5], sequences[0][20] = -float("inf"), 1.0
    own = scan.given[0], sequences, scan.given[2]
    found, wanted = scan.fused(*own), scan.run(EAGER, *own)
    assert not wanted[1][6].isfinite().any()
    assert wanted[0].isfinite().all()
    assert_same(found, wanted, 1e-12)


INF = float("inf")
# The first carry, and what happens from a step on: (step, scale, shift, whether the carry is cut).
EXTREME: dict[str, tuple[float, list[tuple[int, float, float, bool]]]] = {
    "grows from nothing": (0.0, [(0, 1e30, 0.0, False), (32, 1e30, 1.0, False)]),
    "up and down": (1e-300, [(0, 3e30, 0.0, False), (12, 3e-30, 0.0, False)]),
    "down and up": (1e200, [(0, 3e-30, 0.0, False), (12, 3e30, 0.0, False), (24, 1.0, 1.0, False)]),
    "a zero, then down and up": (
        1.0, [(0, 0.0, 1e200, False), (1, 3e-30, 0.0, False), (13, 3e30, 0.0, False),
              (24, 1.0, 0.0, False)],
    ),
    "infinite before": (INF, [(0, 1e-30, 1.0, False)]),
    "infinite on the way": (1.0, [(0, 1e-30, 0.0, False), (3, 1e-30, -INF, False),
                                  (4, 1e-30, 0.0, False)]),
    "largest, and back": (1.7e308, [(0, 1.0, -1.7e308, False), (2, 1.0, 0.0, False)]),
    "cut": (1.0, [(0, 1e30, 1.0, False), (5, 1.0, 2.0, True), (6, 1e-30, 0.0, False),
                  (20, INF, 0.5, True), (21, 0.5, 1.0, False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREME)
def test_as_the_loop_however_large_or_small(name: str, small_tiles: list[str]) -> None:
    """Also where the product of many scales is infinite, or zero."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.where(x[2], x[1], x[0] * carried[0] + x[1])], []

    start, changes = EXTREME[name]
    scale, shift, cut = (torch.full((37, 2, 3), n, dtype=torch.float64) for n in (1.0, 0.0, 0.0))
    for first, *own in changes:
        for sequence, number in zip((scale, shift, cut), own, strict=True):
            sequence[first:, 1] = number  # and the other rows as usual
    carry = torch.full((2, 3), start, dtype=torch.float64)
    scan = Scan(step, [], [scale, shift, cut > 0], [carry])
    assert not scan.run(EAGER)[1].isnan().any()
    scan.check()
    assert small_tiles == ["composed"] * 2


def test_low_precision_is_rounded_at_every_step() -> None:
    """So its steps do not compose."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [given[0] * carried[0] + x[0]], []

    of_bfloat16 = [random(17, 3, dtype=torch.bfloat16)]
    given = [random(3, dtype=torch.bfloat16)]
    assert "def run_composed(" not in source(Scan(step, given, of_bfloat16, given))
    found = _source_for(scan_of(AFFINE["decay"], 3, (2,)).block)[1]
    assert affine_next(found) is not None


def test_flags_and_counts_are_not_multiplied() -> None:
    """Kept by ``where``, or counted up: of the same form but for their dtypes."""

    def flag(given: Any, x: Any, carried: Any) -> Any:
        return [torch.where(x[0], x[1], carried[0])], []

    def count(given: Any, x: Any, carried: Any) -> Any:
        return [torch.where(x[0], carried[0] + 1, carried[0])], []

    flags_of_steps = [random(37, 2, 3, seed=seed) > 0 for seed in (1, 2)]
    for step, start in ((flag, random(2, 3) > 0), (count, torch.arange(6).view(2, 3))):
        scan = Scan(step, [], flags_of_steps, [start])
        assert "def run_composed(" not in source(scan)
        scan.check()


def test_where_rows_are_too_few() -> None:
    """(steps, rows, processors) -> (steps, rows) of a tile"""
    assert steps_at_once(4096, 64, 132) == (16, 8)  # of small_tiles
    assert steps_at_once(4096, 132 * 20, 132) == (8, 16)
    assert steps_at_once(4096, 132 * 512, 132) == (4, 32)
    assert steps_at_once(4096, 132 * 512 + 1, 132) is None


@pytest.mark.parametrize("name", ["min_gru", "ema"])
def test_cells(name: str, small_tiles: list[str]) -> None:
    given = problem(name)
    segment = make(given)
    reset = over_time(given, flags(19, given.rows, seed=1, true=0.2))
    check(segment, given, 19)
    check(segment, given, 19, reset=reset)
    assert "composed" in small_tiles
