"""The fused backend: a scan block becomes one call of a generated kernel that runs all K steps.

The kernel is written in C++ for a CPU and in Triton for a GPU. The call is a custom operator, and
the rest of the program is compiled around it as by ``compile``. Blocks for which no kernel can be
generated run as by ``compile`` on a CPU and as by ``cudagraph`` on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat.inductor import calls_in_cpp
from .._compat.tracing import not_traced
from .._memory import resolved
from ..compiler.blocks import ScanBlock
from ..compiler.fusion import Fusion
from ..compiler.graphs import VIEWS, Node, aten, value_of
from ..compiler.run_loop import ScanResult
from ..kernels.argmax import expand_argmax
from ..kernels.cpu.build import load, start, start_ahead
from ..kernels.cpu.loop import print_cpp
from ..kernels.cpu.toolchain import INCLUDE
from ..kernels.expressions import Unsupported, is_elementwise
from ..kernels.gpu.kernel import describe_triton, print_triton
from ..kernels.gpu.module import launch, write
from ..kernels.lower import make_row_loop
from ..kernels.products import is_small_product
from ..kernels.rowloop import EmitLayout, RowLoop
from .base import Backend, Function, histories_by_carry
from .compile import COMPILE, at_once
from .compile import build as build_program
from .cudagraph import CUDAGRAPH

# The values of c10::ScalarType.
_SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.complex64: 9,
    torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _SCALAR_TYPES.items()}

# Runs the kernel in ``library``, a file, with ``numbers`` as its integer arguments. ``shapes`` (of
# all outputs, one after the other), ``ranks`` and ``dtypes`` describe the outputs. So a compiled
# program contains all of the call, and refers to no state of this process.
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
    """The outputs, uninitialized. Also the operator's fake implementation."""
    ends = list(accumulate(ranks))
    return [
        torch.empty(list(shapes[end - rank : end]), dtype=_DTYPES[code], device=inputs[0].device)
        for end, rank, code in zip(ends, ranks, dtypes, strict=True)
    ]


def _scan(inputs: Sequence[Tensor], library: str, numbers: Sequence[int], *spec: Any) -> Any:
    """The operator's implementation outside of compiled programs, which use ``scan.h``."""
    outputs = _outputs(inputs, library, numbers, *spec)
    if library.endswith(".py"):
        launch(library, inputs, outputs, numbers)
        return outputs
    memory = [t.data_ptr() for t in (*inputs, *outputs)]
    run = load(library)
    run((ctypes.c_void_p * len(memory))(*memory), (ctypes.c_int64 * len(numbers))(*numbers))
    return outputs


for _device in ("CPU", "CUDA"):
    _library.impl("scan", _scan, _device)
torch.library.register_fake("ftbptt::scan", _outputs, lib=_library)
_SHIM = "\n".join((INCLUDE / name).read_text() for name in ("load.h", "scan.h"))


@dataclass(frozen=True)
class Language:
    """A language in which kernels are written.

    ``print_source(loop)`` is the source of a kernel, ``describe(loop)`` says what it is;
    ``make_ready(source)`` compiles or stores it, and returns the path of its library.
    ``on_gpu``: see ``make_row_loop``. A CPU vectorizes along the last axis, and goes over the heads
    of a row one by one; on a GPU each element of an elementwise loop can be a row, with one thread,
    and a program has the rows of one head. Nor do its kernels absorb operations after the loop,
    for which it lacks the registers.
    """

    print_source: Callable[[RowLoop], str]
    describe: Callable[[RowLoop], str]
    make_ready: Callable[[str], Path]
    on_gpu: bool


def _describe_cpp(loop: RowLoop) -> str:
    return "one generated C++ kernel for all steps"


LANGUAGES = {  # device type -> language
    "cpu": Language(print_cpp, _describe_cpp, start, on_gpu=False),
    "cuda": Language(print_triton, describe_triton, write, on_gpu=True),
}


def _language_of(block: ScanBlock) -> Language:
    kind = block.device.type
    if kind not in LANGUAGES:
        raise Unsupported(f"there are no kernels for {kind}")
    return LANGUAGES[kind]


