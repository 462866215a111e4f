"""What a backend is: how each scan block runs, and how a whole function is made ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compiler.distribute import ScanBlock
from ..compiler.fusion import Fusion
from ..compiler.program import RunScan

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Backend:
    """``run_scan`` is the one function from a scan block to its values.

    ``build(function, examples, mode)`` makes a function of the program ready for tensors like the
    fake ``examples``; None: it runs as it is. ``describe`` says in words how a scan block runs.
    ``captured``: on a GPU, a whole segment becomes one CUDA graph. ``fusion``: what its loops can
    take in of the work after them.
    """

    name: str
    describe: Callable[[ScanBlock], str]
    run_scan: RunScan
    build: Callable[[Function, Sequence[Tensor], Any], Function] | None
    captured: bool = False
    fusion: Fusion | None = None
