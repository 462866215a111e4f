"""Kernels whose weights are split over programs that share rows, in Triton's interpreter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftbptt.backends.fused import _source_for
from ftbptt.kernels.expressions import Unsupported
from ftbptt.kernels.gpu import kernel as triton_kernel
from ftbptt.kernels.gpu import module as triton_module
from ftbptt.kernels.gpu import placement
from ftbptt.kernels.gpu import split as triton_split
from ftbptt.kernels.gpu.module import _with_weights_laid_out

from ..cells import CELLS, problem, slow_but
from ..oracle import check, check_low_precision
from ..segment.test_parity import MASKABLE_ROWS, check_all_steps, flags
from ..segment.test_parity import where_time_is as over_time
from . import programs_at_once
from . import test_fused_operations as operations
from .scans import Scan, random
from .test_fused import make
from .test_fused_shapes import data_for, gated
from .test_row_order import heads_of_models
from .test_triton import check_tf32

QUICK = ["lstm_readout", "counter_and_flag"]


@pytest.fixture(autouse=True)
def split(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be split is, between up to four programs, with at least two columns each."""
    monkeypatch.setattr(triton_kernel, "_SHARED_BYTES_OF_ROWS", triton_kernel._SHARED_BYTES)
    monkeypatch.setattr(placement, "_LEAST_COLUMNS", 2)
    monkeypatch.setattr(placement, "_MOST_COLUMNS", 16)
    monkeypatch.setattr(placement, "_MOST_REDUCED", 16)
    monkeypatch.setattr(triton_split, "_LEAST_OF_A_WARP", 1)
    monkeypatch.setattr(triton_split, "_PARTS", (2, 4))
    monkeypatch.setattr(triton_kernel, "_MOST_MEETINGS", 1000)


