"""Numbers that kernels must not mix up or spread, and the precision of lower dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment
from ftbptt.backends import EAGER, FUSED

from ..cells import NOT_BFLOAT16, REPRESENTATIVE, problem, slow_but
from ..cells.problems import Problem
from ..oracle import TIMES_EAGER, check_low_precision
from .scans import Scan, random, scan_of
from .test_fused_shapes import data_for, gated, grouped

pytestmark = pytest.mark.usefixtures("kernels")
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("units", slow_but([33], [3, 16, 33]))
def test_a_row_of_nan_stays_alone(units: int, dtype: torch.dtype) -> None:
    """Rows are neighbours in registers, tiles and products, but nothing of one enters another."""
    rows = 13
    given, sequences, carried = (
        [t.to(dtype) for t in group] for group in data_for(4, (rows,), units)
    )
    scan = Scan(gated, given, sequences, carried)
    clean = scan.fused()
    for bad, value in ((0, NAN), (5, INF), (12, -INF)):
        h, x = carried[0].clone(), sequences[0].clone()
        h[bad, -1] = value
        x[2, (bad + 1) % rows, 0] = NAN
        found = scan.fused(given, [x], [h, carried[1]])
        others = [r for r in range(rows) if r not in (bad, (bad + 1) % rows)]
        for i, (a, b) in enumerate(zip(found, clean, strict=True)):
            axis = 0 if i < 2 else 1
            keep = torch.tensor(others)
            assert torch.equal(a.index_select(axis, keep), b.index_select(axis, keep))
        scan.check(given, [x], [h, carried[1]], tolerance=1e-10 if dtype == torch.float64 else 1e-4)


def test_a_model_of_nan_stays_alone() -> None:
    x, h, weight = random(3, 4, 5, 7), random(4, 5, 7), random(4, 7, 7)
    scan = Scan(grouped, [weight], [x], [h])
    bad = weight.clone()
    bad[2] = NAN
    clean, found = scan.fused(), scan.fused([bad], [x], [h])
    for i, (a, b) in enumerate(zip(found, clean, strict=True)):
        axis = 0 if i < 1 else 1
        assert a.select(axis, 2).isnan().any()
        keep = torch.tensor([0, 1, 3])
        assert torch.equal(a.index_select(axis, keep), b.index_select(axis, keep))


@pytest.mark.parametrize("units", [3, 33])
def test_infinities_and_tiny_numbers_as_in_torch(units: int) -> None:
    """Through products and reductions: NaN where torch has NaN."""
    info = torch.finfo(torch.float64)
    given, (x,), carried = data_for(4, (7,), units)
    for value in (INF, -INF, NAN, info.max, info.tiny / 8, -0.0):
        own = x.clone()
        own[1, 2] = value
        own[2, 3, ::2] = value
        Scan(gated, given, [x], carried).check(given, [own], carried, tolerance=1e-10)
    tiny = [[t * info.tiny * 4 for t in group] for group in ([x], carried)]
    Scan(gated, given, [x], carried).check(given, *tiny, tolerance=1e-10)


def test_denormal_numbers_are_kept() -> None:
    """No flushing to zero: half of the smallest normal number comes out as such."""
    for dtype in (torch.float64, torch.float32):
        tiny = torch.finfo(dtype).tiny
        x, h = torch.full((3, 4, 17), tiny, dtype=dtype), torch.full((4, 17), tiny, dtype=dtype)

        def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
            return [0.5 * x[0] + 0.0 * carried[0]], [carried[0] * 0.125]

        final, history, emitted = Scan(step, [], [x], [h]).fused()
        assert torch.equal(final, h * 0.5)
        assert torch.equal(history[1:], x * 0.5)
        assert torch.equal(emitted[0], h * 0.125)
        assert emitted.min() > 0


def test_rows_of_a_segment_stay_alone(kernels: None) -> None:
    """Through the reverse, too: with a gradient for each sequence only one model's is NaN."""
    given = problem("lstm_cell")
    params, state, x, y = given.data(5)
    segment = make_train_segment(given.step, given.loss, backend="fused")
    rows = tuple(t.unsqueeze(1) for t in state), x.transpose(0, 1).unsqueeze(2)
    target = y.transpose(0, 1).unsqueeze(2)
    mapped = vmap(segment, in_dims=(None, 0, 0, 0))
    clean = mapped(params, *rows, target)
    rows[1][1, 3] = NAN
    found = mapped(params, *rows, target)
    for name, grad in found.grads.items():
        assert torch.equal(grad[[0, 2]], clean.grads[name][[0, 2]])
        assert grad[1].isnan().any()
    assert torch.equal(found.loss[[0, 2]], clean.loss[[0, 2]])


def test_whole_numbers_and_flags_are_exact() -> None:
    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        count, small, flag, h = carried
        flag = flag ^ (x[0][:, 0] > 0)
        count = torch.where(flag, count + 3, count - 1)
        h = torch.where(flag.unsqueeze(-1), h * 0.5, x[0])
        return [count, small * 3 + 1, flag, h], [flag, count > 2, count.to(torch.float64)]

    for rows in (1, 5, 70):
        carried = [
            torch.arange(rows) + 2**60, torch.arange(rows).to(torch.int8),
            torch.arange(rows) % 2 == 0, random(rows, 9),
        ]  # fmt: skip
        scan = Scan(step, [], [random(9, rows, 9, seed=1)], carried)
        scan.check(tolerance=0)


