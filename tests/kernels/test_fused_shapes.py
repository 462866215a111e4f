"""Kernels of awkward sizes, layouts and numbers of threads: against the loop in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment
from ftbptt.backends import EAGER, FUSED
from ftbptt.kernels.expressions import Unsupported
from ftbptt.kernels.lower import make_row_loop

from ..cells import problem, slow_but
from ..cells.problems import Problem, mse
from ..oracle import assert_close, check, reference
from .scans import KERNEL, Scan, assert_same, random, scan_of, source_of

pytestmark = pytest.mark.usefixtures("poisoned")
Tensors = Sequence[Tensor]
SetThreads = Callable[[int], None]


def gated(given: Tensors, x: Tensors, carried: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Two products, a norm over the units, a join: the parts that loops over rows are made of."""
    (u, v, bias), (drive,), (h, c) = given, x, carried
    gates = drive + torch.cat([h, c], -1) @ u + bias
    i, f = gates.chunk(2, -1)
    c = torch.sigmoid(f) * c + torch.tanh(i)
    h = torch.tanh((c - c.mean(-1, keepdim=True)) @ v)
    return [h, c], [gates, h.sum(-1)]


def data_for(steps: int, rows: tuple[int, ...], units: int) -> tuple[list[Tensor], ...]:
    given = [
        0.3 * random(2 * units, 2 * units, seed=1), random(units, units, seed=2),
        random(2 * units, seed=3),
    ]  # fmt: skip
    carried = [random(*rows, units, seed=4), random(*rows, units, seed=5)]
    return given, [random(steps, *rows, 2 * units, seed=6)], carried


@pytest.mark.parametrize(
    "units",
    slow_but([3, 33], [3, 33, 1, 2, 7, 8, 15, 16, 17, 64]),
)
def test_units_rows_and_threads(units: int, threads: SetThreads) -> None:
    """Fewer rows than threads, no multiple of them, many tiles: in one library for all."""
    for count in (1, 2, 3):
        threads(count)
        for rows in (2, 5, 7, 8, 65, 200):
            Scan(gated, *data_for(3, (rows,), units)).check()


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (1, 3), (3, 1), (2, 3)])
def test_row_axes(rows: tuple[int, ...]) -> None:
    for steps in (1, 4):
        Scan(gated, *data_for(steps, rows, 3)).check()


def test_no_rows() -> None:
    Scan(gated, *data_for(3, (0,), 3)).check()


@pytest.mark.parametrize("sizes", [(3, 2, 5), (9, 2, 1)])
def test_rows_that_share_parts(sizes: tuple[int, int, int], threads: SetThreads) -> None:
    """Inputs of one or two of three axes of rows: tiles that begin in the middle of a part."""

    def step(given: Tensors, x: Tensors, carried: Tensors) -> Any:
        first, middle, last = given
        drive = x[0][:, :, None] * first[:, None, None]
        h = torch.tanh(carried[0] * middle[:, None] + drive + last)
        return [h], [h.sum(-1) * last[:, 0]]

    a, b, c = sizes
    given = [random(a, 33, seed=1), random(b, 33, seed=2), random(c, 33, seed=3)]
    for count in (1, 2, 4):
        threads(count)
        scan = Scan(step, given, [random(3, a, b, 33, seed=4)], [random(a, b, c, 33, seed=5)])
        scan.check()
        assert "Part part" in source_of(scan.block)


@pytest.mark.parametrize("rows, units, expected", [(8, 5, 1), (8, 31, 1), (8, 32, 2), (7, 5, 2)])
def test_rows_of_few_numbers(rows: int, units: int, expected: int) -> None:
    """The channels of a state space model with few states each are features of longer rows."""

    def step(given: Tensors, x: Tensors, carried: Tensors) -> Any:
        (decay,), (drive, read), (h,) = given, x, carried
        h = torch.exp(-decay) * h + torch.tanh(drive)[..., None]
        return [h], [(h * read[:, None]).sum(-1)]

    given, x = [random(3, units, seed=1)], [random(4, rows, 3), random(4, rows, units, seed=2)]
    scan = Scan(step, given, x, [random(rows, 3, units, seed=3)])
    scan.check()
    assert len(make_row_loop(scan.block).rows.dims) == expected


def test_history_of_some_carries() -> None:
    for history in ([True, False], [False, True], [False, False]):
        Scan(gated, *data_for(4, (5,), 3), history=history).check()


