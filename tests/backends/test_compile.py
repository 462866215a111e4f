"""What the compile backend makes of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftbptt._compat.tracing import make_fx
from ftbptt.backends.compile import with_small_products


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float64])
def test_products_of_few_rows_have_the_numbers_of_products(dtype: torch.dtype) -> None:
    """Those of whole numbers wrap around; as a sum they were of 64 bits, and did not."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b) // 3

    a, b = torch.full((2, 4), 100).to(dtype), torch.arange(12).reshape(4, 3).to(dtype)
    small = with_small_products(make_fx(step, tracing_mode="fake")(a, b))
    assert torch.equal(small(a, b), step(a, b))
    assert small(a, b).dtype == dtype
