"""Concatenations that are part of larger ones are views of them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ftbptt.compiler.rewrites.shared_cat import share_joins

Function = Callable[..., list[Tensor]]
aten = torch.ops.aten


def shared(function: Function, *args: Tensor, carried: int = 1) -> fx.GraphModule:
    """The function with its joins shared; its first results are the carried ones."""
    module = make_fx(function, tracing_mode="fake")(*args)
    results = module.graph.output_node().args[0]
    share_joins(module.graph, results[:carried])
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*args), function(*args), rtol=0, atol=0)
    return module


def joins_of(module: fx.GraphModule) -> list[int]:
    """The number of parts of each cat."""
    cats = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    return [len(node.args[0]) for node in cats]


A, B, W = torch.randn(3, 2), torch.randn(3, 4), torch.randn(6, 2)


def test_a_join_within_a_larger_one() -> None:
    def function(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        c = a.sin()
        small = torch.cat([b, a], 1)
        return [small @ w, small.sin(), torch.cat([c, b, a], 1)]

    module = shared(function, A, B, W, carried=0)
    assert joins_of(module) == [3]
    views = module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    assert [view.args[1:] for view in views] == [(1, 2, 8)]


def test_inside_the_loop_and_outside_each_reads_a_separate_view() -> None:
    def function(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        a, b, c = a.exp(), b.exp(), (a @ w[:2]).exp()
        small = torch.cat([a, b], 1)
        return [small @ w + c, small.sin(), torch.cat([a, b, c], 1), b.cos()]

    module = shared(function, A, B, W)
    assert joins_of(module) == [3]
    (join,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    views = [user for user in join.users if user.target is aten.slice.Tensor]
    assert sorted(view.args[2:] for view in views) == [(0, 6), (0, 6), (2, 6)]
    assert all(len(view.users) == 1 for view in views)


def test_what_would_grow_the_loop_stays_apart() -> None:
    def function(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        small = torch.cat([a, b], 1)
        return [small @ w, torch.cat([a, b, w[:3].sin()], 1)]

    assert joins_of(shared(function, A, B, W)) == [2, 3]


def test_a_join_that_the_larger_one_is_made_of_stays() -> None:
    def function(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        small = torch.cat([a, b], 1)
        return [torch.cat([a, b, small @ w], 1)]

    assert joins_of(shared(function, A, B, W)) == [2, 3]


@pytest.mark.parametrize("third", [torch.randn(3, 2, dtype=torch.float64), torch.ones(3, 2)])
def test_converted_parts_are_not_shared(third: Tensor) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [torch.cat([a, b], 1).sin(), torch.cat([a, b, c], 1)]

    module = shared(function, A, B, third, carried=0)
    assert joins_of(module) == ([3] if third.dtype == A.dtype else [2, 3])


def test_a_result_stays_as_it_is() -> None:
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.cat([a, b], 1), torch.cat([a, b, a], 1)]

    assert joins_of(shared(function, A, B, carried=0)) == [2, 3]


def test_along_other_axes_they_are_others() -> None:
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.cat([a, b], 0).sin(), torch.cat([a, b, a], 1)]

    assert joins_of(shared(function, A, A, carried=0)) == [2, 3]
