"""What a backend is: how each scan block runs, and how a traced function is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compiler.blocks import ScanBlock
from ..compiler.fusion import Fusion
from ..compiler.run_loop import RunScan

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Backend:
    """One way to run a program.

    - ``describe(block)`` says, for the user, how a scan block runs.
    - ``run_scan(block, invariants, sequences, carries, steps)`` runs all steps of a scan block, see
      ``RunScan``.
    - ``build(function, examples, mode)`` compiles a function of the program for tensors like the
      fake ``examples``, which belong to the fake tensor mode ``mode``. None: run it uncompiled.
    - ``at_once()``: a context in which functions are built for a CPU at the same time; what
      ``build`` returns may be called when it ends. None: each is built for itself.
    - ``start_kernel(block)`` begins to compile what ``build`` will need for a scan block. None: it
      needs nothing.
    - ``captured``: on a GPU, a segment is captured as one CUDA graph.
    - ``in_one_kernel(block)``: whether all steps of a scan block are one launch.
    - ``fusion``: which of the operations after a loop its kernel can absorb. None: no fusion.
    """

    name: str
    describe: Callable[[ScanBlock], str]
    run_scan: RunScan
    build: Callable[[Function, Sequence[Tensor], Any], Function] | None
    at_once: Callable[[], AbstractContextManager[None]] | None = None
    start_kernel: Callable[[ScanBlock], None] | None = None
    captured: bool = False
    in_one_kernel: Callable[[ScanBlock], bool] = lambda block: False
    fusion: Fusion | None = None


def histories_by_carry(block: ScanBlock, histories: Sequence[Tensor]) -> list[Tensor | None]:
    """One entry per carry: its history, or None for a carry that has none."""
    remaining = iter(histories)
    return [next(remaining) if flag else None for flag in block.history]
