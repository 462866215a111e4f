"""A call like one before is not laid out again, and gives the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment

from ..oracle import assert_close

Tree = Any


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
    """On a state of any nesting that has ``fast`` and ``slow`` inside."""
    fast, (slow, *rest) = state["fast"], state["slow"]
    fast = torch.tanh(x_t * params["w"] + fast)
    slow = slow + params["inner"][0] * fast
    return fast + slow, {"fast": fast, "slow": type(state["slow"])([slow, *rest])}


def arguments(state: Tree) -> tuple[Any, ...]:
    params = {"w": torch.randn(3), "inner": [torch.randn(3)]}
    return params, state, torch.randn(4, 2, 3), torch.randn(4, 2, 3)


def state_of(kind: Any) -> Tree:
    return {"fast": torch.zeros(2, 3), "slow": kind([torch.zeros(2, 3), torch.zeros(2)])}


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call that is laid out."""
    import ftbptt.segment.train_segment as module

    calls: list[int] = []
    original = module.lay_out

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(module, "lay_out", counted)
    return calls


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_nested_call_is_recalled(kind: Any, laid_out: list[int]) -> None:
    torch.manual_seed(0)
    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend="eager")
    first = segment(*arguments(state_of(kind)))
    assert len(laid_out) == 1
    given = arguments(first.state)
    second = segment(*given)
    assert len(laid_out) == 1
    assert type(second.state["slow"]) is kind
    fresh = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend="eager")
    assert_close(second, fresh(*given))
    longer = (*given[:2], torch.randn(5, 2, 3), torch.randn(5, 2, 3))
    segment(*longer)
    assert len(laid_out) == 3  # the fresh one's, and another K
    assert segment.trace_count == 1


def test_structures_are_told_apart(laid_out: list[int]) -> None:
    """The same tensors in another nesting are another call, and may be an error."""
    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend="eager")
    given = arguments(state_of(tuple))
    assert type(segment(*given).state["slow"]) is tuple
    given = (given[0], state_of(list), *given[2:])
    assert type(segment(*given).state["slow"]) is list
    assert len(laid_out) == 2
    with pytest.raises(ValueError, match=r"y: has 3 steps on axis 0, but x has 4"):
        segment(*given[:3], given[3][:3])


def test_a_named_tuple_is_not_recalled_but_kept(laid_out: list[int]) -> None:
    def named(params: Tree, x_t: Tensor, state: Pair) -> tuple[Tensor, Pair]:
        a = torch.tanh(x_t * params["w"] + state.a)
        return a, Pair(a, state.b + a)

    segment = make_train_segment(named, lambda out, y: (out - y).square().mean(), backend="eager")
    state: Any = Pair(torch.zeros(2, 3), torch.zeros(2, 3))
    for _ in range(2):
        state = segment({"w": torch.ones(3)}, state, torch.ones(4, 2, 3), torch.ones(4, 2, 3)).state
        assert type(state) is Pair
    assert len(laid_out) == 2


def test_a_sparse_tensor_is_refused_later_too() -> None:
    """It has the shape, dtype and device of the one that was checked."""
    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend="eager")
    params, state, x, y = arguments(state_of(tuple))
    segment(params, state, x, y)
    for given in (
        (params, state, x.to_sparse(), y),
        (params, state, x, y.to_sparse()),
        ({**params, "w": params["w"].to_sparse()}, state, x, y),
    ):
        with pytest.raises(TypeError, match="expected a dense tensor, found one of layout"):
            segment(*given)
