"""The fused backend: each scan block that a kernel can be made of is one call of that kernel.

The call is a custom operator, so the rest of the program is compiled around it as by ``compile``,
which also runs the blocks that do not qualify.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat import not_traced
from ..compiler.distribute import ScanBlock
from ..compiler.graphs import Node, value_of
from ..kernels.build import build
from ..kernels.cpp import print_cpp
from ..kernels.expressions import Unsupported
from ..kernels.rowloop import make_row_loop
from ..kernels.schedule import make_schedule
from .base import Backend
from .compile import COMPILE
from .compile import run_scan as run_while_loop

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Kernel:
    """A scan block as the source of ``run(memory, numbers)``, and what of the block it takes."""

    source: str
    invariants: list[int]
    weights: list[int]
    sequences: list[int]
    row_axes: tuple[int, ...]
    history: list[bool]
    carries: list[Spec]
    emits: list[Spec]

    def outputs(self, steps: Any) -> list[Tensor]:
        """``[*finals, *histories [K + 1, ...], *emits [K, ...]]``, not yet filled."""
        kept = [spec for spec, flag in zip(self.carries, self.history, strict=True) if flag]
        return [
            *(torch.empty(shape, dtype=dtype) for shape, dtype in self.carries),
            *(torch.empty((steps + 1, *shape), dtype=dtype) for shape, dtype in kept),
            *(torch.empty((steps, *shape), dtype=dtype) for shape, dtype in self.emits),
        ]


# The operator takes a kernel by its name: a program that holds the name can be kept and copied.
_kernels: dict[str, Kernel] = {}


def _kernel_for(block: ScanBlock, reverse: bool) -> str:
    """The name of the block's kernel, which is built if it is new; raises Unsupported."""
    with not_traced():
        loop = make_row_loop(block)
        source = print_cpp(loop, make_schedule(loop), block.history, reverse=reverse)

    def specs(nodes: Sequence[Node]) -> list[Spec]:
        return [(tuple(value_of(node).shape), value_of(node).dtype) for node in nodes]

    kernel = Kernel(
        source,
        sorted(loop.invariants),
        list(loop.weight_dtypes),
        sorted(loop.sequences),
        loop.rows.dims,
        list(block.history),
        specs(block.carries),
        specs(block.emits),
    )
    build(source)
    name = hashlib.sha256(repr(kernel).encode()).hexdigest()
    _kernels[name] = kernel
    return name


_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define(
    "scan(Tensor[] inputs, str kernel, SymInt steps) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def _scan(inputs: list[Tensor], name: str, steps: int) -> list[Tensor]:
    """Runs a kernel on its invariants, weights, sequences and carries."""
    kernel = _kernels[name]
    outputs = kernel.outputs(steps)
    first, behind = len(kernel.invariants), len(kernel.invariants) + len(kernel.weights)
    numbers = [steps, torch.get_num_threads(), *kernel.row_axes]
    numbers += [t.stride(0) for t in inputs[behind : behind + len(kernel.sequences)]]
    for weight in inputs[first:behind]:
        numbers += weight.stride() if weight.dim() == 3 else (0, *weight.stride())
    memory = [t.data_ptr() for t in (*inputs, *outputs)]
    build(kernel.source)(
        (ctypes.c_void_p * len(memory))(*memory), (ctypes.c_int64 * len(numbers))(*numbers)
    )
    return outputs


def _scan_shapes(inputs: list[Tensor], name: str, steps: Any) -> list[Tensor]:
    return _kernels[name].outputs(steps)


_library.impl("scan", _scan, "CPU")
torch.library.register_fake("ftbptt::scan", _scan_shapes, lib=_library)


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: Any,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """A scan block as one call of its kernel, or as a ``while_loop`` if it has none."""
    if carries[0].device.type != "cpu":
        return run_while_loop(block, invariants, sequences, carries, steps, reverse)
    try:
        name = _kernel_for(block, reverse)
    except Unsupported:
        return run_while_loop(block, invariants, sequences, carries, steps, reverse)
    kernel = _kernels[name]
    inputs = [
        *(_in_order(invariants[i]) for i in kernel.invariants),
        *(invariants[i] for i in kernel.weights),
        *(_in_order(sequences[i]) for i in kernel.sequences),
        *map(_in_order, carries),
    ]
    result = torch.ops.ftbptt.scan(inputs, name, steps)
    finals, result = result[: len(carries)], result[len(carries) :]
    kept = iter(result[: sum(block.history)])
    histories = [next(kept) if flag else None for flag in block.history]
    return finals, histories, result[sum(block.history) :]


def _in_order(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def _describe(block: ScanBlock) -> str:
    if value_of(block.carries[0]).device.type != "cpu":
        return COMPILE.describe(block)
    try:
        with not_traced():
            make_row_loop(block)
    except Unsupported as reason:
        return f"{COMPILE.describe(block)}; not fused: {reason}"
    return "one generated C++ kernel for all steps"


FUSED = Backend("fused", _describe, run_scan, COMPILE.build)