# -- lower precision: no further from float64 than what torch itself errs, times 3 -----------------


def segment_of(given: Problem, **options: Any) -> Any:
    options = {"backend": "fused", "time_dim": given.time_dim or None} | options
    return make_train_segment(given.step, given.loss, **options)


@pytest.mark.parametrize("name", slow_but(["lstm_readout", "layer_norm_lstm"], REPRESENTATIVE))
def test_float32(name: str) -> None:
    given = problem(name, torch.float32)
    segment = segment_of(given)
    for steps in (3, 7, 63):
        check_low_precision(segment, given, steps)


@pytest.mark.parametrize(
    "name",
    slow_but(["lstm_readout"], [name for name in REPRESENTATIVE if name not in NOT_BFLOAT16]),
)
def test_bfloat16(name: str) -> None:
    given = problem(name, torch.bfloat16)
    segment = segment_of(given)
    for steps in (3, 7):
        check_low_precision(segment, given, steps)


@pytest.mark.parametrize("name", slow_but(["elman"], ["elman", "lstm_cell", "min_gru"]))
def test_float16(name: str) -> None:
    given = problem(name, torch.float16)
    segment = segment_of(given)
    for steps in (3, 7):
        check_low_precision(segment, given, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("units", [3, 33])
def test_scans_in_lower_precision(units: int, dtype: torch.dtype) -> None:
    data = [[t.to(dtype) for t in group] for group in data_for(5, (6,), units)]
    scan = Scan(gated, *data)
    exact = Scan(gated, *([t.double() for t in group] for group in data)).run(EAGER)
    for a, b, c in zip(scan.fused(), scan.run(EAGER), exact, strict=True):
        assert a.dtype == dtype
        error, eager = ((t.double() - c).square().mean().sqrt() for t in (a, b))
        assert error <= TIMES_EAGER * eager + torch.finfo(dtype).eps * c.square().mean().sqrt()


BY_DTYPE: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: lambda h: h.to(torch.float64) * 0.1,
    torch.float64: lambda h: h.to(torch.float32) * 0.1,
    torch.bfloat16: lambda h: h.to(torch.float32) * 0.1,
    torch.float16: lambda h: h.to(torch.bfloat16) + 1,
}


@pytest.mark.parametrize("dtype", BY_DTYPE)
def test_dtypes_mixed_in_a_step(dtype: torch.dtype) -> None:
    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        other = BY_DTYPE[dtype](carried[0])
        h = (other.tanh() + x[0].to(other.dtype)).to(dtype)
        return [h], [other, h.to(torch.float64).sum(-1), other.sum(-1, keepdim=True)]

    scan = Scan(step, [], [random(4, 5, 9, dtype=dtype)], [random(5, 9, dtype=dtype, seed=1)])
    scan.check(tolerance=32 * max(torch.finfo(dtype).eps, torch.finfo(torch.bfloat16).eps))


def test_constants_are_rounded_to_their_dtype() -> None:
    """Also where they are read in a wider one."""

    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        h = carried[0] * torch.full((9,), 0.1, dtype=torch.float32) + x[0]
        tenth = torch.full_like(h, 0.1, dtype=torch.float32)
        whole = torch.full((9,), 2.7, dtype=torch.float64).long()
        return [h], [0 * h + 0.1 >= tenth, h + tenth, h * whole, h * tenth.double().half()]

    Scan(step, [], [random(4, 5, 9)], [random(5, 9, seed=1)]).check(tolerance=1e-15)


def test_a_threshold_of_a_wider_dtype() -> None:
    """Without axes it is compared in the dtype of what has them, through views of the result."""

    def step(limits: Sequence[Tensor], x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        both = torch.cat([carried[0], x[0]], 1)
        low, high = (both >= limits[0]).chunk(2, 1)
        turned = (carried[0].unsqueeze(2) + x[0].unsqueeze(1)).movedim(2, 0).contiguous()
        return [torch.where(low, 0.5, x[0])], [low, high, (turned > limits[0]).movedim(0, 2)]

    x, h = torch.full((3, 4, 9), 0.3), torch.full((4, 9), 0.3)
    x[:, :2], h[::2] = 0.0, 0.0
    Scan(step, [torch.tensor(0.3, dtype=torch.float64)], [x], [h]).check(tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16])
def test_a_dtype_without_kernels_is_named(dtype: torch.dtype) -> None:
    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        return [torch.tanh(carried[0] + x[0])], [carried[0].to(dtype)]

    block = scan_of(step, [], [random(2, 3, 4)], [random(3, 4)])
    assert FUSED.describe(block).endswith(f"no kernel: CPU kernels do not support {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sign_of_a_flag(dtype: torch.dtype) -> None:
    """A flag is all bits of a vector register: as a number it is NaN."""

    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        h = (carried[0] > 0).sign() * carried[0] * 0.5 + x[0]
        return [h], [h]

    Scan(step, [], [random(4, 5, 40, dtype=dtype)], [random(5, 40, dtype=dtype, seed=1)]).check(
        tolerance=8 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("function", [torch.remainder, torch.fmod])
def test_a_remainder_by_a_number_that_16_bits_round(function: Callable[..., Tensor]) -> None:
    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        h = function(carried[0] * 0 + x[0], 0.3)
        return [h], [h]

    given = (88 * random(4, 5, 40).abs()).half(), random(5, 40).half()
    found = Scan(step, [], [given[0]], [given[1]])
    for a, b in zip(found.fused(), found.run(EAGER), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
