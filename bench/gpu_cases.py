"""The cases of the GPU benchmark, with their peers and targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .suites import SUITES


@dataclass(frozen=True)
class GpuCase:
    """A case in a precision ("fp32", "tf32", "bf16"), its peers and its targets.

    ``targets``: (peer, how many times faster than it this package's best backend should be).
    """

    case: Case
    precision: str
    peers: tuple[str, ...]
    targets: tuple[tuple[str, float], ...] = ()
    of_floor: float | None = None
    reset: float = 0.0  # the fraction of steps and rows that restart

    @property
    def title(self) -> str:
        ending = f", {self.reset:.0%} resets" if self.reset else ""
        if "vmap" in self.peers:
            ending += ", the mean gradient of its sequences"
        return f"{self.case.title} {self.precision}{ending}"


OURS = ("fused", "cudagraph")
LSTM = (*OURS, "eager", "library")


def cases() -> list[GpuCase]:
    """Cases with targets first, then cells that no library has, then those of a CPU."""

    def lstm(name: str, steps: int, batch: int, hidden: int, **options: Any) -> Case:
        return Case(name, "lstm", steps, batch, hidden, hidden, **options)

    small, gpu_cases = lstm("lstm", 64, 16, 256), []
    for precision in ("fp32", "tf32", "bf16"):
        gpu_cases.append(GpuCase(small, precision, (*LSTM, "jax"), (("eager", 30), ("library", 1))))
    gpu_cases += [
        GpuCase(lstm("medium", 64, 128, 512), "bf16", LSTM, (("library", 1.0),)),
        GpuCase(lstm("wide", 64, 64, 1024), "bf16", (*OURS, "library")),
        GpuCase(lstm("batch-512", 64, 512, 256), "tf32", (*OURS, "library")),
        GpuCase(lstm("rows", 32, 4096, 256), "tf32", LSTM, (("library", 1.2),), of_floor=0.6),
        GpuCase(lstm("rows-128", 32, 4096, 128), "bf16", LSTM, (("library", 1.5),)),
        GpuCase(lstm("resets", 64, 128, 256), "tf32", (*OURS, "eager", "split"), (("split", 2),),
                reset=0.01),
        GpuCase(Case("layer-norm", "lnlstm", 64, 64, 256, 256), "tf32",
                (*OURS, "eager", "scan", "jax"), (("scan", 10), ("jax", 2))),
        GpuCase(lstm("vmap", 32, 4096, 128), "tf32", (*OURS, "vmap"), (("vmap", 15),)),
        GpuCase(Case("ensemble", "lstm", 32, 8, 64, 64, models=256), "tf32", (*OURS, "library"),
                (("library", 50),)),
        GpuCase(lstm("latency", 1024, 16, 128), "tf32", LSTM),
        GpuCase(Case("peephole", "peephole", 64, 64, 128, 128), "tf32", (*OURS, "eager", "jax")),
        GpuCase(Case("cho-gru", "chogru", 64, 64, 128, 128), "tf32", (*OURS, "eager", "jax")),
        GpuCase(Case("min-gru", "mingru", 256, 16, 128, 128), "tf32", (*OURS, "eager", "jax")),
        GpuCase(Case("min-gru-long", "mingru", 2048, 4, 128, 128), "tf32",
                (*OURS, "eager", "jax")),
    ]  # fmt: skip
    for case in SUITES["default"].cases:
        others = ("library",) if case.kind in ("lstm", "gru") else ("jax",)
        case = replace(case, name=f"cpu-{case.name}")
        gpu_cases.append(GpuCase(case, "tf32", (*OURS, "eager", *others)))
    return gpu_cases


def quick(gpu_case: GpuCase) -> GpuCase:
    """The same case at sizes that any device runs in seconds."""
    case = gpu_case.case
    small = replace(
        case, steps=5, batch=min(case.batch, 6), inputs=8, hidden=8, models=min(case.models, 3)
    )
    return replace(gpu_case, case=small)


def resets(gpu_case: GpuCase) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.rand(gpu_case.case.steps, gpu_case.case.batch, generator=generator) < gpu_case.reset
    )