@pytest.fixture(params=[False, True], ids=["the first ahead", "the last ahead"])
def order(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Which program runs ahead of the others."""
    monkeypatch.setattr(programs_at_once.Launch, "backwards", request.param)


def parts(scan: Scan) -> int:
    (line,) = [x for x in _source_for(scan.block)[2].splitlines() if x.startswith("PARTS")]
    return int(line.split("= ")[1].split(",")[0])


def test_programs_that_would_wait_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_MOST_MEETINGS", 0)
    scan = Scan(gated, *data_for(4, (17,), 33))
    with pytest.raises(Unsupported, match=r"its . programs would wait for each other . times a"):
        _source_for(scan.block)


@pytest.mark.parametrize("name", slow_but(QUICK, CELLS))
def test_cells(name: str) -> None:
    check_all_steps(make(problem(name)), name)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    "sizes", slow_but([(1, 3), (17, 16), (17, 33)], itertools.product([1, 17], [3, 16, 33]))
)
def test_rows_and_units(sizes: tuple[int, int]) -> None:
    rows, units = sizes
    scan = Scan(gated, *data_for(4, (rows,), units))
    assert parts(scan) > 1
    scan.check()


def test_tf32() -> None:
    check_tf32(32)


@pytest.mark.parametrize(
    ("is_exact", "strides"), [(False, (1, 4)), (True, (6, 1))], ids=["columns", "rows"]
)
@pytest.mark.parametrize("given", ["by row", "by column", "models"])
def test_weights_lie_as_products_read_them(
    is_exact: bool, strides: tuple[int, int], given: str
) -> None:
    """Those of float64, and one that is expanded, stay as they are."""
    weight = random(4, 6).float()
    if given == "by column":
        weight = weight.t().contiguous().t()
    if given == "models":
        weight = torch.stack([weight, 2 * weight])
    names = ["invariant0", "weight1", "weight2", "weight3", "sequence0", "start0"]
    inputs = [
        random(6),
        weight,
        random(4, 6),
        random(1, 6).float().expand(4, 6),
        random(3, 4),
        random(4),
    ]
    numbers = [3, 4, 24]
    for tensor in inputs[1:4]:
        numbers += tensor.stride() if tensor.dim() == 3 else (0, *tensor.stride())
    module = SimpleNamespace(PARTS=2)
    found, after = _with_weights_laid_out(module, names, inputs, numbers, is_exact)
    assert all(map(torch.equal, found, inputs))
    assert found[1].stride()[-2:] == strides
    group = 24 if given == "models" else 0
    assert after == [3, 4, 24, group, *strides, *numbers[6:]]


@pytest.mark.usefixtures("order")
def test_what_others_still_read_is_not_written() -> None:
    """Between two steps that use scratch memory is one barrier only."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.tanh(x[0] + torch.sigmoid(carried[0]) @ given[0])], []

    scan = Scan(step, [random(16, 16)], [random(4, 3, 16, seed=1)], [random(3, 16)], [False])
    source = _source_for(scan.block)[2]
    assert source.count("expected += ") == 1
    assert "scratch0" in source
    scan.check()


@pytest.mark.usefixtures("order")
def test_deviations_from_a_mean_are_not_exchanged() -> None:
    """Each program computes those of all columns, of what it has read for the mean."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        a = carried[0] @ given[0]
        b, c = torch.nn.functional.layer_norm(a, (32,)).chunk(2, -1)
        return [torch.tanh(x[0] + b * c)], [a]

    scan = Scan(step, [random(16, 32)], [random(4, 17, 16, seed=1)], [random(17, 16)])
    source = _source_for(scan.block)[2]
    assert source.count("expected += ") == 2  # before the product, and before the mean
    assert source.count("tl.dot(") == 2  # its halves, from which it is stored as well
    scan.check()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # NumPy's, in the interpreter
def test_reductions_of_several_ranges_of_columns() -> None:
    """The last one is of one; where one range is NaN, so is the largest number of all."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        h = torch.tanh(carried[0] @ given[0] + x[0])
        kinds = [h.sum(-1), h.prod(-1), h.amax(-1), h.amin(-1), (h.sin() * x[1]).sum(-1)]
        return [h], [torch.stack(kinds, -1)]

    inputs = [random(4, 3, 33, seed=1), random(4, 33, seed=2)]
    for broken in (None, 2, 20, 32):
        if broken is not None:
            inputs[0][1, 1, broken] = float("nan")
        Scan(step, [random(33, 33)], inputs, [random(3, 33)]).check()


@pytest.mark.parametrize(("operations", "meetings"), [(5, 2), (9, 3)])
def test_what_a_reduction_computes_itself_is_little(operations: int, meetings: int) -> None:
    """It is exchanged if there is more to do for all columns."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        a = carried[0] @ given[0]
        b = a - a.amax(-1, keepdim=True)
        for _ in range(operations):
            b = torch.sin(b)
        return [torch.tanh(x[0] + a * (b - b.mean(-1, keepdim=True)))], []

    scan = Scan(step, [random(16, 16)], [random(4, 3, 16, seed=1)], [random(3, 16)])
    assert _source_for(scan.block)[2].count("expected += ") == meetings
    scan.check()


def test_rows_of_several_axes_and_weights_of_each_group() -> None:
    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.tanh(x[0] + torch.bmm(carried[0], given[0]))], []

    scan = Scan(step, [random(3, 8, 8)], [random(4, 3, 17, 8, seed=1)], [random(3, 17, 8)])
    assert parts(scan) == 4
    scan.check()


def test_heads_of_several_models() -> None:
    scan = heads_of_models(2, 17, 3, units=8)
    assert parts(scan) == 4
    scan.check()


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("rows", [33, 64, 65])
def test_tiles_of_more_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs with 16 rows each would not all run at once, if nothing is reduced."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        h, c = carried
        i, f = (x[0] + torch.cat([h, c], -1) @ given[0]).chunk(2, -1)
        c = torch.sigmoid(f) * c + torch.tanh(i)
        return [torch.tanh(c @ given[1]), c], [i]

    monkeypatch.setattr(triton_kernel, "_PROCESSORS", 5)
    (u, v, _), *others = data_for(4, (rows,), 33)
    scan, reducing = Scan(step, [u, v], *others), Scan(gated, *data_for(4, (rows,), 33))
    refused = f"split, with {rows} rows, they do not fit on 5 multiprocessors"
    with pytest.raises(Unsupported, match=refused):  # in float64
        _source_for(scan.block)
    monkeypatch.setattr(triton_kernel, "_has_matrix_unit", lambda loop: True)
    for unfit in (reducing.block, *([scan.block] if rows > 64 else [])):
        with pytest.raises(Unsupported, match=refused):
            _source_for(unfit)
    if rows <= 64:
        assert "TILE_ROWS, EXACT_ROWS = 32, 32" in _source_for(scan.block)[2]
        scan.check()


def test_what_is_loaded_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pieces at once, then these are multiplied, then the next."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.tanh(x[0] + carried[0] @ given[0])], []

    orders = []
    for bytes_at_once in (1 << 20, 16 * 16 * 2 * 8):
        monkeypatch.setattr(triton_split, "_MOST_LOADED_BYTES", bytes_at_once)
        scan = Scan(step, [random(64, 64)], [random(4, 3, 64, seed=1)], [random(3, 64)])
        _, body = _source_for(scan.block)[2].split("for step in range(steps):")
        lines = body.splitlines()
        read = [line for line in lines if "tl.load(history0" in line or "tl.dot(" in line]
        orders.append("".join("." if "tl.dot(" in line else "-" for line in read))
        scan.check()
    assert orders == ["----....", "--..--.."]


@pytest.mark.parametrize("rows", [2, 4])
def test_tiles_of_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than a matrix unit takes."""
    monkeypatch.setattr(triton_module, "options_of_split", lambda *_: (rows, "ieee"))
    check(make(problem("lstm_readout")), problem("lstm_readout"), 4)


@pytest.mark.parametrize("table", ["REDUCTIONS", "VIEWS"])
def test_features(table: str) -> None:
    chosen = getattr(operations, table).values()

    def step(given: Any, x: Any, carried: Any) -> Any:
        h = (carried[0].flatten(1) @ given[0]).view(2, 3, 4, 5)
        h = torch.tanh(h + x[0])
        return [h], [operation(h) for operation in chosen]

    carry = random(2, 3, 4, 5)
    Scan(step, [random(60, 60)], [random(3, *carry.shape, seed=1)], [carry]).check()


@pytest.mark.parametrize("name", slow_but(["gru_batch_first"], MASKABLE_ROWS))
def test_mask_and_reset_by_row(name: str) -> None:
    given, segment = problem(name), make(problem(name))
    reset = over_time(given, flags(5, given.rows, seed=1))
    mask = over_time(given, flags(5, given.rows, seed=2, true=0.7))
    check(segment, given, 5, reset=reset, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_low_precision(dtype: torch.dtype) -> None:
    check_low_precision(make(problem("lstm_readout", dtype)), problem("lstm_readout", dtype), 7)
