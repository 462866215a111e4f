"""Dtypes of a step: autocast, half precision, several in one, another default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells import problem, slow_but
from ..cells.problems import B, D, Draw, H
from ..oracle import assert_close, assert_same_structure, check, check_low_precision, reference
from .plain_module import K, Plain, problem_of

Tree = Any


def test_autocast() -> None:
    """The segment runs as the eager loop does there, and is another plan."""
    made = problem("lstm_readout", torch.float32)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    plain = segment(*made.data(K))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference(made, K)
        found = segment(*made.data(K))
    assert_same_structure(found, expected)
    assert segment.trace_count == 2
    error = (expected.loss - plain.loss).abs()
    assert error > 0
    assert_close(found, expected, tolerance=2e-2)
    assert_close(segment(*made.data(K)), plain, tolerance=0)


@pytest.mark.parametrize("backend", slow_but(["eager", "fused"], ["eager", "fused", "compile"]))
def test_a_part_of_the_step_without_autocast(backend: str) -> None:
    """What the caller keeps in float32 is not cast when the recorded step runs either."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        return h @ params["v"], h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (out.float() @ torch.ones(H, H) - y).square().mean()

    draw = Draw(0)
    params = {"w": draw(D, H), "u": draw(H, H), "v": draw(H, H)}
    data = [draw(B, H), draw(K, B, D), draw(K, B, H)]
    params, (h, x, y) = {k: p.float() for k, p in params.items()}, [t.float() for t in data]
    segment = make_train_segment(step, loss, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference_segment(step, loss, params, h, x, y)
        found = segment(params, h, x, y)
        assert segment.explain(params, h, x, y).blocks  # the plan is found again
        assert segment.trace_count == 1
    assert (found.state.dtype, found.out.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(found.state, expected.state)
    torch.testing.assert_close(found.loss, expected.loss)
    # `v` has gradients in bfloat16; there, the order of a sum is seen.
    torch.testing.assert_close(found.grads, expected.grads, atol=0.05, rtol=0.02)


def test_float16() -> None:
    draw = Draw(0)
    made = problem_of(draw.module(Plain), draw).to(torch.float16)
    check_low_precision(make_train_segment(made.step, made.loss, backend="eager"), made, K)


def test_mixed_dtypes() -> None:
    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, total = state
        h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        total = total + h.double()
        return h + total.float(), (h, total)

    draw = Draw(0)
    made = problem_of(
        nn.Identity(), draw, step=step, params={"w": draw(D, H), "u": draw(H, H)},
        state=(draw(B, H), draw(B, H)),
    ).to(torch.float32)  # fmt: skip
    made = replace(made, state=(made.state[0], made.state[1].double()))
    segment = make_train_segment(step, made.loss, backend="eager")
    assert_close(segment(*made.data(K)), reference(made, K), tolerance=1e-5)


def test_default_dtype() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params + h * torch.tensor(0.5) + torch.ones(H))
        return h, h

    draw = Draw(0)
    made = problem_of(nn.Identity(), draw, step=step, params=draw(D, H))
    torch.set_default_dtype(torch.float64)
    try:
        check(make_train_segment(step, made.loss, backend="eager"), made, K)
    finally:
        torch.set_default_dtype(torch.float32)
