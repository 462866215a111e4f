"""How a segment is cut into chunks of steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftbptt import make_train_segment

from ..cells.problems import mse, named

MIB = 1 << 20
ROWS = 512


@pytest.mark.parametrize(
    ("units", "recompute", "values", "most"),
    [
        (256, False, 3, 30 * MIB),
        (256, True, 4, 16 * MIB),
        (2048, False, 3, 4 * 4 * 2048 * (3 + 2048 + 1 + 1)),  # weights and biases, four times
        (3072, True, 4, 4 * 3072 * (3 + 3072 + 1 + 1)),
    ],
)
def test_a_chunk_has_some_times_the_bytes_of_the_gradients(
    units: int, recompute: bool, values: int, most: int
) -> None:
    """``values`` are handed from one block to another at each step."""
    cell = nn.RNNCell(3, units)
    segment = make_train_segment(cell, mse, backend="eager", recompute=recompute)
    x, h = torch.zeros(1, ROWS, 3), torch.zeros(ROWS, units)
    found = segment.explain(named(cell), h, x, h[None])
    assert found.chunk == most // (values * 4 * ROWS * units)
