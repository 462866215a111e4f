"""Products that a compiled program shares out between threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftbptt._compat import FakeTensorMode
from ftbptt.backends.compile import build

pytestmark = pytest.mark.usefixtures("kernels")

# Rows, reduced, columns: large enough to be shared, odd ones too; too small; of nothing.
SIZES = [(300, 700, 129), (129, 701, 301), (40, 40000, 7), (3, 5, 2), (0, 5, 2), (7, 0, 3)]


def products(a: Tensor, b: Tensor, a_t: Tensor, b_t: Tensor) -> list[Tensor]:
    """The same matrices in all layouts; one that is a part of another; one that is added to."""
    return [a @ b, a_t.t() @ b, a @ b_t.t(), a_t.t() @ b_t.t(), a[:, 1:] @ b[1:], a @ b + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_layouts(dtype: torch.dtype) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args: list[Tensor] = []
    for n, k, m in SIZES:
        a, b = torch.randn(n, k, dtype=dtype), torch.randn(k, m, dtype=dtype)
        args += [a, b, a.t().contiguous(), b.t().contiguous()]

    def all_sizes(*given: Tensor) -> list[Tensor]:
        return [c for i in range(0, len(given), 4) for c in products(*given[i : i + 4])]

    with mode:
        examples = [torch.empty(arg.shape, dtype=dtype) for arg in args]
    program = build(all_sizes, examples, mode)
    right = all_sizes(*(arg.double() for arg in args))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for one, expected in zip(program(*args), right, strict=True):
                torch.testing.assert_close(one, expected.to(dtype), rtol=1e-4, atol=1e-3)
                assert one.is_contiguous()
    finally:
        torch.set_num_threads(before)


def test_other_types_stay_with_the_library() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    a = torch.randn(130, 300).bfloat16()
    with mode:
        examples = [torch.empty(a.shape, dtype=a.dtype)]
    (found,) = build(lambda a: [a @ a.t()], examples, mode)(a)
    torch.testing.assert_close(found, a @ a.t())
