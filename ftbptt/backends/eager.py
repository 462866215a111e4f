"""The eager backend: runs the blocks operation by operation. For debugging, and as a fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiler.blocks import ScanBlock
from ..compiler.run_loop import ScanResult
from .base import Backend


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: int,
) -> ScanResult:
    """A scan block as a Python loop over its graph."""
    order = range(steps - 1, -1, -1) if block.reverse else range(steps)
    states = [list(carries)]
    emits: list[list[Tensor]] = []
    for t in order:
        result = block.module(*invariants, *(s[t] for s in sequences), *states[-1])
        states.append(result[: len(carries)])
        emits.append(result[len(carries) :])
    finals = [final.clone() for final in states[-1]]
    if block.reverse:
        states.reverse()
        emits.reverse()
    histories = [
        torch.stack([state[i] for state in states]) if flag else None
        for i, flag in enumerate(block.history)
    ]
    return ScanResult(
        finals, histories, [torch.stack(values) for values in zip(*emits, strict=True)]
    )


def _describe(block: ScanBlock) -> str:
    return "a Python loop"


EAGER = Backend("eager", _describe, run_scan, None)
