"""Kernels with products of complex numbers, and with complex numbers taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment, reference_segment
from ftbptt.backends.fused import _source_for
from ftbptt.kernels.expressions import Unsupported

from ..cells.problems import Problem
from ..oracle import assert_close, check
from ..sequences import looped, stacked
from .scans import Scan, random, share_all_products
from .test_fused import not_fused

pytestmark = pytest.mark.usefixtures("poisoned")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.complex(random(*shape, seed=seed), random(*shape, seed=seed + 1))


def rotated(
    given: Sequence[Tensor], x: Sequence[Tensor], carried: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    z = carried[0] @ given[0] + x[0]
    size = z.abs()
    return [z / (1 + size)], [z, size]


@pytest.mark.parametrize(
    ("units", "dtype", "tolerance"),
    [(3, torch.cdouble, 1e-12), (33, torch.cdouble, 1e-12), (33, torch.cfloat, 1e-5)],
)
def test_units_and_rows(units: int, dtype: torch.dtype, tolerance: float) -> None:
    for rows in (1, 20):
        weight, x, h = numbers(units, units), numbers(3, rows, units), numbers(rows, units, seed=2)
        data = [[t.to(dtype)] for t in (weight / units**0.5, x, h)]
        Scan(rotated, *data).check(tolerance=tolerance)


def test_layouts_of_weights() -> None:
    """Transposed, conjugated, with strides, and read as what they are the conjugates of."""
    x, h = numbers(3, 4, 5), numbers(4, 5, seed=2)
    wide = numbers(10, 10, seed=4)
    for weight in (numbers(5, 5).t(), numbers(5, 5).mH, wide[::2, 1::2], wide[:5, :5].conj()):
        Scan(rotated, [weight], [x], [h]).check()


def test_models_and_vectors_of_a_row() -> None:
    """A weight for each model, one for all vectors, and one for each vector."""

    def model(given: Any, x: Any, carried: Any) -> Any:
        return [0.3 * torch.bmm(carried[0], given[0]) + x[0]], []

    def head(given: Any, x: Any, carried: Any) -> Any:
        heads = torch.bmm(carried[0].transpose(0, 1), given[0]).transpose(0, 1)
        return [0.3 * heads + x[0]], []

    weights = numbers(3, 7, 7)
    Scan(model, [weights], [numbers(2, 3, 4, 7)], [numbers(3, 4, 7, seed=2)]).check()
    x, h = numbers(2, 4, 3, 7), numbers(4, 3, 7, seed=2)
    Scan(rotated, [weights[0]], [x], [h]).check()
    Scan(head, [weights], [x], [h]).check()


def test_shared_between_threads(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    share_all_products(monkeypatch)
    for count in (2, 3):
        threads(count)
        Scan(rotated, [numbers(33, 33) / 6], [numbers(3, 4, 33)], [numbers(4, 33, seed=2)]).check()


def test_infinity_and_nan() -> None:
    """As in a product of real numbers: each part is a sum of two products."""
    weight, x = numbers(5, 5), numbers(3, 6, 5)
    x[0, 1, 2] = complex(float("inf"), 1.0)
    x[0, 2, 3] = complex(0.0, float("nan"))

    def product(given: Any, x: Any, carried: Any) -> Any:
        return [x[0]], [carried[0] @ given[0]]

    scan = Scan(product, [weight], [x], [numbers(6, 5, seed=2)])
    found = scan.fused()[-1]
    assert found[1, [0, 3, 4, 5]].isfinite().all()  # of other rows
    parts = torch.view_as_real(found[1, 1:3])
    assert not parts[0].isfinite().any()
    assert parts[1].isnan().all()


@pytest.mark.usefixtures("interpreted")
def test_they_have_no_kernel_on_a_gpu() -> None:
    scan = Scan(rotated, [numbers(33, 33)], [numbers(3, 4, 33)], [numbers(4, 33)])
    with pytest.raises(Unsupported, match=r"GPU kernels do not support torch\.complex128"):
        _source_for(scan.block)


H = 5


def problem(bound: Callable[[Tensor, Any], Tensor]) -> Problem:
    """A complex recurrence (Arjovsky, Shah and Bengio, 2016), with a nonlinearity ``bound``."""

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = bound(h @ params["w"] + x_t.to(h.dtype) @ params["v"], params)
        return torch.cat([h.real, h.imag], -1) @ params["o"], h

    params = {"w": numbers(H, H) / 2, "v": numbers(3, H), "o": random(2 * H, 2), "b": random(H)}
    x, y = random(9, 4, 3), random(9, 4, 2, seed=1)
    return Problem(
        step, params, numbers(4, H, seed=2), lambda k: x[:k], lambda k: y[:k],
        lambda out, y: (out - y).square().mean(-1), rows=4,
    )  # fmt: skip


def mod_relu(z: Tensor, params: Any) -> Tensor:
    size = z.abs()
    return torch.relu(size + params["b"]) * z / (size + 1e-3)


def by_part(z: Tensor, params: Any) -> Tensor:
    return torch.complex(torch.tanh(z.real), torch.sigmoid(z.imag * params["b"]))


def as_pairs(z: Tensor, params: Any) -> Tensor:
    """Each number is divided by the norm of its row, as a vector of real numbers."""
    pairs = torch.view_as_real(z)
    return torch.view_as_complex(pairs / (1 + pairs.square().sum((-2, -1), keepdim=True)).sqrt())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bound", [mod_relu, by_part, as_pairs])
def test_cells(bound: Callable[[Tensor, Any], Tensor]) -> None:
    made = problem(bound)
    segment = make_train_segment(made.step, made.loss, backend="fused")
    assert not_fused(segment.explain(*made.data(4))) == []
    for steps in (1, 9):
        check(segment, made, steps)
    generator = torch.Generator().manual_seed(0)
    reset, mask = (torch.rand(9, 4, generator=generator) < p for p in (0.3, 0.7))
    check(segment, made, 9, reset=reset, mask=mask)


@pytest.mark.parametrize("backend", ["fused", pytest.param("compile", marks=pytest.mark.slow)])
def test_factors_that_are_numbers(backend: str) -> None:
    """Of which the gradient has the conjugate. In a compiled program that was pending, and lost."""

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h * params["v"][0] * 0.2j + x_t[:, :1] / (2 + 1j)
        return h * (1 - 2j), h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (1j * out / 4).exp().real.square().mean() + (out.real - y[..., :1]).square().mean()

    made = problem(mod_relu)
    given = made.data(4)
    segment = make_train_segment(step, loss, backend=backend)
    assert_close(segment(*given), reference_segment(step, loss, *given))


@pytest.mark.usefixtures("kernels")
def test_an_ensemble() -> None:
    made = problem(mod_relu)
    calls = [made.data(5), ({n: 0.7 * p for n, p in made.params.items()}, *made.data(5)[1:])]
    segment = make_train_segment(made.step, made.loss, backend="fused")
    batch = [stacked([call[i] for call in calls]) for i in range(4)]
    assert_close(vmap(segment)(*batch), looped(made, calls))
