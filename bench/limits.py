"""The machine's floor for a case: no implementation of it can be faster than this.

    floor = max(its GEMMs, each at the best rate measured at its own shape,
                its bytes at the copy bandwidth measured at its own size)

The GEMMs are those of the forward pass and of the gradients, the recurrent ones at the size of one
step, the others over all K*B rows. The bytes are the data, the parameters and the gradients, and
one write and one read of what the backward pass needs of each step. Elementwise work counts as
nothing, so a fraction of 1 is out of reach.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .cases import Case
from .cells import KINDS


@dataclass(frozen=True)
class Gemm:
    """``count`` products [rows, inner] x [inner, columns], each ``copies`` at a time."""

    rows: int
    inner: int
    columns: int
    count: int = 1
    copies: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.count * self.copies


@dataclass(frozen=True)
class Floor:
    """Seconds, FLOPs, bytes and the rates they were measured at (per second)."""

    seconds: float
    gemm_seconds: float
    copy_seconds: float
    flops: float
    bytes: float
    step_rate: float  # FLOP/s of the GEMMs of one step; 0 if there are none
    batched_rate: float  # FLOP/s of the GEMMs over all rows
    bandwidth: float


def gemms(case: Case) -> tuple[list[Gemm], list[Gemm]]:
    """(per step, over all steps): the matrix products of a case's forward and backward pass."""
    rows, kind = case.steps * case.batch, KINDS[case.kind]
    from_h = [case.hidden * width for width in kind.from_h]
    step, batched = [], []

    def each(rows: int, inner: int, columns: int, count: int = 1) -> Gemm:
        return Gemm(rows, inner, columns, count, case.models)

    def weight(inner: int, columns: int) -> Gemm:
        if case.per_sequence:
            return Gemm(columns, case.steps, inner, copies=case.batch)
        return each(columns, rows, inner)

    for layer in range(case.layers):
        inputs, from_x = case.hidden if layer else case.inputs, case.hidden * kind.from_x
        for columns in from_h:
            step.append(each(case.batch, case.hidden, columns, case.steps))
            step.append(each(case.batch, columns, case.hidden, case.steps))
            batched.append(weight(case.hidden, columns))
        batched += [each(rows, inputs, from_x), weight(inputs, from_x)]
        if layer:  # the first layer's input needs no gradient
            batched.append(each(rows, from_x, inputs))
    batched += [each(rows, case.hidden, case.inputs), each(rows, case.inputs, case.hidden)]
    batched.append(weight(case.hidden, case.inputs))
    return step, batched


def least_bytes(case: Case, parameters: int) -> float:
    """Bytes that any implementation moves, with so many parameters in each model."""
    rows, kind = case.models * case.steps * case.batch, KINDS[case.kind]
    data = 3 * rows * case.inputs  # x and y read, out written
    saved = rows * case.layers * case.hidden * (kind.from_x + kind.leaves)
    gradients = parameters * max(case.apart, 1)
    return case.dtype.itemsize * (data + 2 * saved + parameters * case.models + gradients)


def floor(case: Case, parameters: int) -> Floor:
    """Measures the rates at the case's shapes (takes about a second)."""
    step, batched = gemms(case)
    step_seconds = sum(_gemm_seconds(gemm, case.dtype) for gemm in step)
    batched_seconds = sum(_gemm_seconds(gemm, case.dtype) for gemm in batched)
    moved = least_bytes(case, parameters)
    copied = _copy_seconds(moved)
    return Floor(
        seconds=max(step_seconds + batched_seconds, copied),
        gemm_seconds=step_seconds + batched_seconds,
        copy_seconds=copied,
        flops=sum(gemm.flops for gemm in step + batched),
        bytes=moved,
        step_rate=sum(gemm.flops for gemm in step) / step_seconds if step else 0.0,
        batched_rate=sum(gemm.flops for gemm in batched) / batched_seconds,
        bandwidth=moved / copied,
    )


def _gemm_seconds(gemm: Gemm, dtype: torch.dtype) -> float:
    """The best of several ways to compute it; 32 side by side show the rate without the calls."""
    ways: list[float] = []
    a = torch.randn(gemm.rows, gemm.inner, dtype=dtype)
    b = torch.randn(gemm.inner, gemm.columns, dtype=dtype)
    b_turned = b.t().contiguous().t()
    copies = gemm.copies if gemm.copies > 1 else 32 if gemm.count > 1 else 1
    if copies > 1:
        many = a.expand(copies, -1, -1).contiguous()
        weights = b.expand(copies, -1, -1)
        weights = weights.contiguous() if gemm.copies > 1 else weights
        out = torch.empty(copies, gemm.rows, gemm.columns, dtype=dtype)
        scale = gemm.copies / copies
        ways.append(scale * seconds(lambda: torch.bmm(many, weights, out=out)))
    if gemm.copies == 1:
        c = torch.empty(gemm.rows, gemm.columns, dtype=dtype)
        ways.append(seconds(lambda: torch.mm(a, b, out=c)))
        ways.append(seconds(lambda: torch.mm(a, b_turned, out=c)))
        # oneDNN, which nn.LSTM uses and torch.mm does not: faster where MKL has no AVX-512. Not
        # every torch has it, nor does it take bfloat16 on every processor.
        with contextlib.suppress(RuntimeError):
            rows, weight = a.to_mkldnn(), b.t().contiguous().to_mkldnn()
            ways.append(seconds(lambda: F.linear(rows, weight)))
    return gemm.count * min(ways)


def _copy_seconds(moved: float) -> float:
    source = torch.zeros(max(int(moved / 8), 1))  # a copy reads and writes each float
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source))


def seconds(call: Callable[[], object], bursts: int = 30, least: float = 1e-3) -> float:
    """Seconds of a call: the best of several bursts, each ``least`` seconds long at the least."""

    def burst(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    calls = max(1, int(least / min(burst(1) for _ in range(5))))
    return min(burst(calls) for _ in range(bursts))


def thread_gain(threads: int) -> float:
    """How many times faster a GEMM in cache is with so many threads than with one, at this moment.

    Takes about 50 ms. A virtual machine has all its cores only at times.
    """
    a, b, c = torch.randn(3, 256, 256).unbind()
    before = torch.get_num_threads()
    taken = []
    for count in (1, threads):
        torch.set_num_threads(count)
        taken.append(seconds(lambda: torch.mm(a, b, out=c), bursts=5, least=4e-3))
    torch.set_num_threads(before)
    return taken[0] / taken[1]
