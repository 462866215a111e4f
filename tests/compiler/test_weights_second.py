"""Products whose first operand is a weight: states of columns, and nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ftbptt import Explanation, make_train_segment, reference_segment

from ..kernels.scans import random
from ..oracle import assert_close

# More than a kernel multiplies without a weight. Units of a column, nodes, and of each node.
H, D, NODES, UNITS, B, K = 20, 3, 18, 17, 2, 5
Form = tuple[Callable[[dict[str, Tensor], Tensor, Tensor], Tensor], list[int]]
FORMS: dict[str, Form] = {
    "columns": (lambda p, x, h: p["w"] @ h + p["u"] @ x, [H, B]),
    "addmm": (lambda p, x, h: torch.addmm(p["b"], p["w"], h) + p["u"] @ x, [H, B]),
    "joined": (lambda p, x, h: torch.cat([p["w"], p["u"]], 1) @ torch.cat([h, x]) + p["b"], [H, B]),
    "twice": (lambda p, x, h: p["w"] @ (p["w"] @ h).sin() + p["u"] @ x, [H, B]),
    "nodes": (lambda p, x, h: p["a"] @ h + x, [B, NODES, UNITS]),
    "both sides": (lambda p, x, h: (p["a"] @ h) @ p["v"] + x, [B, NODES, UNITS]),
    "several": (lambda p, x, h: p["a"] @ h + x, [B, 2, NODES, UNITS]),
    "nodes joined": (lambda p, x, h: p["a"] @ torch.cat([h, x], 2) @ p["y"], [B, NODES, UNITS]),
    "by einsum": (lambda p, x, h: torch.einsum("nm,bmu->bnu", p["a"], h) + x, [B, NODES, UNITS]),
    "by weight": (lambda p, x, h: torch.bmm(p["g"], h) + x, [2, UNITS, B]),
    "of repeated rows": (  # not one matrix for all, though as large as one
        lambda p, x, h: p["a"][:, None].expand(NODES, NODES, NODES) @ h + x,
        [NODES, NODES, UNITS],
    ),
    "of the input": (lambda p, x, h: (p["a"] * x.mean()) @ h, [B, NODES, UNITS]),
}
WITHOUT_KERNELS = {"by einsum", "of repeated rows", "of the input"}  # in some direction


def problem(name: str, seed: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """The step of a form, and a segment's arguments."""
    product, shape = FORMS[name]
    shapes = {
        "w": (H, H), "u": (H, D), "b": (H, 1), "a": (NODES, NODES), "v": (UNITS, UNITS),
        "y": (2 * UNITS, UNITS), "g": (2, UNITS, UNITS),
    }  # fmt: skip
    params = {key: random(*size, seed=seed + i) / 4 for i, (key, size) in enumerate(shapes.items())}

    def step(p: dict[str, Tensor], x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(product(p, x, h))
        return h, h

    x = random(K, *([D, B] if shape == [H, B] else shape), seed=seed + 10)
    return step, (params, random(*shape, seed=seed + 11), x, random(K, *shape, seed=seed + 12))


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def scans(explanation: Explanation) -> list[Any]:
    return [block for block in explanation.blocks if block.kind == "scan"]


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, kernels: None) -> None:
    step, arguments = problem(name)
    segment = make_train_segment(step, mse, backend="fused")
    assert_close(segment(*arguments), reference_segment(step, mse, *arguments))
    for block in scans(segment.explain(*arguments)):
        if name not in WITHOUT_KERNELS:
            assert block.runs.endswith("one generated C++ kernel for all steps")


@pytest.mark.parametrize("name", FORMS)
def test_models_side_by_side(name: str) -> None:
    step, first = problem(name)
    _, second = problem(name, seed=20)
    segment = make_train_segment(step, mse, backend="eager")
    both = tree_map(lambda *leaves: torch.stack(leaves), first, second)
    found = torch.func.vmap(segment)(*both)
    for i, arguments in enumerate((first, second)):
        own = tree_map(lambda leaf, i=i: leaf[i], found)
        assert_close(own, reference_segment(step, mse, *arguments))


@pytest.mark.parametrize("name", ["columns", "joined", "nodes"])
def test_the_gradient_of_a_weight_is_one_gemm(name: str) -> None:
    step, arguments = problem(name)
    explanation = make_train_segment(step, mse, backend="eager").explain(*arguments)
    (sums,) = [block for block in explanation.blocks if block.kind == "sum"]
    assert len(sums.gemms) == (1 if name == "nodes" else 2)
    assert all(gemm.endswith(f"contracted over {K} steps and rows at once") for gemm in sums.gemms)


def test_the_input_beside_a_column_leaves_the_loop() -> None:
    step, arguments = problem("joined")
    explanation = make_train_segment(step, mse, backend="eager").explain(*arguments)
    assert [block.gemms for block in scans(explanation)] == [[f"[2, 20] @ [20, 20] {K} times"]] * 2
