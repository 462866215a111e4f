"""``argmax`` in a recurrence: states of categories run in a kernel, and hold the same category."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ftbptt import make_train_segment
from ftbptt._compat.tracing import FakeTensorMode, make_fx
from ftbptt.kernels.argmax import expand_argmax

from ..cells.problems import Draw, Problem, mse
from ..oracle import check

inf, nan = float("inf"), float("nan")
ROWS = torch.tensor(
    [[1.0, 3.0, 3.0, -1.0], [0.0, nan, 5.0, nan], [-inf, -inf, -inf, -inf], [-inf, inf, inf, 0.0]]
)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_first_of_equals_and_nan(dtype: torch.dtype, dim: int, keep: bool) -> None:
    """As torch has it."""

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(dim, keep), x.argmin(dim, keepdim=keep), x.flatten().argmax(0)

    x = ROWS.to(dtype)
    mode = FakeTensorMode()
    module = make_fx(both)(mode.from_tensor(x))
    with mode:
        expand_argmax(module.graph)
    module.recompile()
    assert "aten.arg" not in module.code
    for found, wanted in zip(module(x), both(x), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_what_is_left_alone() -> None:
    """Integers, which kernels do not reduce, the place in a flattened tensor, and a number's."""

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(), (x > 0).long().argmax(-1), x[0, 0].argmax(0)

    mode = FakeTensorMode()
    module = make_fx(both)(mode.from_tensor(ROWS))
    before = module.code
    with mode:
        expand_argmax(module.graph)
    module.recompile()
    assert module.code == before


@pytest.mark.usefixtures("kernels")
def test_a_world_model() -> None:
    """Categorical latents with straight-through gradients (Hafner et al. 2021), and the choice."""
    groups, classes, units, inputs = 2, 3, 5, 4

    def step(params: Any, x_t: Tensor, state: Any) -> Any:
        h, z, _ = state
        h = torch.tanh(h @ params["h"] + z.flatten(1) @ params["z"])
        logits = (h @ params["logits"] + x_t @ params["x"]).unflatten(-1, (groups, classes))
        probabilities = logits.softmax(-1)
        choice = logits.argmax(-1)
        hard = F.one_hot(choice, classes).to(h.dtype)
        z = hard + probabilities - probabilities.detach()
        return torch.cat([h, z.flatten(1)], -1), (h, z, choice)

    draw = Draw(0)
    latents = groups * classes
    params = {
        "h": draw(units, units), "z": draw(latents, units), "logits": draw(units, latents),
        "x": draw(inputs, latents),
    }  # fmt: skip
    choice = torch.zeros(3, groups, dtype=torch.int64)
    state = (draw(3, units), draw(3, groups, classes), choice)
    x, y = draw.sequence(3, inputs), draw.sequence(3, units + latents)
    made = Problem(step, params, state, x, y, mse)
    segment = make_train_segment(step, mse, backend="fused")
    for steps in (5, 1):
        check(segment, made, steps)
    explanation = str(segment.explain(*made.data(5)))
    assert explanation.count("one generated C++ kernel for all steps") == 2, explanation