def _source_for(block: ScanBlock) -> tuple[Language, RowLoop, str]:
    """The block's language, row loop and kernel source; raises Unsupported."""
    language = _language_of(block)
    # A kernel's tiles follow from the sizes of its GPU, which may not be the current one.
    has_gpu = block.device.type == "cuda" and torch.cuda.is_available()
    with not_traced(), torch.cuda.device(block.device) if has_gpu else nullcontext():
        loop = make_row_loop(block, on_gpu=language.on_gpu)
        return language, loop, language.print_source(loop)


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: Any,
) -> ScanResult:
    """A scan block as one call of its kernel, or as a loop of another backend if it has none."""
    try:
        language, loop, source = _source_for(block)
    except Unsupported:
        assert not block.totals  # fusion creates totals only where there is a kernel
        return _fallback(block).run_scan(block, invariants, sequences, carries, steps)
    library = language.make_ready(source)
    # Resolved before their strides are read below: resolving may copy.
    weights = [resolved(invariants[i]) for i in loop.weight_dtypes]
    sequences = [_contiguous_steps(sequences[i]) for i in sorted(loop.sequences)]
    inputs = [
        *(_contiguous(invariants[i]) for i in sorted(loop.invariants)),
        *weights,
        *sequences,
        *map(_contiguous, carries),
    ]
    numbers = [steps, *loop.rows.dims, *(sequence.stride(0) for sequence in sequences)]
    for i, weight in zip(loop.weight_dtypes, weights, strict=True):
        *group, k, n = weight.stride()
        numbers += [*(group or [0]), *((n, k) if i in loop.transposed else (k, n))]
    parts = _results(block, loop.emit_layouts, steps)
    results = [result for part in parts for result in part]
    written = iter(
        torch.ops.ftbptt.scan(
            inputs,
            str(library),
            numbers,
            [size for shape, _ in results for size in shape],
            [len(shape) for shape, _ in results],
            [_SCALAR_TYPES[dtype] for _, dtype in results],
        )
    )
    finals, histories, emits, totals = ([*islice(written, len(part))] for part in parts)
    emits = [
        _as_in_block(emit, layout, tuple(value_of(node).shape), steps)
        for emit, layout, node in zip(emits, loop.emit_layouts, block.emits, strict=True)
    ]
    return ScanResult(finals, histories_by_carry(block, histories), emits, totals)


def _as_in_block(written: Tensor, layout: EmitLayout, shape: tuple[int, ...], steps: Any) -> Tensor:
    """An emit as the block has it, in this shape; nothing is traced where it is so already."""
    if layout.back != tuple(range(len(layout.back))):
        written = written.permute(0, *(1 + axis for axis in layout.back))
    if tuple(layout.shape[axis] for axis in layout.back) != shape:
        written = written.reshape(steps, *shape)
    return written


def _results(
    block: ScanBlock, emit_layouts: Sequence[EmitLayout], steps: Any
) -> list[list[tuple[tuple[Any, ...], torch.dtype]]]:
    """Shapes and dtypes of what a kernel writes: final carries, histories, emits, totals."""
    carries, with_history, emits, totals = (
        list(map(value_of, nodes))
        for nodes in (block.carries, block.with_history, block.emits, block.totals)
    )
    written = [
        ((steps, *layout.shape), emit.dtype)
        for layout, emit in zip(emit_layouts, emits, strict=True)
    ]
    return [
        [(tuple(value.shape), value.dtype) for value in carries],
        [((steps + 1, *value.shape), value.dtype) for value in with_history],
        written,
        [(tuple(value.shape), value.dtype) for value in totals],
    ]


def _fallback(block: ScanBlock) -> Backend:
    """The backend for a block without a kernel."""
    return CUDAGRAPH if block.device.type == "cuda" else COMPILE


def _contiguous_steps(sequence: Tensor) -> Tensor:
    """The sequence with each step contiguous; the steps may overlap, as sliding windows do."""
    sequence = resolved(sequence)
    return sequence if sequence[0].is_contiguous() else sequence.contiguous()


def _contiguous(tensor: Tensor) -> Tensor:
    return resolved(tensor).contiguous()


def _describe(block: ScanBlock) -> str:
    try:
        language, loop, _ = _source_for(block)
    except Unsupported as reason:
        return f"{_fallback(block).describe(block)}; no kernel: {reason}"
    return language.describe(loop)


def _has_kernel(block: ScanBlock) -> bool:
    try:
        _source_for(block)
    except Unsupported:
        return False
    return True


def _build(function: Function, examples: Sequence[Tensor], mode: Any) -> Function:
    with calls_in_cpp(torch.ops.ftbptt.scan.default, _SHIM):
        return build_program(function, examples, mode)


def _start_kernel(block: ScanBlock) -> None:
    if block.device.type == "cpu":  # Triton compiles where a kernel is first launched
        with suppress(Unsupported, OSError):  # of which the latter is met again, and told, later
            start_ahead(_source_for(block)[2])


def _takes_in(node: Node) -> bool:
    """Whether a kernel can compute this operation, given its operands."""
    is_cheap = is_elementwise(node) or node.target in VIEWS
    return is_cheap or node.target is aten.sum.dim_IntList or is_small_product(node)


def _rows_of(block: ScanBlock) -> tuple[int, ...] | None:
    """The row axes of the block's kernel; None if there is none that can absorb operations."""
    try:
        if _language_of(block).on_gpu:
            return None
        _, loop, _ = _source_for(block)
    except Unsupported:
        return None
    return loop.rows.shape


_FUSION = Fusion(expand_argmax, _takes_in, _rows_of)
FUSED = Backend(
    "fused",
    _describe,
    run_scan,
    _build,
    at_once,
    _start_kernel,
    captured=True,
    in_one_kernel=_has_kernel,
    fusion=_FUSION,
)
