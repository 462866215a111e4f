"""Random cells against the eager loop, on every backend, vmapped and not.

``CELLS=2000 pytest tests/segment/test_random_cells.py`` draws other ones at each call, and prints
a recipe that fails; it becomes a test of its own at the end of this file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.func import vmap
from torch.utils._pytree import tree_map

from ftbptt import make_train_segment

from ..cells import slow_but
from ..cells.problems import B, Problem
from ..oracle import assert_close, check
from ..sequences import looped, stacked
from .random_losses import SQUARES, is_by_step
from .random_steps import Recipe, problem_of, recipes, start_of

pytestmark = [
    # vmap says so where it has no rule for an operation, and does one after the other.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # Of a cell whose only output is detached.
    pytest.mark.filterwarnings("ignore:ftbptt. the loss of step has no gradient"),
]
CELLS = int(os.environ.get("CELLS", "0"))
N = 2  # sequences, or models


def examples(count: int) -> Any:
    """So many cells, the same each time; or as many as were asked for, others each time."""
    return settings(
        max_examples=max(1, count * CELLS // 50) if CELLS else count,
        derandomize=not CELLS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def flags(recipe: Recipe, steps: int) -> dict[str, torch.Tensor]:
    """Resets and padding; a scalar loss cannot be padded."""
    generator = torch.Generator().manual_seed(recipe.seed)
    returns = recipe.loss[-1]
    shape = (steps,) if returns == "per step" else (steps, B)
    given = {"reset": torch.rand(shape, generator=generator) < 0.3}
    if is_by_step(returns):
        given["mask"] = torch.rand(shape, generator=generator) < 0.7
    return given


def check_recipe(recipe: Recipe, backend: str, **options: Any) -> None:
    made = problem_of(recipe)
    start = start_of(recipe, made.state)
    segment = make_train_segment(
        made.step, made.loss, backend=backend, initial_state=start, **options
    )
    for steps in (4, 1):
        check(segment, made, steps)
    check(segment, made, 5, initial_state=start, **flags(recipe, 5))


def check_vmapped(recipe: Recipe, backend: str) -> None:
    """Sequences that share a model, x with their axis anywhere; models with resets of their own."""
    made = problem_of(recipe)
    start = start_of(recipe, made.state)
    segment = make_train_segment(made.step, made.loss, backend=backend, initial_state=start)
    calls = [made.data(3), _other(made)]
    params, state, x, y = (stacked([call[i] for call in calls]) for i in range(4))
    axis = recipe.seed % 3
    found = vmap(segment, in_dims=(None, 0, axis, 0))(made.params, state, x.movedim(0, axis), y)
    assert_close(found, looped(made, [(made.params, *call[1:]) for call in calls]))
    rows = [flags(replace(recipe, seed=recipe.seed + i), 3) for i in range(N)]
    given = {name: [row[name] for row in rows] for name in rows[0]}

    def by_position(params: Any, state: Any, x: Any, y: Any, own: Any) -> Any:
        return segment(params, state, x, y, **own)

    found = vmap(by_position)(params, state, x, y, stacked(rows))
    assert_close(found, looped(made, calls, initial_state=[start] * N, **given))


def _other(made: Problem) -> Any:
    """Another model on another sequence."""
    return tree_map(lambda leaf: leaf * 0.7 if leaf.is_floating_point() else leaf, made.data(3))


@examples(24)
@given(recipe=recipes())
def test_eager(recipe: Recipe) -> None:
    check_recipe(recipe, "eager")


@examples(10)
@given(recipe=recipes())
def test_recomputed(recipe: Recipe) -> None:
    check_recipe(recipe, "eager", recompute=True)


@examples(10)
@given(recipe=recipes())
def test_vmapped(recipe: Recipe) -> None:
    check_vmapped(recipe, "eager")


@pytest.mark.usefixtures("kernels")
@examples(4)
@given(recipe=recipes())
def test_fused(recipe: Recipe) -> None:
    check_recipe(recipe, "fused")
    check_vmapped(recipe, "fused")


@pytest.mark.slow
@examples(2)
@given(recipe=recipes())
def test_compiled(recipe: Recipe) -> None:
    check_recipe(recipe, "compile")
    check_vmapped(recipe, "compile")


def test_a_learned_start_with_a_count() -> None:
    """The count's own start is made of a tensor that ``initial_state`` closes over."""
    check_recipe(
        Recipe(
            operations=(("tanh", (0,)),), leaves="vi", shape=0, after=(0, 2),
            bounded=(False, False), outs=(0,), loss=(*SQUARES, "per row"), start="learned",
            tied=False, seed=0,
        ),
        "eager",
    )  # fmt: skip


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "compile"]))
def test_features_in_another_order_behind_a_start_that_is_learned(backend: str) -> None:
    """Inductor wrote the gradients of all steps' ``a[:, ORDER]`` to the memory of one."""
    recipe = Recipe(
        operations=(("tanh", (2,)), ("maximum", (0, 4)), ("order", (5,))), leaves="vvi", shape=2,
        after=(6, 0, 3), bounded=(True, False, False), outs=(6,), loss=(*SQUARES, "per step"),
        start="learned", tied=True, seed=0,
    )  # fmt: skip
    made = problem_of(recipe)
    start, reset = start_of(recipe, made.state), flags(recipe, 5)["reset"]
    segment = make_train_segment(made.step, made.loss, backend=backend, initial_state=start)
    check(segment, made, 5, initial_state=start, reset=reset)


def test_a_product_that_is_split_reads_another_one() -> None:
    """``cat([x, h]) @ W`` whose columns come from a product that was split before it."""
    recipe = Recipe(
        operations=(("tanh", (0,)), ("stack", (1, 1)), ("tanh", (2,)), ("tanh", (3,)),
                    ("join", (4, 0)), ("lerp", (5, 5)), ("product", (7,))),
        leaves="vv", shape=0, after=(7, 9), bounded=(False, False), outs=(7,),
        loss=(*SQUARES, "per row"), start="zeros", tied=False, seed=0,
    )  # fmt: skip
    check_recipe(recipe, "eager")


def test_a_loop_is_given_weights_and_no_views_that_change_nothing() -> None:
    """Inductor read freed memory from the second step on, where einsum had turned w twice."""
    recipe = Recipe(
        operations=(("einsum", (0,)), ("einsum", (1,)), ("add", (2, 3)), ("tanh", (4,))),
        leaves="v", shape=0, after=(5,), bounded=(False,), outs=(5,), loss=(*SQUARES, "per step"),
        start="zeros", tied=False, seed=0,
    )  # fmt: skip
    made = problem_of(recipe)
    segment = make_train_segment(made.step, made.loss, backend="compile")
    calls = [made.data(3), _other(made)]
    batch = [stacked([call[i] for call in calls]) for i in range(4)]
    assert_close(vmap(segment)(*batch), looped(made, calls))


@pytest.mark.parametrize("backend", slow_but(["compile"], ["compile", "fused"]))
def test_what_is_added_to_a_tensor_is_a_part_of_it(backend: str) -> None:
    """Inductor added in place, and read the part after it had been added to."""
    recipe = Recipe(
        operations=(("tanh", (0,)), ("some added", (2, 2))), leaves="v", shape=0, after=(1,),
        bounded=(False,), outs=(3,), loss=(*SQUARES, "scalar"), start="zeros", tied=False, seed=1,
    )  # fmt: skip
    made = problem_of(recipe)
    check(make_train_segment(made.step, made.loss, backend=backend), made, 4)
