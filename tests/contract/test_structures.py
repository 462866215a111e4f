"""Trees of parameters, states, data and outputs in odd shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, D, Draw, H, Problem, mse, per_row
from ..oracle import assert_close, check, reference
from .plain_module import K, Plain, problem_of

Tree = Any


@pytest.mark.parametrize("start", ["none", "tree", "function"])
def test_a_state_with_its_parts_in_another_order(start: str) -> None:
    """It is the same to whoever reads it by name."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h = torch.tanh(x_t @ params["w"] + state["h"])
        return h, {"past": ({"b": h, "a": state["past"][0]["a"] + 1},), "h": 0.5 * h}

    draw = Draw(0)
    params, x, y = {"w": draw(D, H), "start": draw(B, H)}, draw(K, B, D), draw(K, B, H)
    state = {"h": draw(B, H), "past": ({"a": draw(B, H), "b": draw(B, H)},)}
    tree = {"past": ({"b": draw(B, H), "a": draw(B, H)},), "h": draw(B, H)}
    function = lambda params: {**tree, "h": params["start"]}  # noqa: E731
    initial: Any = {"none": None, "tree": tree, "function": function}[start]
    reset = torch.rand(K, B) < 0.4
    segment = make_train_segment(step, mse, backend="eager", initial_state=initial)
    found = segment(params, state, x, y, reset=reset)
    expected = reference_segment(step, mse, params, state, x, y, reset=reset, initial_state=initial)
    assert_close(found, expected)
    assert list(found.state) == ["h", "past"]
    assert list(found.state["past"][0]) == ["a", "b"]


def test_no_rows_at_all() -> None:
    draw = Draw(0)
    module = draw.module(Plain)
    x, y = draw.sequence(0, D), draw.sequence(0, H)
    made = problem_of(module, draw, state=draw(0, H), x=x, y=y)
    total = replace(made, loss=lambda out, y: (out - y).square().sum())
    check(make_train_segment(module, total.loss, backend="eager"), total, K)


def test_one_tensor_given_twice() -> None:
    """The same zeros for h and c, the same weight under two names, y a view of x."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, c = state
        c = torch.tanh(x_t @ params["w"] + c)
        h = torch.sigmoid(h @ params["u"] + c)
        return h, (h, c)

    draw = Draw(0)
    zeros, w, data = torch.zeros(B, H).double(), draw(H, H), draw.sequence(B, H)
    made = Problem(
        step, {"w": w, "u": w}, (zeros, zeros),
        lambda steps: data(steps + 1)[:-1], lambda steps: data(steps + 1)[1:], per_row,
    )  # fmt: skip
    whole = data(K + 1)
    segment = make_train_segment(step, per_row, backend="eager")
    check(segment, made, K)
    found = segment(made.params, made.state, whole[:-1], whole[1:])
    assert_close(found, reference(made, K))
    assert not torch.equal(found.grads["w"], found.grads["u"])


@pytest.mark.parametrize("params", [{}, (), []], ids=["dict", "tuple", "list"])
def test_nothing_to_train_and_nothing_to_carry(params: Any) -> None:
    draw = Draw(0)
    made = Problem(
        lambda params, x_t, state: (torch.tanh(x_t), state), params, (),
        draw.sequence(B, D), draw.sequence(B, D), mse,
    )  # fmt: skip
    check(make_train_segment(made.step, mse, backend="eager"), made, K)


def test_params_as_one_tensor_and_out_as_nothing() -> None:
    draw = Draw(0)
    made = Problem(
        lambda w, x_t, h: ((), torch.tanh(x_t @ w + h)), draw(D, H), draw(B, H),
        draw.sequence(B, D), draw.sequence(B, H), lambda out, y: y.mean(),
    )  # fmt: skip
    check(make_train_segment(made.step, made.loss, backend="eager"), made, K)


def test_a_dataclass() -> None:
    """The state of many sequence models. It is a leaf until it is registered, and then a tree."""

    @dataclass
    class Cache:
        h: Tensor
        seen: Tensor

    def step(params: Tree, x_t: Tensor, cache: Cache) -> tuple[Cache, Cache]:
        h = torch.tanh(x_t @ params["w"] + cache.h)
        return Cache(2 * h, cache.seen), Cache(h, cache.seen + 1)

    def no_dataclass(params: Tree, x_t: Tensor, state: Tree) -> tuple[Cache, Tree]:
        return Cache(state["h"], x_t), state

    draw = Draw(0)
    params, cache = {"w": draw(D, H)}, Cache(draw(B, H), torch.zeros(B, dtype=torch.long))
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    made = Problem(step, params, cache, x, y, lambda out, y: mse(out.h, y))
    segment = make_train_segment(step, made.loss, backend="eager")
    register = r"register its class, torch\.export\.register_dataclass\(Cache\)"
    with pytest.raises(TypeError, match=f"state: expected a tensor, found Cache.*{register}, or"):
        segment(*made.data(K))
    other = make_train_segment(no_dataclass, made.loss, backend="eager")
    with pytest.raises(TypeError, match=f"in out_t, found Cache at out.*, or {register}"):
        other(params, {"h": cache.h}, *made.data(K)[2:])
    torch.export.register_dataclass(Cache)
    check(segment, made, K)
