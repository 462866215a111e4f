"""Steps on columns, whose products have the weight first; and others that have, and stay so."""

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
COLUMNS: dict[str, Form] = {
    "columns": (lambda p, x, h: p["w"] @ h + p["u"] @ x, [H, B]),
    "addmm": (lambda p, x, h: torch.addmm(p["b"], p["w"], h) + p["u"] @ x, [H, B]),
    "joined": (lambda p, x, h: torch.cat([p["w"], p["u"]], 1) @ torch.cat([h, x]) + p["b"], [H, B]),
    "joined with nothing": (  # of one axis, as torch allows
        lambda p, x, h: p["w"] @ torch.cat([h.new_zeros(0), h]) + p["u"] @ x,
        [H, B],
    ),
    "gated": (lambda p, x, h: p["w"] @ (torch.sigmoid(p["w"] @ h) * h) + p["u"] @ x, [H, B]),
}
OTHERS: dict[str, Form] = {
    "nodes": (lambda p, x, h: p["a"] @ h + x, [B, NODES, UNITS]),
    "nodes of one graph": (lambda p, x, h: (p["a"] @ h) @ p["v"] + x, [NODES, UNITS]),
    "by weight": (lambda p, x, h: torch.bmm(p["g"], h) + x, [2, UNITS, B]),
    "of the input": (lambda p, x, h: (p["w"] * x.mean()) @ h, [H, B]),
}
FORMS = COLUMNS | OTHERS


def problem(name: str, seed: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """The step of a form, and a segment's arguments."""
    product, shape = FORMS[name]
    shapes = {
        "w": (H, H), "u": (H, D), "b": (H, 1), "a": (NODES, NODES), "v": (UNITS, UNITS),
        "g": (2, UNITS, UNITS),
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
        if name in COLUMNS:
            assert block.runs.endswith("one generated C++ kernel for all steps")


def lstm(p: dict[str, Tensor], x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """With states of columns, the second of which no weight is multiplied with."""
    h, c = state
    i, f, g, o = (p["w"] @ torch.cat([x, h]) + p["b"]).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return p["v"] @ h, (h, c)


def of_lstm() -> tuple[Any, ...]:
    params = {"w": random(4 * H, D + H, seed=1), "b": random(4 * H, 1, seed=2)}
    params["v"] = random(2, H, seed=3)
    state = random(H, B, seed=4), random(H, B, seed=5)
    return params, state, random(K, D, B, seed=6), random(K, 2, B, seed=7)


def check_lstm() -> list[str]:
    """How its loops run."""
    segment = make_train_segment(lstm, mse, backend="fused")
    found = segment(*of_lstm())
    assert_close(found, reference_segment(lstm, mse, *of_lstm()))
    assert all(leaf.is_contiguous() for leaf in found.state)
    assert_close(segment.evaluate(*of_lstm()).out, found.out)
    return [block.runs for block in scans(segment.explain(*of_lstm()))]


def test_columns(kernels: None) -> None:
    assert all("one generated C++ kernel" in runs for runs in check_lstm())


def test_columns_on_a_gpu(interpreted: None) -> None:
    assert all("one generated Triton kernel" in runs for runs in check_lstm())


def test_columns_compiled() -> None:
    check_lstm()


@pytest.mark.parametrize("stacked", [False, True])
def test_columns_that_restart(stacked: bool) -> None:
    """At some steps, from a state that is learned; as two states, and as one that is stacked."""

    def start(params: dict[str, Tensor]) -> Any:
        leaves = params["start"][0].expand(H, B), params["start"][1].expand(H, B)
        return torch.stack(leaves) if stacked else leaves

    def step(p: dict[str, Tensor], x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, after = lstm(p, x, tuple(state))
        return out, torch.stack(after) if stacked else after

    params, state, x, y = of_lstm()
    params["start"] = random(2, H, 1, seed=8)
    state = torch.stack(state) if stacked else state
    flags = {"reset": torch.arange(K) == 2, "mask": torch.arange(K) != 3}

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean((1, 2))

    segment = make_train_segment(step, loss, backend="eager", initial_state=start)
    found = segment(params, state, x, y, **flags)
    expected = reference_segment(step, loss, params, state, x, y, initial_state=start, **flags)
    assert_close(found, expected)


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


@pytest.mark.parametrize("name", COLUMNS)
def test_the_gradient_of_a_weight_is_one_gemm_of_rows(name: str) -> None:
    step, arguments = problem(name)
    explanation = make_train_segment(step, mse, backend="eager").explain(*arguments)
    (sums,) = [block for block in explanation.blocks if block.kind == "sum"]
    assert all(gemm.endswith(f"contracted over {K} steps and rows at once") for gemm in sums.gemms)
    assert all(gemm.startswith(f"[{B}, {H}] @ ") for b in scans(explanation) for gemm in b.gemms)


def test_the_input_beside_a_column_leaves_the_loop() -> None:
    step, arguments = problem("joined")
    explanation = make_train_segment(step, mse, backend="eager").explain(*arguments)
    assert [block.gemms for block in scans(explanation)] == [[f"[2, 20] @ [20, 20] {K} times"]] * 2
