"""Values whose rows are not their first axes, as those of einsum over heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ..cells import slow_but
from .scans import Scan, random

pytestmark = pytest.mark.usefixtures("poisoned")
Tensors = Sequence[Tensor]


def by_head(x: Tensor, heads: int) -> Tensor:
    """``[*rows, heads * units] -> [heads, *rows, units]``"""
    return x.unflatten(-1, (heads, -1)).movedim(-2, 0)


def by_row(x: Tensor) -> Tensor:
    """``[heads, *rows, units] -> [*rows, heads * units]``"""
    return x.movedim(0, -2).flatten(-2)


def make_heads(heads: int) -> Any:
    """A step whose values have the heads first: of elementwise operations, sums and joins."""

    def step(given: Tensors, x: Tensors, carried: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        (weight, gain), (drive,), (h, c) = given, x, carried
        rows = h.shape[:-1]
        product = torch.bmm(by_head(h, heads).flatten(1, -2), weight)
        gates = product.unflatten(1, rows) + by_head(drive, heads)
        i, f = gates.chunk(2, -1)
        i = torch.tanh(i - i.mean(-1, keepdim=True)) * gain
        largest = f.amax(-1, keepdim=True)
        joined = torch.cat([torch.sigmoid(f - largest), i.contiguous()], -1)
        forget, entered = joined.chunk(2, -1)
        c = by_row(forget) * c + by_row(entered)
        h = torch.tanh(c) - by_row(largest.expand(f.shape)) / 9
        return [h, c], [joined, largest, gates.sum(0), by_row(gates)]

    return step


@pytest.mark.parametrize("rows", slow_but([(2, 3)], [(5,), (1,), (2, 3), (1, 3), (3, 1)]))
@pytest.mark.parametrize(("heads", "units"), [(2, 3), (3, 5), (5, 5), (1, 4)])
def test_heads_first(rows: tuple[int, ...], heads: int, units: int) -> None:
    """Also as many rows as heads, and as units."""
    size = heads * units
    given = [0.4 * random(heads, units, 2 * units, seed=1), random(units, seed=2)]
    drive = random(4, *rows, 2 * size, seed=3)
    carried = [random(*rows, size, seed=4), random(*rows, size, seed=5)]
    Scan(make_heads(heads), given, [drive], carried).check()


def test_rows_last() -> None:
    """``W @ h.T``, and the norms of the columns."""

    def step(given: Tensors, x: Tensors, carried: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        (h,) = carried
        columns = torch.tanh(h.T.contiguous() + x[0])
        norms = columns.square().sum(0, keepdim=True)
        products = columns.prod(0)
        return [(columns / (1 + norms)).T], [columns, norms, products]

    for rows, units in [(5, 3), (4, 4), (3, 1)]:
        Scan(step, [], [random(4, units, rows, seed=1)], [random(rows, units, seed=2)]).check()


def test_a_join_with_nothing() -> None:
    """``cat`` drops a vector of no elements, whatever the axes of the others."""

    def step(given: Tensors, x: Tensors, carried: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        (h,) = carried
        joined = torch.cat([torch.tanh(h.T.contiguous()), x[0][0, :0]], 0)
        return [joined.T + x[0]], [joined]

    Scan(step, [], [random(4, 5, 3, seed=1)], [random(5, 3, seed=2)]).check()


def test_what_mixes_as_many_rows_as_units() -> None:
    """A square that is added to its transpose: no axis is that of the rows."""

    def step(given: Tensors, x: Tensors, carried: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        (h,) = carried
        return [torch.tanh(h + h.T + x[0])], [h.T.contiguous(), (h * h.T).sum(0)]

    Scan(step, [], [random(4, 3, 3, seed=1)], [random(3, 3, seed=2)]).check()


# models, rows, heads
MODELS = [(2, 5, 3), (3, 2, 4), (1, 3, 2), (3, 1, 2), (2, 3, 1), (2, 4, 2), (4, 2, 4), (2, 2, 2)]


def heads_of_models(models: int, rows: int, heads: int, units: int = 3) -> Scan:
    """A weight for each head of each model, as vmap makes of a product by head."""

    def mixed(h: Tensor, weight: Tensor) -> Tensor:
        by_head = h.transpose(1, 2).reshape(models * heads, rows, units)
        return torch.bmm(by_head, weight).unflatten(0, (models, heads)).transpose(1, 2)

    def step(given: Tensors, x: Tensors, carried: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        (h,) = carried
        gates = mixed(h, given[0]) + x[0]
        i, f = gates.chunk(2, -1)
        h = torch.sigmoid(f) * h + mixed(torch.tanh(i), given[1])
        return [h], [gates, i.square().sum(-1)]

    weights = [random(models * heads, units, n, seed=n) / units for n in (2 * units, units)]
    shape = models, rows, heads
    return Scan(step, weights, [random(4, *shape, 2 * units)], [random(*shape, units, seed=1)])


@pytest.mark.parametrize("sizes", slow_but(MODELS[:5], MODELS))
def test_heads_of_several_models(
    sizes: tuple[int, int, int], threads: Callable[[int], None]
) -> None:
    scan = heads_of_models(*sizes)
    for count in (1, 3):
        threads(count)
        scan.check()
