"""Random scan blocks whose carries have different ranks, and as many rows as units: kernels.

Of such sizes an axis can be taken for another one. A recipe that fails becomes a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ..segment.test_random_cells import examples
from .scans import Scan, random

pytestmark = pytest.mark.usefixtures("poisoned")

# Values by kind: "v" [rows, units], "m" [rows, units, slots], "k" [rows, slots]. Weights likewise,
# by their axes. Operations by name: what they take and give, and what they do.
SHAPES = {"v": "ru", "m": "rus", "k": "rs"}
WEIGHTS = ["uu", "ss", "uss", "su", "us", "s"]
OPERATIONS: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    "tanh": ("v", "v", lambda w, a: torch.tanh(a)),
    "softmax": ("v", "v", lambda w, a: torch.softmax(a, -1)),
    "add": ("vv", "v", lambda w, a, b: a + b),
    "multiply": ("vv", "v", lambda w, a, b: a * b),
    "centre": ("v", "v", lambda w, a: a - a.mean(-1, keepdim=True)),
    "columns": ("v", "v", lambda w, a: torch.tanh(a.T.contiguous()).T),
    "over rows": ("v", "v", lambda w, a: a - a.mean(0)),
    "last": ("v", "v", lambda w, a: a.slice_scatter(a[:, -1:].sin(), 1, 0, None, a.shape[1])),
    "matmul": ("v", "v", lambda w, a: a @ w["uu"]),
    "transposed": ("v", "v", lambda w, a: a @ w["uu"].T),
    "to slots": ("v", "k", lambda w, a: a @ w["su"].T),
    "of slots": ("k", "v", lambda w, b: b @ w["su"]),
    "bounded": ("k", "k", lambda w, b: torch.tanh(b)),
    "spread": ("v", "m", lambda w, a: a[:, :, None] * w["s"]),
    "outer": ("vk", "m", lambda w, a, b: a[:, :, None] * b[:, None]),
    "by head": ("k", "m", lambda w, b: torch.einsum("rs,ust->rut", b, w["uss"])),
    "squashed": ("m", "m", lambda w, m: torch.tanh(m)),
    "sum": ("mm", "m", lambda w, m, n: m + n),
    "gate": ("mv", "m", lambda w, m, a: m * torch.sigmoid(a)[:, :, None]),
    "write": ("mk", "m", lambda w, m, b: m + b[:, None]),
    "set": ("mv", "m", lambda w, m, a: m.select_scatter(a, -1, 0)),
    "turn": ("m", "m", lambda w, m: torch.cat([m[:, 1:], m[:, :1].sin()], 1)),
    "flat": ("m", "m", lambda w, m: torch.cos(m.flatten(1)).reshape(m.shape)),
    "slots first": ("m", "m", lambda w, m: m.permute(2, 0, 1).contiguous().cos().permute(1, 2, 0)),
    "units first": ("m", "m", lambda w, m: m.movedim(1, 0).contiguous().softmax(0).movedim(0, 1)),
    "every slot": ("m", "m", lambda w, m: m @ w["ss"]),
    "every head": ("m", "m", lambda w, m: torch.einsum("rus,ust->rut", m, w["uss"])),
    "every unit": ("m", "m", lambda w, m: torch.einsum("rus,vu->rvs", m, w["uu"])),
    "attend": ("mm", "m", lambda w, m, n: torch.softmax(m @ n.mT, -1) @ m),
    "read": ("mk", "v", lambda w, m, b: torch.einsum("rus,rs->ru", m, b)),
    "weighed": ("m", "v", lambda w, m: torch.einsum("rus,us->ru", m, w["us"])),
    "total": ("m", "v", lambda w, m: m.sum(-1)),
    "largest": ("m", "v", lambda w, m: m.amax(-1)),
    "select": ("m", "v", lambda w, m: m[..., -1]),
    "address": ("mv", "k", lambda w, m, a: torch.einsum("rus,ru->rs", m, a)),
    "over units": ("m", "k", lambda w, m: m.sum(1)),
}


@dataclass(frozen=True)
class Recipe:
    """``operations`` append to [an input of each kind, *carries]; the rest picks of the values."""

    carries: str
    sizes: dict[str, int]
    operations: list[tuple[str, tuple[int, ...]]]
    after: list[int]
    emits: list[int]
    history: list[bool]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    carries = draw(st.sampled_from(["v", "m", "vm", "mv", "vk", "vmk", "vv", "mm", "vkm"]))
    kinds = [*SHAPES, *carries]

    def pick(kind: str) -> int:
        fitting = [i for i, own in enumerate(kinds) if own == kind]
        return draw(st.one_of(st.sampled_from(fitting[-2:]), st.sampled_from(fitting)))

    operations = []
    for _ in range(draw(st.integers(2, 9))):
        name = draw(st.sampled_from(sorted(OPERATIONS)))
        takes, gives, _ = OPERATIONS[name]
        operations.append((name, tuple(pick(kind) for kind in takes)))
        kinds.append(gives)
    return Recipe(
        carries,
        {axis: draw(st.integers(1, 3)) for axis in "rus"},
        operations,
        [pick(kind) for kind in carries],
        draw(st.lists(st.integers(0, len(kinds) - 1), max_size=3)),
        [draw(st.booleans()) for _ in carries],
    )


def check_recipe(recipe: Recipe) -> None:
    def step(given: Any, x: Any, carried: Any) -> tuple[list[Tensor], list[Tensor]]:
        values, weights = [*x, *carried], dict(zip(WEIGHTS, given, strict=True))
        for name, places in recipe.operations:
            values.append(OPERATIONS[name][2](weights, *(values[i] for i in places)))
        return [torch.tanh(values[i]) for i in recipe.after], [values[i] for i in recipe.emits]

    def drawn(axes: str, *steps: int, seed: int) -> Tensor:
        return random(*steps, *(recipe.sizes[axis] for axis in axes), seed=seed)

    weights = [0.5 * drawn(axes, seed=i) for i, axes in enumerate(WEIGHTS)]
    sequences = [drawn(SHAPES[kind], 3, seed=10 + i) for i, kind in enumerate(SHAPES)]
    carries = [drawn(SHAPES[kind], seed=20 + i) for i, kind in enumerate(recipe.carries)]
    Scan(step, weights, sequences, carries, recipe.history).check(tolerance=1e-10)


@examples(12)
@given(recipe=recipes())
def test_random_scans(recipe: Recipe) -> None:
    check_recipe(recipe)


@pytest.mark.slow
@examples(200)
@given(recipe=recipes())
def test_many_random_scans(recipe: Recipe) -> None:
    check_recipe(recipe)
