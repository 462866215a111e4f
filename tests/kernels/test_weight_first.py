"""Products with the weight first, as those over the nodes of a graph: in the kernel of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ftbptt import Explanation, compare_to_reference, make_train_segment, reference_segment
from ftbptt.kernels.expressions import Unsupported
from ftbptt.kernels.lower import make_row_loop

from ..oracle import assert_close
from .scans import KERNEL, random, scan_of

# More than kernels multiply without a weight.
NODES, UNITS, ROWS, STEPS = 18, 17, 3, 4
Params = dict[str, Tensor]


def rows_last(p: Params, h: Tensor) -> Tensor:
    """As the first program of a diffusion convolution was written."""
    rows, nodes, units = h.shape
    columns = p["a"] @ h.permute(1, 2, 0).reshape(nodes, units * rows)
    return columns.reshape(nodes, units, rows).permute(2, 0, 1)


def rows_between(p: Params, h: Tensor) -> Tensor:
    rows, nodes, units = h.shape
    columns = torch.mm(p["a"], h.transpose(0, 1).reshape(nodes, rows * units))
    return columns.reshape(nodes, rows, units).transpose(0, 1)


def of_both_sides(p: Params, h: Tensor) -> Tensor:
    return torch.einsum("nm,bmd,de->bne", p["a"], h, p["v"])


def twice(p: Params, h: Tensor) -> Tensor:
    return p["a"] @ (torch.sigmoid(p["a"] @ h) * h)


def of_flat(p: Params, h: Tensor) -> Tensor:
    """A state that a program keeps as one vector for each row."""
    rows, nodes, units = h.shape
    return (p["a"] @ h.reshape(rows, -1).view(rows, nodes, units)).reshape(rows, -1).view_as(h)


PRODUCTS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "matmul": lambda p, h: p["a"] @ h,
    "einsum": lambda p, h: torch.einsum("nm,bmd->bnd", p["a"], h),
    "transposed": lambda p, h: (h.mT @ p["a"].T).mT,
    "rows last": rows_last,
    "rows between": rows_between,
    "many graphs": lambda p, h: torch.einsum("gnm,bmd->bgnd", p["graphs"], h).tanh().sum(1),
    "learned graph": lambda p, h: (p["a"] @ p["a"].T).softmax(-1) @ h,
    "of both sides": of_both_sides,
    "twice": twice,
    "of flat": of_flat,
}


def problem(
    name: str, nodes: int = NODES, units: int = UNITS, rows: int = ROWS, seed: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """A step, and a segment's arguments."""
    params = {
        "a": random(nodes, nodes, seed=seed) / 4,
        "v": random(units, units, seed=seed + 1) / 4,
        "graphs": random(2, nodes, nodes, seed=seed + 2) / 4,
    }
    shape = rows, nodes, units

    def step(p: Params, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(PRODUCTS[name](p, h) + x)
        return h, h

    x, y = random(STEPS, *shape, seed=seed + 3), random(STEPS, *shape, seed=seed + 4)
    return step, (params, random(*shape, seed=seed + 5), x, y)


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def how_scans_run(explanation: Explanation) -> list[str]:
    return [block.runs for block in explanation.blocks if block.kind == "scan"]


def check(step: Any, arguments: tuple[Any, ...], **flags: Tensor) -> None:
    segment = make_train_segment(step, mse, backend="fused")
    assert_close(segment(*arguments, **flags), reference_segment(step, mse, *arguments, **flags))
    runs = how_scans_run(segment.explain(*arguments, **flags))
    assert runs
    for text in runs:
        assert text.endswith(KERNEL), text


@pytest.mark.parametrize("name", PRODUCTS)
def test_in_a_kernel(name: str, kernels: None) -> None:
    check(*problem(name))


def test_the_same_weight_on_both_sides() -> None:
    """Which a kernel packs once, from one side."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        h = rows_between({"a": given[0]}, carried[0])
        return [torch.mm(h.reshape(-1, NODES), given[0]).view_as(h) + x[0]], []

    _, (params, h, x, _) = problem("rows between", units=NODES)
    with pytest.raises(Unsupported, match="a weight that is multiplied with from both sides"):
        make_row_loop(scan_of(step, [params["a"]], [x], [h]))


@pytest.mark.parametrize("sizes", [(NODES, UNITS, 1), (18, 18, 18), (18, 17, 18), (17, 18, 18)])
def test_equal_sizes(sizes: tuple[int, int, int], kernels: None) -> None:
    """Rows are told from nodes and units by where they lie."""
    for name in PRODUCTS:
        step, arguments = problem(name, *sizes)
        segment = make_train_segment(step, mse, backend="fused")
        assert_close(segment(*arguments), reference_segment(step, mse, *arguments))


def test_reset_and_mask(kernels: None) -> None:
    flags = random(STEPS, ROWS, seed=9)
    step, arguments = problem("einsum")

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean((-1, -2))

    segment = make_train_segment(step, loss, backend="fused")
    given = {"reset": flags > 0.5, "mask": flags < 1}
    found = segment(*arguments, **given)
    assert_close(found, reference_segment(step, loss, *arguments, **given))
    assert all(
        text.endswith(KERNEL) for text in how_scans_run(segment.explain(*arguments, **given))
    )


@pytest.mark.parametrize("name", ["matmul", "einsum", "rows last"])
def test_autocast(name: str, kernels: None) -> None:
    step, arguments = problem(name)
    arguments = tree_map(lambda leaf: leaf.float(), arguments)
    segment = make_train_segment(step, mse, backend="fused")
    with torch.autocast("cpu", torch.bfloat16):
        assert compare_to_reference(segment, *arguments).agrees
        explanation = segment.explain(*arguments)
    assert all(text.endswith(KERNEL) for text in how_scans_run(explanation))


@pytest.mark.parametrize("name", ["matmul", "einsum", "rows last", "many graphs"])
def test_vmap(name: str, kernels: None) -> None:
    """Of models with a graph each: what there is no kernel for is right as well."""
    step, first = problem(name)
    _, second = problem(name, seed=20)
    segment = make_train_segment(step, mse, backend="fused")
    found = torch.func.vmap(segment)(*tree_map(lambda *both: torch.stack(both), first, second))
    for i, arguments in enumerate((first, second)):
        own = tree_map(lambda leaf, i=i: leaf[i], found)
        assert_close(own, reference_segment(step, mse, *arguments))


def test_one_graph_without_a_batch(kernels: None) -> None:
    """Its units are the rows. If they mix, all of it is one row, for which BLAS is faster."""
    step, (params, h, x, y) = problem("matmul", rows=1)
    arguments = params, h[0], x[:, 0], y[:, 0]
    check(step, arguments)

    def mixing(p: Params, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(p["a"] @ h @ p["v"] + x)
        return h, h

    segment = make_train_segment(mixing, mse, backend="fused")
    assert_close(segment(*arguments), reference_segment(mixing, mse, *arguments))
    assert all("no kernel" in text for text in how_scans_run(segment.explain(*arguments)))
