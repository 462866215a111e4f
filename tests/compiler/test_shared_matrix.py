"""Einsum with a matrix that is the same at every step, as in the convolution of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment

from ..cells import slow_but
from ..cells.problems import Draw, Problem, mse
from ..oracle import assert_close, check
from ..sequences import looped, stacked

Tree = Any
B, H, K = 3, 4, 4
N = 18  # nodes: more than a kernel multiplies by itself
Form = Callable[[Tensor, Tensor], Tensor]


def by_group(a: Tensor, h: Tensor) -> Tensor:
    """With two axes of rows."""
    groups = h.unflatten(2, (2, 2)).transpose(1, 2)
    return torch.einsum("nm,bgmh->bgnh", a, groups).transpose(1, 2).flatten(2)


def columns(a: Tensor, h: Tensor) -> Tensor:
    """Of values that have the rows last."""
    return torch.einsum("ij,jb->ib", a, h[..., 0].T).T.unsqueeze(-1)


FORMS: dict[str, Form] = {
    "first": lambda a, h: torch.einsum("nm,bmh->bnh", a, h),
    "second": lambda a, h: torch.einsum("bmh,nm->bnh", h, a),
    "transposed": lambda a, h: torch.einsum("bnh,nm->bmh", h, a),
    "spaces and capitals": lambda a, h: torch.einsum("Nm, bmh -> bNh", a, h),
    "implicit": lambda a, h: torch.einsum("cb,abd", a, h),
    "sublists": lambda a, h: torch.einsum(a, [0, 1], h, [2, 1, 3], [2, 0, 3]),
    "ellipsis": lambda a, h: torch.einsum("nm,...mh->...nh", a, h),
    "in another order": lambda a, h: torch.einsum("nm,bmh->nhb", a, h).movedim(-1, 0),
    "by group": by_group,
    "several": lambda a, h: torch.einsum("knm,bmc->bknc", torch.stack([a, a.cos()]), h).sum(1),
}
OTHERS: dict[str, Form] = {
    "last axis": lambda a, h: torch.einsum("bmh,hk->bmk", h, a[:H, :H]),
    "two axes": lambda a, h: torch.einsum("mh,bmh->b", a[:, :H], h)[:, None, None],
    "of the state": lambda a, h: a[0, 0] * torch.einsum("bmh,bnh->bmn", h, h)[..., :H],
    "columns": columns,
    "nodes first": lambda a, h: torch.einsum("nm,mbh->nbh", a[:B, :B], h),
    "heads": lambda a, h: torch.einsum("bmh,mhk->bmk", h, a[:, :H, None] * a[0, :H]),
    "each head": lambda a, h: torch.einsum("bi,jik->bjk", h[:, 0], a[:, :H, None] * a[0, :H]),
}


def problem(product: Form, nodes: int = N) -> Problem:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t + product(params["a"], h @ params["w"]))
        return h, h

    draw = Draw(0)
    params = {"a": draw(nodes, nodes) / 4, "w": draw(H, H)}
    sequence = draw.sequence(B, nodes, H)
    return Problem(step, params, draw(B, nodes, H), sequence, draw.sequence(B, nodes, H), mse)


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_forms(name: str) -> None:
    case = problem((FORMS | OTHERS)[name])
    check(make_train_segment(case.step, case.loss, backend="eager"), case, K)


@pytest.mark.parametrize("name", slow_but(["first", "transposed"], FORMS))
def test_a_kernel_runs(name: str, kernels: None) -> None:
    case = problem(FORMS[name])
    segment = make_train_segment(case.step, case.loss, backend="fused")
    check(segment, case, K)
    explanation = str(segment.explain(*case.data(K)))
    assert explanation.count("one generated C++ kernel") == 2, explanation
    # The gradient of the matrix is still one product over all steps.
    assert explanation.count("contracted over") == 2, explanation


@pytest.mark.parametrize("first", [True, False])
def test_a_product_that_is_best_as_it_is(first: bool) -> None:
    """Of a large matrix, or of the input alone, which leaves the recurrence."""
    form, nodes = FORMS["first" if first else "second"], 68

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.tanh(form(params["a"][:N, :N], x_t[:, :N]) + h[:, :N] @ params["w"])

    large = problem(form, nodes)
    draw = Draw(0)
    of_input = replace(large, step=step, state=draw(B, N, H), y=draw.sequence(B, N, H))
    for case, size in ((large, nodes), (of_input, N)):
        segment = make_train_segment(case.step, case.loss, backend="eager")
        check(segment, case, K)
        assert f"[1, {size}, {size}]" in str(segment.explain(*case.data(K)))


@pytest.mark.parametrize("ensemble", [False, True])
def test_vmap(ensemble: bool) -> None:
    case = problem(FORMS["transposed"])
    segment = make_train_segment(case.step, case.loss, backend="eager")
    calls = []
    for i in range(2):
        params, state, x, y = case.data(K)
        params = {key: p + 0.1 * i for key, p in params.items()} if ensemble else params
        calls.append((params, state - 0.1 * i, x + 0.1 * i, y))
    batch = [stacked([call[i] for call in calls]) for i in range(4)]
    if not ensemble:
        batch[0] = calls[0][0]
    mapped = vmap(segment, in_dims=(0 if ensemble else None, 0, 0, 0))(*batch)
    assert_close(mapped, looped(case, calls))
