"""Kernels of reductions, joins and views over the features of a row, against the loop in Python.

Many of them are one kernel: each value is an emit of its own, named in the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ftbptt.backends import EAGER
from ftbptt.kernels.expressions import Unsupported
from ftbptt.kernels.lower import make_row_loop

from ..cells import slow_but
from ..segment.test_random_cells import examples
from .scans import Scan, assert_same, random, scan_of

pytestmark = pytest.mark.usefixtures("poisoned")
Operation = Callable[[Tensor], Tensor]

# Of features [3, 4, 5] behind the rows; axes counted from the back.
REDUCTIONS: dict[str, Operation] = {
    "sum_inner": lambda h: h.sum(-1),
    "sum_inner_kept": lambda h: h.sum(-1, keepdim=True) + h,
    "sum_middle": lambda h: h.sum(-2),
    "sum_outer": lambda h: h.sum(-3),
    "sum_outer_kept": lambda h: h - h.sum(-3, keepdim=True),
    "sum_two": lambda h: h.sum((-1, -2)),
    "sum_outer_and_inner": lambda h: h.sum((-3, -1)),
    "sum_all": lambda h: h.sum((-1, -2, -3)),
    "sum_all_kept": lambda h: h / (2 + h.sum((-1, -2, -3), keepdim=True).abs()),
    "mean": lambda h: h.mean(-1),
    "mean_all": lambda h: h.mean((-1, -2, -3)),
    "var": lambda h: h.var(-1),
    "var_biased": lambda h: h.var((-2, -1), unbiased=False, keepdim=True) * h,
    "std": lambda h: h.std(-2),
    "amax": lambda h: h.amax(-1),
    "amax_outer": lambda h: h.amax((-3, -2), keepdim=True) - h,
    "amin": lambda h: h.amin((-1, -2, -3)),
    "amin_middle": lambda h: h.amin(-2),
    "prod": lambda h: h.prod(-1),
    "norm": lambda h: F.normalize(h, dim=-1),
    "norm_outer": lambda h: h.norm(dim=-3),
    "softmax": lambda h: torch.softmax(h, -1),
    "softmax_backward": lambda h: torch.ops.aten._softmax_backward_data(h, h.sin(), -1, h.dtype),
    "softmax_outer": lambda h: torch.softmax(h, -3),
    "log_softmax": lambda h: torch.log_softmax(h, -2),
    "logsumexp": lambda h: torch.logsumexp(h, -1),
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "layer_norm_of_two": lambda h: F.layer_norm(h, h.shape[-2:]),
    "group_norm": lambda h: F.group_norm(h, h.shape[1]) + F.group_norm(h, 1),
    "of_a_transpose": lambda h: h.transpose(-1, -3).sum(-1),
    "of_a_slice": lambda h: h[..., 1:].sum(-1) + h[..., 0],
    "of_a_broadcast": lambda h: (h[..., :1] + h[..., :1, :]).sum(-2),
    "of_a_sum": lambda h: (h * h.sum(-1, keepdim=True)).sum(-2).amax(-1),
    "dot": lambda h: (h * h.flip(-1) if h.shape[-1] == 1 else h * h).sum((-1, -3)),
}
JOINS: dict[str, Operation] = {
    "cat_inner": lambda h: torch.cat([h, h.sin()], -1),
    "cat_middle": lambda h: torch.cat([h[..., :1, :], h.sin(), h[..., 1:, :]], -2),
    "cat_outer": lambda h: torch.cat([h.sin(), h, h.cos()], -3),
    "cat_of_parts": lambda h: torch.cat([h[..., 2:], h[..., :2]], -1),
    "cat_twice_the_same": lambda h: torch.cat([h.exp(), h.exp()], -3),
    "cat_of_cats": lambda h: torch.cat([torch.cat([h, h], -1), torch.cat([h, -h], -1)], -2),
    "cat_with_a_sum": lambda h: torch.cat([h, h.sum(-1, keepdim=True)], -1),
    "cat_with_numbers": lambda h: torch.cat([torch.zeros_like(h), h, torch.ones_like(h)], -1),
    "cat_read_again": lambda h: torch.cat([h, h.tanh()], -1).sum(-1) + h.sum(-1),
    "cat_of_nothing": lambda h: torch.cat([h[..., :0], h], -1),
    "stack_inner": lambda h: torch.stack([h, h.sin()], -1),
    "stack_outer": lambda h: torch.stack([h.cos(), h], 1),
    "stack_middle": lambda h: torch.stack([h, h.sum(-1, keepdim=True).expand_as(h)], -2),
    "slice_scatter": lambda h: torch.slice_scatter(h, h[..., 1:3].sin(), -1, 1, 3),
    "slice_scatter_ends": lambda h: torch.slice_scatter(h, h[..., -2:].sin(), -1, -2),
    "slice_scatter_all": lambda h: torch.slice_scatter(h, h.sin(), -2),
    "slice_scatter_odd": lambda h: torch.cat([h, h], -1).slice_scatter(h.sin(), -1, 1, None, 2),
    "slice_scatter_even": lambda h: torch.cat([h, h], -2).slice_scatter(h.sin(), -2, 0, None, 2),
    "slice_scatter_none": lambda h: torch.slice_scatter(h, h[..., 3:1].sin(), -1, 3, 1),
    "select_scatter": lambda h: torch.select_scatter(h, h[..., 0].sin(), -1, -1),
    "roll": lambda h: h.roll(1, -1) + h.sin().roll((-2, 1), (-2, -1)) + h.roll(4, -2) + h.roll(7),
    "pad": lambda h: F.pad(h.sin(), (1, 2)),
    "pad_two": lambda h: F.pad(h, (1, 2, 0, 1), value=2.5),
    "pad_less": lambda h: F.pad(h, (-1, 0, 1, -2)),
}
# Of matrices [20, 19] of each row, in more than one head.
PRODUCTS: dict[str, Operation] = {
    "matrix_vector": lambda h: h @ h[..., :1, :].mT,
    "vector_matrix": lambda h: h[..., :1].mT @ h,
    "transposed_vector": lambda h: h.mT @ h[..., :1],
    "outer": lambda h: h[..., :1] @ h[..., :1, :].tanh(),
    "dot": lambda h: h[..., :1, :] @ h[..., :1, :].mT,
    "einsum": lambda h: torch.einsum("bhij,bhj,bhi->bh", h, h[..., 0, :], h[..., 0]),
    "two_vectors": lambda h: h[..., :2, :] @ h[..., 3:, :].mT,
    "two_vectors_after": lambda h: h @ h[..., :2, :].mT.contiguous(),
    "attention": lambda h: torch.softmax(h[..., :2, :] @ h.mT, -1) @ h,
    "delta_rule": lambda h: h - (h @ h[..., :1, :].mT - h[..., 1:2]) @ h[..., :1, :],
    "one_head": lambda h: h[:, 0] @ h[:, 1, 0, :, None],
    "of_nothing": lambda h: h[..., :0] @ h[..., :0].mT[..., :2],
}
VIEWS: dict[str, Operation] = {
    "transpose": lambda h: h.transpose(-1, -2).sin(),
    "permute": lambda h: h.permute(0, 3, 1, 2) * 2,
    "reshape": lambda h: h.reshape(len(h), -1).sin(),
    "reshape_apart": lambda h: h.reshape(len(h), 2, -1).cos(),
    "reshape_moving": lambda h: h.transpose(-1, -2).reshape(len(h), -1),
    "strided": lambda h: h[..., ::2].sin(),
    "select": lambda h: h[..., 1] * h[..., 2],
    "from_the_end": lambda h: h[..., -1:, :].sin(),
    "unsqueeze": lambda h: h.unsqueeze(1) + h.unsqueeze(2),
    "outer_product": lambda h: h[:, 0, :, None, 0] * h[:, 0, None, :, 1],
    "expand": lambda h: h[:, :1, :1, :1].expand(-1, 2, 3, 4) * 2.0,
    "as_it_is": lambda h: h,
    "diagonal_of_a_view": lambda h: h[:, 1:, :, 1:].transpose(1, 3).sin(),
    "chunks": lambda h: torch.sigmoid(h.chunk(2, -2)[0]) * torch.tanh(h.chunk(2, -2)[1]),
}


def check(operations: dict[str, Operation], carry: Tensor, tolerance: float = 1e-12) -> None:
    """All of them in one kernel."""

    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        h = 0.5 * carried[0] + x[0]
        return [h], [operation(h) for operation in operations.values()]

    sequence = random(3, *carry.shape, dtype=carry.dtype, seed=1)
    scan = Scan(step, [], [sequence], [carry])
    for reverse in (False, True):
        found, wanted = scan.fused(reverse=reverse)[2:], scan.run(EAGER, reverse=reverse)[2:]
        for name, a, b in zip(operations, found, wanted, strict=True):
            try:
                assert_same([a], [b], tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}, reverse={reverse}: {error}") from None


@pytest.mark.parametrize("operations", [REDUCTIONS, JOINS, VIEWS], ids=["reduce", "join", "view"])
def test_features(operations: dict[str, Operation]) -> None:
    check(operations, random(2, 3, 4, 5))


@pytest.mark.parametrize("dtype", slow_but([torch.float64], [torch.float64, torch.float32]))
def test_products_of_the_matrices_of_each_row(dtype: torch.dtype) -> None:
    check(PRODUCTS, random(3, 2, 20, 19, dtype=dtype), 64 * torch.finfo(dtype).eps)


def test_products_of_no_rows() -> None:
    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        return [torch.tanh(carried[0] @ carried[0].mT + x[0])], []

    Scan(step, [], [random(2, 0, 4, 4)], [random(0, 4, 4)]).check()


@pytest.mark.parametrize(
    "features", slow_but([(5, 7), (2, 3, 7)], [(3, 20), (5, 7), (2, 3, 7), (4, 1)])
)
def test_products_of_several_vectors_of_a_row(features: tuple[int, ...]) -> None:
    """With one weight for all, and, as the heads of a block-diagonal matrix, with one for each."""
    rows, heads, k = 5, features[0], features[-1]
    sequence, carry = random(3, rows, *features), random(rows, *features)
    weights = [random(k, k, seed=1), random(heads, k, k, seed=2), random(k, 6, seed=3)]

    def step(weights: Sequence[Tensor], x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        shared, by_head, wide = weights
        h = torch.tanh(carried[0] @ shared + x[0] + carried[0].mean(1, keepdim=True))
        after = torch.einsum("bh...d,hde->bh...e", h, by_head).sin()
        return [after], [h[:, 1:] @ wide, h[..., 1:] @ wide[1:], x[0] @ shared, after @ shared.mT]

    Scan(step, weights, [sequence], [carry]).check()


@pytest.mark.parametrize("rows", [4, 3])
def test_products_of_several_vectors_with_a_weight_of_each_row(rows: int) -> None:
    """As many rows as vectors: the weights could also be those of the vectors."""
    sequence, carry = random(3, rows, 4, 6), random(rows, 4, 6)

    def step(weights: Sequence[Tensor], x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        mean = carried[0].mean(1, keepdim=True)
        return [torch.tanh(torch.bmm(carried[0], weights[0]) + x[0] + mean)], []

    Scan(step, [random(rows, 6, 6, seed=1)], [sequence], [carry]).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_in_lower_precision(dtype: torch.dtype) -> None:
    """Added up in float32, in vectors: rows of 37 numbers."""
    names = ["sum_inner", "amax", "softmax", "layer_norm", "prod", "var", "logsumexp"]
    carry = random(3, 37, dtype=dtype)
    check({name: REDUCTIONS[name] for name in names}, carry, 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("features", [(1,), (2,), (1, 1), (1, 5), (5, 1), (1, 4, 1)])
def test_axes_of_one_element(features: tuple[int, ...]) -> None:
    names = ["sum_inner", "sum_inner_kept", "amax", "mean", "softmax"]
    operations = {name: REDUCTIONS[name] for name in names}
    operations |= {name: JOINS[name] for name in ("cat_inner", "cat_with_a_sum", "stack_inner")}
    operations |= {
        "squeeze": lambda h: h.squeeze(),
        "cat_first_feature": lambda h: torch.cat([h, h.sin()], 1),
        "sum_all": lambda h: h.sum(tuple(range(1, h.dim()))),
        "broadcast": lambda h: (h.unsqueeze(-1) + h.unsqueeze(-2)).sum(-1),
    }
    check(operations, random(3, *features))


def test_special_numbers_in_reductions() -> None:
    """NaN wins in amax; the maximum of infinities; a softmax of -inf."""
    inf, nan = float("inf"), float("nan")
    carry = random(6, 9)
    carry[0, 8], carry[1, 0], carry[2, 3] = nan, inf, -inf
    carry[3], carry[4], carry[5, 4:] = -inf, inf, 0.0
    names = ["sum_inner", "amax", "amin", "softmax", "mean", "prod", "logsumexp"]
    check({name: {**REDUCTIONS, "amin": lambda h: h.amin(-1)}[name] for name in names}, carry)


def test_parts_of_several_dtypes() -> None:
    """What is joined has the dtype that torch gives it, whichever part is first."""
    operations: dict[str, Operation] = {
        "stack": lambda h: torch.stack([(3 * h).long(), h, h.float()], -1),
        "stack_of_flags": lambda h: torch.stack([h > 0, (3 * h).long()], 1),
        "cat": lambda h: torch.cat([h > 0, (3 * h).long(), h], -1),
        "slice_scatter": lambda h: h.slice_scatter((3 * h[:, 1:3]).long(), 1, 0, 2),
        "slice_scatter_wider": lambda h: h.float().slice_scatter(h[:, 1:3].sin(), 1, 0, 2),
        "select_scatter": lambda h: h.select_scatter(h[:, 2] > 0, 1, 0),
    }
    check(operations, random(3, 5))


def test_reductions_of_a_single_number() -> None:
    """It has no axes, but torch takes 0 and -1 as one."""
    operations: dict[str, Operation] = {
        "sum": lambda h: h.sum(0),
        "sum_kept": lambda h: h.sum(-1, keepdim=True),
        "mean": lambda h: h.mean(0),
        "var": lambda h: h.var(0, correction=0),
        "amax": lambda h: h.amax(-1),
        "prod": lambda h: h.prod(0),
        "softmax": lambda h: h.softmax(0),
        "logsumexp": lambda h: h.logsumexp(-1),
    }
    check(operations, random())


REFUSED: dict[str, tuple[str, Operation]] = {
    "cumsum": ("cumsum", lambda h: h.cumsum(-1)),
    "sort": ("sort", lambda h: h.sort(-1).values),
    "sum of flags": ("sum", lambda h: h * (h > 0).sum(-1, keepdim=True)),
    "every other of an odd number": (
        "slice_scatter",
        lambda h: h.slice_scatter(h[..., ::2].sin(), -1, 0, None, 2),
    ),
    "product of large matrices": ("bmm", lambda h: h @ h.mT),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_operation_that_stops_a_kernel_is_named(name: str) -> None:
    stops, operation = REFUSED[name]
    carry = random(2, 3, 17, 17)

    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        return [torch.tanh(operation(carried[0])) + x[0]], []

    block = scan_of(step, [], [random(2, *carry.shape)], [carry])
    with pytest.raises(Unsupported, match=f"^{stops}[._a-zA-Z]* "):
        make_row_loop(block)


# -- random graphs --------------------------------------------------------------------------------

UNARY: list[Operation] = [
    torch.tanh, torch.sigmoid, lambda a: a.sin(), lambda a: a.abs(), lambda a: a * a,
    lambda a: a - a.mean(-1, keepdim=True), lambda a: a / (1 + a.abs().sum(-1, keepdim=True)),
    lambda a: torch.softmax(a, -1), lambda a: a - a.amax(1, keepdim=True),
    lambda a: torch.cat([a[..., 1:], a[..., :1]], -1), lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
    lambda a: torch.where(a > 0, a, 0.1 * a), lambda a: a[:, :1].expand_as(a).exp().clamp(max=3.0),
    lambda a: torch.slice_scatter(a, a[..., :2].cos(), -1, 1, 3),
    lambda a: a.flatten(1).sin().reshape(a.shape),
    lambda a: a.movedim(0, 1).contiguous().sin().movedim(0, 1),
    lambda a: a.mT.contiguous().mT.exp(),
    lambda a: torch.softmax(a.movedim(0, -1).contiguous(), 0).movedim(-1, 0),
    lambda a: torch.stack([a, a.sin()], -1).sum(-1), lambda a: a.to(torch.float32).to(a.dtype),
    lambda a: a.sum((1, 2), keepdim=True).tanh() + a, lambda a: a.mT.cos().mT,
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2,
    lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.cat([a[..., :2], b[..., 2:]], -1),
    lambda a, b: torch.cat([a[:, :1], b[:, 1:]], 1),
    lambda a, b: a * b.sum(-1, keepdim=True), lambda a, b: a + b.select(1, 0).unsqueeze(1),
]  # fmt: skip


@st.composite
def recipes(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Operations on values so far, of which the first are the carry and the input; the emits."""
    count = draw(st.integers(4, 14))
    operations = st.integers(0, len(UNARY) + len(BINARY) - 1)
    ops = []
    for i in range(count):
        recent = st.one_of(st.integers(max(0, i - 1), i + 1), st.integers(0, i + 1))
        ops.append((draw(operations), draw(recent), draw(recent)))
    return ops, draw(st.lists(st.integers(0, count + 1), max_size=3))


def check_recipe(recipe: tuple[list[tuple[int, int, int]], list[int]]) -> None:
    ops, emits = recipe

    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        values = [*carried, *x]
        for op, a, b in ops:
            if op < len(UNARY):
                values.append(UNARY[op](values[a]))
            else:
                values.append(BINARY[op - len(UNARY)](values[a], values[b]))
        return [torch.tanh(values[-1])], [values[i] for i in emits]

    # As far as float32, through which some go, may be apart.
    Scan(step, [], [random(3, 5, 4, 6)], [random(5, 4, 6, seed=1)]).check(tolerance=1e-5)


@examples(8)
@given(recipe=recipes())
def test_random_graphs(recipe: Any) -> None:
    check_recipe(recipe)


@pytest.mark.slow
@examples(100)
@given(recipe=recipes())
def test_many_random_graphs(recipe: Any) -> None:
    check_recipe(recipe)