def test_units_are_no_rows_of_a_product() -> None:
    """Units that all carries share could be rows, but for what reads all of them."""

    def traced(given: Tensors, x: Tensors, carried: Tensors) -> Any:
        h, trace = carried
        h = torch.tanh(x[0] + h @ given[0])
        return [h, 0.9 * trace + h[..., None]], [trace.sum(-1)]

    for rows in (1, 2):
        carried = [random(rows, 5, seed=3), random(rows, 5, 3, seed=4)]
        Scan(traced, [random(5, 5, seed=1)], [random(4, rows, 5, seed=2)], carried).check()


@pytest.mark.parametrize("units", slow_but([3], [3, 4]))
def test_as_many_rows_as_units(units: int) -> None:
    """Whatever mixes rows has the shape of what does not: it must be seen by its strides."""
    u, h = random(units, units, seed=1), random(units, units, seed=2)
    x = random(3, units, units)

    def of_rows(given: Tensors, x: Tensors, carried: Tensors) -> Any:
        h = torch.tanh(carried[0] @ given[0] + x[0] + given[0][0])
        return [h], [h.sum(1), h - h.sum(1, keepdim=True)]

    Scan(of_rows, [u], [x], [h]).check()
    mixing: list[Callable[[Tensor], Tensor]] = [
        lambda h: torch.tanh(h.T),
        lambda h: h - h.sum(0),
        lambda h: h - h.sum(0, keepdim=True),
        lambda h: torch.softmax(h, 0),
        lambda h: torch.cat([h[1:], h[:1]], 0),
        lambda h: h.T @ u,
        lambda h: h.reshape(-1)[:units] * h,
        lambda h: h + h[0],
        lambda h: h + h[:, 0],
        lambda h: h + h.amax(0),
        lambda h: torch.stack([h[0]] * units),
        lambda h: h.flip(0),
        lambda h: h[torch.tensor([1, 0, *range(2, units)])],
    ]
    for mix in mixing:
        block = scan_of(lambda _, x, c, mix=mix: ([mix(c[0]) + x[0]], []), [], [x], [h])
        try:
            loop = make_row_loop(block)
        except Unsupported:
            continue
        assert loop.rows.total == 1, "a kernel of one row may mix what were rows"


# -- layouts ------------------------------------------------------------------------------------


def test_layouts_of_inputs() -> None:
    """Weights of any strides; sequences and carries that are views; the same tensor twice."""
    units, rows, steps = 5, 6, 4
    (u, v, bias), (x,), (h, c) = data_for(steps, (rows,), units)
    wide = random(rows, 2 * units, seed=7)
    column, late = u[:, :1].expand(-1, 2 * units), x.transpose(0, 1).contiguous().transpose(0, 1)
    layouts: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [
        ([u.T, v.T, bias], [x], [h, c]),
        ([u.T.contiguous().T, random(2 * units, 2 * units)[::2, 1::2], bias], [x], [h, c]),
        ([column, v[:, :1].expand(-1, units), bias[:1].expand(10)], [x], [h, c]),
        ([u.flip(0), v, bias], [late], [h.T.clone().T, c]),
        ([u, v, bias], [x[:1].expand(steps, -1, -1)], [wide[:, ::2], wide[:, 1::2]]),
        ([u, v, bias], [x[:, :1].expand(-1, rows, -1)], [h[:1].expand(rows, -1), h]),
        ([u, v, bias], [x[..., :1].expand(-1, -1, 2 * units)], [h, h]),
        ([u, v, u[0]], [x.flip(0)], [h, h.clone()]),
    ]  # fmt: skip
    scan = Scan(gated, [u, v, bias], [x], [h, c])
    for given in layouts:
        scan.check(*given)


def test_lazily_negated_and_conjugated_inputs() -> None:
    """A real tensor can carry a negation that is still to be done: the imaginary part of z*."""
    units, rows = 3, 4
    z = torch.complex(random(12, units), random(12, units, seed=1)).conj()
    weight, x, h = z[:3].imag, z[4:12].imag.reshape(2, 4, units), z[:4].imag
    assert weight.is_neg()
    assert h.is_neg()

    def step(given: Tensors, x: Tensors, carried: Tensors) -> Any:
        return [torch.tanh(carried[0] @ given[0] + x[0] + given[1])], []

    plain = [[t.clone() for t in own] for own in ([weight, weight[0]], [x], [h])]
    Scan(step, *plain).check([weight, weight[0]], [x], [h])
    carry, drive, decay = z[:rows], z[4:12].reshape(2, 4, units), z[0]

    def rotate(given: Tensors, x: Tensors, carried: Tensors) -> Any:
        new = given[0] * carried[0] + x[0].conj()
        return [new], [new.conj() - carried[0]]

    scan = Scan(rotate, [decay.conj()], [drive.conj()], [carry.conj()])
    scan.check()
    scan.check([decay], [drive], [carry])


