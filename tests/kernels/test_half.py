"""Products of bfloat16, in tiles or in float: exact for small whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt.kernels.cpu import toolchain

from .scans import Scan

WITHOUT = {"as this processor can": "", "in float": "-mno-amx-bf16"}


@pytest.fixture(params=WITHOUT)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels multiply by."""
    flags, command = WITHOUT[request.param], toolchain.cpp_command
    if flags and "amx_bf16" not in toolchain._instructions():
        pytest.skip("the processor has no tiles")

    def cpp_command(*given: Any) -> str:
        return command(*given).replace(" -march=native ", f" -march=native {flags} ")

    monkeypatch.setattr(toolchain, "cpp_command", cpp_command)


def whole(*shape: int, seed: int) -> Tensor:
    """-1, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).bfloat16()


def step(
    invariants: Sequence[Tensor], x_t: Sequence[Tensor], carries: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    into, back = invariants
    wide = carries[0] @ into
    return [(wide @ back).clamp(-1, 1) + x_t[0]], [wide]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    ("rows", "k", "n"), [(1, 1, 17), (2, 33, 16), (5, 70, 1), (33, 31, 33), (80, 64, 47)]
)
def test_of_any_size(rows: int, k: int, n: int) -> None:
    """Sums below 256 are exact in bfloat16, and above are rounded once."""
    given = [whole(k, n, seed=1), whole(n, k, seed=2)], [whole(3, rows, k, seed=3)]
    scan = Scan(step, *given, [whole(rows, k, seed=4)])
    exact = Scan(step, *([t.double() for t in own] for own in (*given, scan.given[2])))
    for reverse in (False, True):
        for found, wanted in zip(
            scan.fused(reverse=reverse), exact.fused(reverse=reverse), strict=True
        ):
            assert torch.equal(found, wanted.bfloat16())


@pytest.mark.usefixtures("instructions")
def test_a_row_of_nan_stays_alone() -> None:
    given = [whole(40, 20, seed=1), whole(20, 40, seed=2)], [whole(3, 20, 40, seed=3)]
    start = whole(20, 40, seed=4)
    spoiled = start.clone()
    spoiled[7, 39] = float("nan")
    scan = Scan(step, *given, [start])
    sound, found = scan.fused()[-1], scan.fused(*given, [spoiled])[-1]
    others = torch.arange(20) != 7
    assert found[:, 7].isnan().all()
    assert torch.equal(found[:, others], sound[:, others])
