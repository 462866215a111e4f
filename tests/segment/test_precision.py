"""float32 and bfloat16: no further from float64 than what the eager loop itself errs, times 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment

from ..cells import CELLS, NOT_BFLOAT16, REPRESENTATIVE, problem, slow_but
from ..cells.problems import D, Draw, H, mse
from ..oracle import check_low_precision

Segments = Callable[..., Any]


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_bfloat16(name: str, segments: Segments) -> None:
    if name in NOT_BFLOAT16:
        pytest.skip("torch has no such complex dtype")
    given = problem(name, torch.bfloat16)
    for steps in (3, 7):
        check_low_precision(segments(name, "eager", torch.bfloat16), given, steps)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_float32(name: str, segments: Segments) -> None:
    given = problem(name, torch.float32)
    for steps in (3, 7, 63):
        check_low_precision(segments(name, "eager", torch.float32), given, steps)


@pytest.mark.slow
def test_two_biases_of_equal_gradients_compiled() -> None:
    """Inductor named two roundings of one sum alike, which no compiler takes."""
    given = Draw(0)
    cell = nn.LSTMCell(D, H, dtype=torch.bfloat16)
    x, y = given(3, 6, D).bfloat16(), given(3, 6, H).bfloat16()
    segment = make_train_segment(cell, mse, backend="compile")
    grads = segment(dict(cell.named_parameters()), None, x, y).grads
    torch.testing.assert_close(grads["bias_ih"], grads["bias_hh"])


SMALL = [1e-8, -1e-6, 1e-3, -0.3, 0.9, -0.99999]


@pytest.mark.parametrize(
    ("name", "values", "backend"),
    [
        ("atanh", SMALL, "fused"),
        ("acosh", [1.0, 1 + 1e-6, 1.5, 1e5, 3e19, 1e38], "fused"),
        ("expm1", [*SMALL[:4], 80.0, -80.0], "compile"),
    ],
)
def test_functions_that_inductor_has_few_digits_of(
    name: str, values: list[float], backend: str
) -> None:
    """What comes before and in the loop, one row for each."""
    function = getattr(torch, name)

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return function(x_t), function(h * params["w"])

    given = torch.tensor(values)
    segment = make_train_segment(step, lambda out, y: out.mean(), backend=backend)
    result = segment({"w": torch.ones(1)}, given.view(6, 1), given.view(1, 6, 1), None)
    expected = function(given.double())
    for found in (result.out, result.state):
        torch.testing.assert_close(found.flatten().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lstm_readout", "layer_norm_lstm", "gru_3_layers"])
def test_lower_precision_compiled(name: str, dtype: torch.dtype, segments: Segments) -> None:
    steps = (7, 13, 31, 63)
    check_low_precision(segments(name, "compile", dtype), problem(name, dtype), *steps)
