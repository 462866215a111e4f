"""Random cells: expression graphs over the state, the input and weights, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftbptt import make_train_segment

from .oracle import check
from .problem import B, Draw, H, Problem, mse, per_row, per_step

WEIGHTS = 3
Tree = Any

UNARY = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda a: torch.softmax(a, dim=-1),
    "negate": lambda a: -a,
    "shift": lambda a: torch.cat([a[:, 1:], a[:, :1]], dim=-1),
    "centre": lambda a: a - a.mean(-1, keepdim=True),
    "detach": lambda a: a.detach(),
    "half": lambda a: 0.5 * a,
}
BINARY = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "subtract": lambda a, b: a - b,
    "where": lambda a, b: torch.where(a > 0.1, a, b),
    "halves": lambda a, b: torch.cat([a[:, : H // 2], b[:, H // 2 :]], dim=-1),
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
}
WEIGHTED = {
    "matmul": lambda a, w: a @ w,
    "transposed": lambda a, w: a @ w.T,
    "product": lambda a, w: a @ (w @ w.T / H),
    "scaled": lambda a, w: a * w[0],
}


@dataclass(frozen=True)
class Recipe:
    """``ops`` append values to [x_t, *state]; the next state and out pick from the values."""

    ops: tuple[tuple[str, int, int], ...]
    leaves: int
    after: tuple[int, ...]
    bounded: tuple[bool, ...]
    outs: tuple[int, ...]
    loss: Any


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    leaves = draw(st.integers(1, 3))
    count = draw(st.integers(1, 8))
    names = st.sampled_from([*UNARY, *BINARY, *WEIGHTED])
    ops = []
    for i in range(count):
        below = st.integers(0, leaves + i)
        ops.append((draw(names), draw(below), draw(below)))
    anything = st.integers(0, leaves + count)
    # Mostly the last values, so that the graph is deep.
    recent = st.integers(max(0, count - 2), leaves + count)
    pick = st.one_of(recent, recent, anything)
    return Recipe(
        tuple(ops),
        leaves,
        tuple(draw(pick) for _ in range(leaves)),
        tuple(draw(st.booleans()) for _ in range(leaves)),
        tuple(draw(st.lists(pick, min_size=1, max_size=2))),
        draw(st.sampled_from([mse, per_step, per_row])),
    )


def step_of(recipe: Recipe) -> Any:
    def step(params: list[Tensor], x_t: Tensor, state: Tree) -> tuple[Tree, Tree]:
        values = [x_t, *state]
        for name, a, b in recipe.ops:
            if name in UNARY:
                values.append(UNARY[name](values[a]))
            elif name in BINARY:
                values.append(BINARY[name](values[a], values[b]))
            else:
                values.append(WEIGHTED[name](values[a], params[b % WEIGHTS]))
        # What may grow without bound is squashed; a plain pick may be x_t, a leaf, or an alias.
        after = tuple(
            torch.tanh(values[i]) if bounded or i > recipe.leaves else values[i]
            for i, bounded in zip(recipe.after, recipe.bounded, strict=True)
        )
        out = sum(values[i] for i in recipe.outs)
        return out, after

    return step


def problem_of(recipe: Recipe) -> Problem:
    draw = Draw(0)
    params = [draw(H, H, scale=0.4) for _ in range(WEIGHTS)]
    state = tuple(draw(B, H) for _ in range(recipe.leaves))
    x, y = draw.sequence(B, H), draw.sequence(B, H)
    return Problem(step_of(recipe), params, state, x, y, recipe.loss)


def examples(count: int) -> Any:
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def check_recipe(recipe: Recipe, backend: str, **options: Any) -> None:
    made = problem_of(recipe)
    segment = make_train_segment(made.step, made.loss, backend=backend, **options)
    for steps in (5, 1, 2):
        check(segment, made, steps)
    if recipe.loss is per_row:
        generator = torch.Generator().manual_seed(0)
        reset = torch.rand(5, B, generator=generator) < 0.3
        mask = torch.rand(5, B, generator=generator) < 0.7
        check(segment, made, 5, reset=reset, mask=mask)


@examples(40)
@given(recipe=recipes())
def test_eager(recipe: Recipe) -> None:
    check_recipe(recipe, "eager")


@examples(15)
@given(recipe=recipes())
def test_recomputed(recipe: Recipe) -> None:
    check_recipe(recipe, "eager", recompute=True)


@pytest.mark.slow
@examples(4)
@given(recipe=recipes())
def test_compiled(recipe: Recipe) -> None:
    check_recipe(recipe, "compile")
