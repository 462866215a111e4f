"""Random steps, drawn by hypothesis: what an engineer might write, and what nobody would.

A recipe is plain data, so that a failing one can be printed, kept and made a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..cells.problems import B, Draw, H, Problem
from . import random_losses
from .random_operations import OPERATIONS, WEIGHTS

Tree = Any


@dataclass(frozen=True)
class Recipe:
    """``operations`` append values to [x_t, *state]; the next state and out pick from the values.

    ``leaves`` are the kinds of the state's leaves, ``shape`` how they are nested; ``bounded`` says
    which are squashed, as what may grow without bound is. ``rows``: whether there are resets and
    padding, of each row.
    """

    operations: tuple[tuple[str, tuple[int, ...]], ...]
    leaves: str
    shape: int
    after: tuple[int, ...]
    bounded: tuple[bool, ...]
    outs: tuple[int, ...]
    loss: random_losses.Name
    start: str
    tied: bool
    seed: int


_LEAVES = ["v", "v", "v", "vv", "vv", "vvv", "vi", "vm", "vvi", "vmv"]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    leaves = draw(st.sampled_from(_LEAVES))
    kinds = ["v", *leaves]  # of the values so far, x_t first
    operations = []
    for _ in range(draw(st.integers(1, 10))):
        known = [n for n, (takes, _, _) in OPERATIONS.items() if set(takes) <= set(kinds)]
        name = draw(st.sampled_from(known))
        takes, gives, _ = OPERATIONS[name]
        operations.append((name, tuple(_pick(draw, kinds, kind) for kind in takes)))
        kinds.append(gives)
    return Recipe(
        tuple(operations),
        leaves,
        draw(st.integers(0, 3)),
        tuple(_pick(draw, kinds, kind) for kind in leaves),
        tuple(draw(st.booleans()) for _ in leaves),
        tuple(_pick(draw, kinds, "v") for _ in range(draw(st.integers(1, 2)))),
        draw(random_losses.names()),
        draw(st.sampled_from(["zeros", "given", "learned"])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )


def _pick(draw: st.DrawFn, kinds: list[str], kind: str) -> int:
    """A value of that kind, mostly a late one, so that the graph is deep."""
    fitting = [i for i, own in enumerate(kinds) if own == kind]
    return draw(st.one_of(st.sampled_from(fitting[-3:]), st.sampled_from(fitting)))


def nested(leaves: list[Any], shape: int) -> Tree:
    """The leaves of a state in one of four nestings."""
    if shape == 0:
        return tuple(leaves)
    if shape == 1:
        return {f"leaf {i}": leaf for i, leaf in enumerate(leaves)}
    if shape == 2:
        return {"first": [leaves[0]], "rest": {"own": tuple(leaves[1:])}}
    return leaves[0] if len(leaves) == 1 else [leaves[0], (leaves[1:],)]


def problem_of(recipe: Recipe) -> Problem:
    """The recipe as a problem: ``rows`` flags are for the caller to draw."""
    draw = Draw(recipe.seed)
    weights = [draw(H, H, scale=0.4) for _ in range(WEIGHTS)]
    params: dict[str, Tensor] = {f"w{i}": weight for i, weight in enumerate(weights)}
    if recipe.tied:
        params["w2"] = params["w0"]
    params["start"] = draw(H)
    made = {
        "v": lambda: draw(B, H),
        "m": lambda: draw(B, H, H),
        "i": lambda: torch.arange(B),
    }
    state = nested([made[kind]() for kind in recipe.leaves], recipe.shape)
    spec = tree_flatten(state)[1]

    def step(params: dict[str, Tensor], x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        w = [params[f"w{i}"] for i in range(WEIGHTS)]
        values = [x_t, *tree_flatten(state)[0]]
        own = len(values)
        for name, places in recipe.operations:
            values.append(OPERATIONS[name][2](w, *(values[i] for i in places)))
        after = [
            torch.tanh(values[i]) if kind != "i" and (bounded or i >= own) else values[i]
            for i, kind, bounded in zip(recipe.after, recipe.leaves, recipe.bounded, strict=True)
        ]
        # A sum: what of it is never read by the loss has no gradient.
        return sum(values[i] for i in recipe.outs), tree_unflatten(after, spec)  # type: ignore[return-value]

    x, y = draw.sequence(B, H), draw.sequence(B, H)
    return Problem(step, params, state, x, y, random_losses.loss_of(recipe.loss))


def start_of(recipe: Recipe, state: Tree) -> Any:
    """``initial_state=`` of the recipe: None, a state, or a function of the parameters."""
    if recipe.start == "zeros":
        return None
    leaves, spec = tree_flatten(state)
    if recipe.start == "given":
        return tree_unflatten(
            [leaf + 1 if leaf.dtype == torch.int64 else leaf / 2 for leaf in leaves], spec
        )

    def learned(params: dict[str, Tensor]) -> Tree:
        own = [
            params["start"].expand(leaf.shape)
            if leaf.is_floating_point()
            else torch.zeros_like(leaf)
            for leaf in leaves
        ]
        return tree_unflatten(own, spec)

    return learned
