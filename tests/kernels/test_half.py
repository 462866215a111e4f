"""Products of bfloat16, in tiles or in float: exact for small whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt.backends import EAGER
from ftbptt.kernels.cpu import toolchain

from ..cells import slow_but
from .scans import Scan, share_all_products

KINDS = ["as this processor can", "shared between threads", "in float"]


@pytest.fixture(params=KINDS)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How kernels multiply."""
    if request.param == "shared between threads":
        share_all_products(monkeypatch)
    if request.param != "in float":
        return
    if "amx_bf16" not in toolchain._instructions():
        pytest.skip("the processor has no tiles")
    command = toolchain.cpp_command

    def cpp_command(*given: Any) -> str:
        return command(*given).replace(" -march=native ", " -march=native -mno-amx-bf16 ")

    monkeypatch.setattr(toolchain, "cpp_command", cpp_command)


def whole(*shape: int, seed: int) -> Tensor:
    """-1, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).bfloat16()


SIZES = [(1, 17), (33, 16), (70, 1), (31, 33), (64, 47)]  # k and n of weights


def step(
    invariants: Sequence[Tensor], x_t: Sequence[Tensor], carries: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    weights = list(zip(invariants[::2], invariants[1::2], strict=True))
    wide = [h @ into for h, (into, _) in zip(carries, weights, strict=True)]
    back = [w @ back for w, (_, back) in zip(wide, weights, strict=True)]
    return [h.clamp(-1, 1) + x for h, x in zip(back, x_t, strict=True)], wide


def scan_of_all_sizes(rows: int) -> Scan:
    return Scan(
        step,
        [weight for k, n in SIZES for weight in (whole(k, n, seed=1), whole(n, k, seed=2))],
        [whole(3, rows, k, seed=3) for k, _ in SIZES],
        [whole(rows, k, seed=4) for k, _ in SIZES],
    )


@pytest.mark.parametrize("rows", slow_but([1, 33], [1, 2, 33, 80]))
@pytest.mark.usefixtures("products")
def test_of_any_size(rows: int) -> None:
    """Sums below 256 are exact in bfloat16, and above are rounded once."""
    scan = scan_of_all_sizes(rows)
    exact = Scan(step, *([t.double() for t in own] for own in scan.given))
    for reverse in (False, True):
        for found, wanted in zip(
            scan.fused(reverse=reverse), exact.run(EAGER, reverse=reverse), strict=True
        ):
            assert torch.equal(found, wanted.bfloat16())


@pytest.mark.usefixtures("products")
def test_a_row_of_nan_stays_alone() -> None:
    scan = scan_of_all_sizes(20)
    spoiled = [t.clone() for t in scan.given[2]]
    for start in spoiled:
        start[7, -1] = float("nan")
    emits = slice(-len(SIZES), None)
    others = torch.arange(20) != 7
    for sound, found in zip(
        scan.fused()[emits], scan.fused(*scan.given[:2], spoiled)[emits], strict=True
    ):
        assert found[:, 7].isnan().all()
        assert torch.equal(found[:, others], sound[:, others])
