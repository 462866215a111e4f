"""The fused backend: each scan block that a kernel can be made of is one call of that kernel.

The call is a custom operator, so the rest of the program is compiled around it as by ``compile``,
which also runs the blocks that do not qualify.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .._compat import calls_in_cpp, not_traced
from ..compiler.distribute import ScanBlock
from ..compiler.graphs import value_of
from ..kernels.build import INCLUDE, abandon, finish, load, start
from ..kernels.cpp import print_cpp
from ..kernels.expressions import Unsupported
from ..kernels.lower import make_row_loop
from ..kernels.schedule import make_schedule
from .base import Backend, Function
from .compile import COMPILE
from .compile import build as build_program
from .compile import run_scan as run_while_loop

# c10::ScalarType, by which C++ knows a dtype.
_SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.complex64: 9,
    torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _SCALAR_TYPES.items()}

# Runs a kernel, which is a library on disk. ``numbers`` are the kernel's own; ``shapes``, ``ranks``
# and ``dtypes`` say what its outputs are, so that all of a call stands in the program.
_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define(
    "scan(Tensor[] inputs, str library, SymInt[] numbers, SymInt[] shapes, int[] ranks, "
    "int[] dtypes) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def _outputs(
    inputs: Sequence[Tensor],
    library: str,
    numbers: Sequence[Any],
    shapes: Sequence[Any],
    ranks: Sequence[int],
    dtypes: Sequence[int],
) -> list[Tensor]:
    """The outputs, not yet filled: what the operator returns for fake tensors."""
    ends = list(accumulate(ranks))
    return [
        torch.empty(list(shapes[end - rank : end]), dtype=_DTYPES[code])
        for end, rank, code in zip(ends, ranks, dtypes, strict=True)
    ]


def _scan(inputs: Sequence[Tensor], library: str, numbers: Sequence[int], *spec: Any) -> Any:
    """The operator outside of a compiled program, which calls the kernel as SHIM does."""
    outputs = _outputs(inputs, library, numbers, *spec)
    memory = [t.data_ptr() for t in (*inputs, *outputs)]
    run = load(library)
    run((ctypes.c_void_p * len(memory))(*memory), (ctypes.c_int64 * len(numbers))(*numbers))
    return outputs


_library.impl("scan", _scan, "CPU")
torch.library.register_fake("ftbptt::scan", _outputs, lib=_library)
_SHIM = (INCLUDE / "shim.h").read_text()


@dataclass(frozen=True)
class Kernel:
    """A kernel's library, and which of its block's tensors it takes."""

    library: str
    invariants: list[int]
    weights: list[int]
    sequences: list[int]
    row_axes: tuple[int, ...]


def _kernel_for(block: ScanBlock, reverse: bool) -> Kernel:
    """The block's kernel, built if it is new; raises Unsupported."""
    with not_traced():
        loop = make_row_loop(block)
        source = print_cpp(loop, make_schedule(loop), block.history, reverse=reverse)
    return Kernel(
        str(start(source)),
        sorted(loop.invariants),
        list(loop.weight_dtypes),
        sorted(loop.sequences),
        loop.rows.dims,
    )


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
        kernel = _kernel_for(block, reverse)
    except Unsupported:
        return run_while_loop(block, invariants, sequences, carries, steps, reverse)
    # The strides of a weight are those of the numbers that the kernel sees.
    weights = [invariants[i].resolve_conj().resolve_neg() for i in kernel.weights]
    own = [_steps_in_order(sequences[i]) for i in kernel.sequences]
    inputs = [
        *(_in_order(invariants[i]) for i in kernel.invariants),
        *weights,
        *own,
        *map(_in_order, carries),
    ]
    numbers = [steps, *kernel.row_axes, *(t.stride(0) for t in own)]
    for weight in weights:
        numbers += weight.stride() if weight.dim() == 3 else (0, *weight.stride())
    values = [value_of(node) for node in (*block.carries, *block.emits)]
    finals, emits = values[: len(carries)], values[len(carries) :]
    kept = [value for value, flag in zip(finals, block.history, strict=True) if flag]
    shapes = [
        *(tuple(value.shape) for value in finals),
        *((steps + 1, *value.shape) for value in kept),
        *((steps, *value.shape) for value in emits),
    ]
    result = torch.ops.ftbptt.scan(
        inputs,
        kernel.library,
        numbers,
        [size for shape in shapes for size in shape],
        [len(shape) for shape in shapes],
        [_SCALAR_TYPES[value.dtype] for value in (*finals, *kept, *emits)],
    )
    behind = iter(result[len(finals) : len(finals) + len(kept)])
    histories = [next(behind) if flag else None for flag in block.history]
    return result[: len(finals)], histories, result[len(finals) + len(kept) :]


def _steps_in_order(sequence: Tensor) -> Tensor:
    """Each step of it in order; the steps may lie anyhow, as those of windows that overlap."""
    sequence = sequence.resolve_conj().resolve_neg()
    return sequence if sequence[0].is_contiguous() else sequence.contiguous()


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


def _build(function: Function, examples: Sequence[Tensor], mode: Any) -> Function:
    try:
        with calls_in_cpp(torch.ops.ftbptt.scan.default, _SHIM):
            program = build_program(function, examples, mode)
    except Exception:
        abandon()
        raise
    finish()
    return program


FUSED = Backend("fused", _describe, run_scan, _build)
