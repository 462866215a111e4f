"""Products that a compiled program shares out between threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftbptt._compat.tracing import FakeTensorMode
from ftbptt.backends import parallel_matmul
from ftbptt.backends.compile import build

# Rows, reduced, columns: large enough to be shared, odd ones too; too small; of nothing. Of our
# own product: more than one block of what is reduced, of rows, and of columns.
SIZES = [
    (300, 700, 129), (129, 701, 301), (40, 40000, 7), (3, 5, 2), (1, 1, 1), (0, 5, 2), (7, 0, 3),
]  # fmt: skip
BATCHES = [(4, 75, 300, 97), (3, 40, 600, 130), (2, 3, 5, 2), (5, 1, 7, 1), (0, 3, 5, 2)]


@pytest.fixture(params=[True, False], ids=["own", "library"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: None) -> bool:
    """Whether products are our own, whatever the processor."""
    own: bool = request.param
    monkeypatch.setattr(parallel_matmul, "multiplies_itself", lambda: own)
    return own


def products(a: Tensor, b: Tensor, a_t: Tensor, b_t: Tensor) -> list[Tensor]:
    """The same matrices in all layouts, parts of others, one that is added to; batches as well."""
    return [
        a @ b,
        a_t.mT @ b,
        a @ b_t.mT,
        a_t.mT @ b_t.mT,
        a[..., 1:] @ b[..., 1:, :],
        a[..., ::2] @ b[..., ::2, :],
        a @ b + 1,
    ]


def all_products(*given: Tensor) -> list[Tensor]:
    return [c for i in range(0, len(given), 4) for c in products(*given[i : i + 4])]


def check(args: list[Tensor]) -> None:
    """The products of a compiled program, with one to three threads."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        examples = [torch.empty(arg.shape, dtype=arg.dtype) for arg in args]
    program = build(all_products, examples, mode)
    right = all_products(*(arg.double() for arg in args))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for one, expected in zip(program(*args), right, strict=True):
                torch.testing.assert_close(one, expected.to(one.dtype), rtol=1e-4, atol=1e-3)
                assert one.is_contiguous()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_layouts(own: bool, dtype: torch.dtype) -> None:
    args: list[Tensor] = []
    for n, k, m in SIZES:
        a, b = torch.randn(n, k, dtype=dtype), torch.randn(k, m, dtype=dtype)
        args += [a, b, a.mT.contiguous(), b.mT.contiguous()]
    check(args)


def test_batches(own: bool) -> None:
    args: list[Tensor] = []
    for count, n, k, m in BATCHES:
        a, b = torch.randn(count, n, k), torch.randn(count, k, m)
        args += [a, b, a.mT.contiguous(), b.mT.contiguous()]
    check(args)


def test_what_is_not_finite_stays_so(own: bool) -> None:
    """Columns of padding are zeros; they must not meet an infinity in what is stored."""
    a, b = torch.randn(130, 300), torch.randn(300, 129)
    a[5, 7], a[9, 0], b[11, 13] = torch.inf, torch.nan, -torch.inf
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        examples = [torch.empty(a.shape), torch.empty(b.shape)]
    (found,) = build(lambda a, b: [a @ b], examples, mode)(a, b)
    torch.testing.assert_close(
        found.double(), a.double() @ b.double(), equal_nan=True, rtol=1e-4, atol=1e-3
    )


def test_other_types_stay_with_the_library(own: bool) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    a = torch.randn(130, 300).bfloat16()
    with mode:
        examples = [torch.empty(a.shape, dtype=a.dtype)]
    (found,) = build(lambda a: [a @ a.t()], examples, mode)(a)
    torch.testing.assert_close(found, a @ a.t())