def test_parameters_of_any_layout(kernels: None) -> None:
    """The same through a whole segment, as a user may pass them."""
    given = problem("elman")
    params, state, x, y = given.data(4)
    z = torch.complex(torch.zeros_like(params["u"]), -params["u"]).conj()
    ways = [
        {**params, "u": params["u"].T.contiguous().T},
        {**params, "u": z.imag},
        {**params, "b": params["b"].reshape(7, 1).expand(7, 2)[:, 1]},
    ]
    segment = make_train_segment(given.step, given.loss, backend="fused")
    wide = torch.cat([x, x], -1)
    for own in ways:
        assert_close(segment(own, state.T.clone().T, wide[..., 5:], y), reference(given, 4))


# -- whole segments -----------------------------------------------------------------------------


def elman(rows: tuple[int, ...], units: int) -> Problem:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t + h @ params["u"] + params["b"])
        return h, h

    params = {"u": random(units, units, seed=1) / units**0.5, "b": random(units, seed=2)}

    def sequence(seed: int) -> Callable[[int], Tensor]:
        return lambda steps: random(steps, *rows, units, seed=seed)

    return Problem(step, params, random(*rows, units, seed=3), sequence(4), sequence(5), mse)


@pytest.mark.parametrize("rows", [(), (1,), (2,), (200,)])
@pytest.mark.parametrize("units", slow_but([2], [1, 2, 5]))
def test_segments(rows: tuple[int, ...], units: int, kernels: None) -> None:
    given = elman(rows, units)
    segment = make_train_segment(given.step, given.loss, backend="fused")
    for steps in (1, 3):
        check(segment, given, steps)


def test_segment_without_rows_of_data(kernels: None) -> None:
    given = elman((0,), 3)
    found = [
        make_train_segment(given.step, lambda out, y: (out - y).square().sum(), backend=backend)(
            *given.data(3)
        )
        for backend in ("fused", "eager")
    ]
    assert_close(found[0], found[1])
    assert found[0].grads["u"].abs().sum() == 0


# -- models of their own weights ----------------------------------------------------------------


def grouped(given: Tensors, x: Tensors, carried: Tensors) -> Any:
    h = torch.tanh(torch.bmm(carried[0], given[0]) + x[0])
    return [h], [h.sum(-1)]


@pytest.mark.parametrize("units", slow_but([3], [3, 17]))
def test_a_weight_for_each_model(units: int, threads: SetThreads) -> None:
    def data(models: int, rows: int) -> tuple[list[Tensor], ...]:
        x, h = random(3, models, rows, units), random(models, rows, units, seed=1)
        return [0.5 * random(models, units, units, seed=2)], [x], [h]

    for count in (1, 2, 3):
        threads(count)
        for models, rows in ((2, 2), (2, 67), (3, 5), (7, 3), (8, 200)):
            Scan(grouped, *data(models, rows)).check()
    (weight,), x, h = data(3, 5)
    scan = Scan(grouped, [weight], x, h)
    scan.check([weight[:1].expand(3, -1, -1)], x, h)
    scan.check([weight.transpose(1, 2)], x, h)


def test_weights_of_several_levels_of_models(kernels: None, threads: SetThreads) -> None:
    """One weight for each outer model, one for each inner one too, one for all."""
    outer, inner, rows, units = 2, 3, 5, 4

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = params
        h = torch.tanh(x_t + torch.tanh(torch.tanh(h @ a) @ b) @ c)
        return h, h

    params = (
        random(outer, units, units, seed=1), random(outer, inner, units, units, seed=2),
        random(units, units, seed=3),
    )  # fmt: skip
    h, x = random(outer, inner, rows, units, seed=4), random(outer, inner, 3, rows, units, seed=5)
    y = random(outer, inner, 3, rows, units, seed=6)
    given = params, h, x, y
    dims = [((None, 0, None), 0, 0, 0), ((0, 0, None), 0, 0, 0)]

    def mapped(backend: str) -> Any:
        segment: Any = make_train_segment(step, mse, backend=backend)
        for level in dims:
            segment = vmap(segment, in_dims=level)
        return segment(*given)

    for count in (1, 3):
        threads(count)
        assert_close(mapped("fused"), mapped("eager"))


def test_no_models_or_no_rows_of_them() -> None:
    for models, rows in ((0, 5), (2, 0)):
        given = [random(models, 3, 3)], [random(3, models, rows, 3)], [random(models, rows, 3)]
        scan = Scan(grouped, *given)  # a kernel or not
        assert_same(scan.run(FUSED), scan.run(EAGER), 0)


def test_these_are_kernels() -> None:
    assert FUSED.describe(Scan(gated, *data_for(3, (5,), 3)).block) == KERNEL
