"""The cudagraph backend: each block's step is compiled once, a segment runs as one CUDA graph.

On a GPU torch's ``while_loop`` synchronizes with the device at every step. Here a loop is a custom
operator that calls the compiled step from Python, which only launches kernels; the CUDA graph (see
``segment.capture``) then replays all of them without Python. The rest of the program is compiled
around the loops, as by ``compile``. The backend also runs on a CPU, without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, fx

from .._compat.tracing import FakeTensorMode, not_traced
from ..compiler.blocks import ScanBlock
from ..compiler.graphs import value_of
from ..compiler.run_loop import ScanResult
from ..compiler.tracing.trace import TRACING
from ..kernels.row_order import inverse
from .base import Backend, Function, histories_by_carry
from .compile import build
from .stages import Stage, Stages

Orders = tuple[tuple[int, ...], ...]  # of the axes of each invariant, as it lies in memory

_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define(
    "steps(Tensor[] inputs, int block, SymInt steps) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)

# An operator cannot take a block as an argument: it takes a number, by which the block is found.
_numbers: WeakKeyDictionary[ScanBlock, int] = WeakKeyDictionary()
_blocks: WeakValueDictionary[int, ScanBlock] = WeakValueDictionary()
_compiled_steps: WeakKeyDictionary[ScanBlock, dict[Orders, CompiledStep]] = WeakKeyDictionary()
_next_number = count()


def _outputs(inputs: Sequence[Tensor], number: int, steps: Any) -> list[Tensor]:
    """``[*finals, *histories, *emits]``, uninitialized. Also the operator's fake implementation."""
    block, device = _blocks[number], inputs[-1].device

    def empty(value: Tensor, *length: Any) -> Tensor:
        return torch.empty((*length, *value.shape), dtype=value.dtype, device=device)

    return [
        *(empty(value_of(node)) for node in block.carries),
        *(empty(value_of(node), steps + 1) for node in block.with_history),
        *(empty(value_of(node), steps) for node in block.emits),
    ]


def _run(inputs: Sequence[Tensor], number: int, steps: int) -> list[Tensor]:
    """The operator's implementation: a Python loop over the compiled step."""
    block, outputs = _blocks[number], _outputs(inputs, number, steps)
    n_inv, n_seq, n_carries = map(len, (block.invariants, block.sequences, block.carries))
    # As they lie in memory: for a weight by columns, as a transposed one of a Linear is, cuBLAS has
    # a faster product in TF32 than for its copy by rows.
    orders = tuple(map(_memory_order, inputs[:n_inv]))
    invariants = [_dense(t, order) for t, order in zip(inputs, orders, strict=False)]
    sequences, carries = inputs[n_inv : n_inv + n_seq], inputs[n_inv + n_seq :]
    first_emit = n_carries + sum(block.history)
    finals, emits = outputs[:n_carries], outputs[first_emit:]
    histories = histories_by_carry(block, outputs[n_carries:first_emit])
    # Where a carry lies: in its history, or in a buffer of two slots, used in turn.
    buffers = [
        torch.empty((2, *carry.shape), dtype=carry.dtype, device=carry.device)
        if history is None
        else history
        for carry, history in zip(carries, histories, strict=True)
    ]
    step, reverse = _compiled_step(block, orders), block.reverse
    scratch = step.scratch(device=inputs[-1].device)

    def carries_at(slot: int) -> list[Tensor]:
        return [
            buffer[slot if flag else slot % 2]
            for buffer, flag in zip(buffers, block.history, strict=True)
        ]

    for buffer, carry in zip(carries_at(steps if reverse else 0), carries, strict=True):
        buffer.copy_(carry)
    for t in range(steps - 1, -1, -1) if reverse else range(steps):
        before, after = (t + 1, t) if reverse else (t, t + 1)
        step(
            [
                *invariants,
                *(sequence[t] for sequence in sequences),
                *carries_at(before),
                *carries_at(after),
                *(emit[t] for emit in emits),
                *scratch,
            ]
        )
    for final, last in zip(finals, carries_at(0 if reverse else steps), strict=True):
        final.copy_(last)
    return outputs


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The axes, the one with the largest stride first."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))


def _dense(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor, without gaps in memory and with its axes in this order there."""
    return tensor.permute(order).contiguous().permute(inverse(order))


def _compiled_step(block: ScanBlock, orders: Orders) -> CompiledStep:
    """The step of a block, compiled once, for invariants with their axes in these orders."""
    steps = _compiled_steps.setdefault(block, {})
    if orders not in steps:
        with TRACING:  # a program may be running in several threads
            if orders not in steps:
                steps[orders] = CompiledStep(block.module.graph, orders)
    return steps[orders]


class CompiledStep:
    """``step(memory)``, with the memory of its ``Stages``, whose functions are compiled."""

    def __init__(self, graph: fx.Graph, orders: Orders) -> None:
        stages = Stages(graph)
        inputs = graph.find_nodes(op="placeholder")
        values = [value_of(node) for node in (*inputs, *graph.output_node().args[0])]
        self._scratch = [value_of(node) for node in stages.scratch]
        with not_traced():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                memory = [_empty(value, value.device) for value in (*values, *self._scratch)]
                for i, order in enumerate(orders):
                    memory[i] = _dense(memory[i], order)
            self._stages = [(stage, _compiled(stage, memory, mode)) for stage in stages.stages]

    def scratch(self, device: torch.device) -> list[Tensor]:
        return [_empty(value, device) for value in self._scratch]

    def __call__(self, memory: Sequence[Tensor]) -> None:
        for stage, function in self._stages:
            stage.run(memory, function)


def _empty(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _compiled(stage: Stage, memory: Sequence[Tensor], mode: FakeTensorMode) -> Function:
    if not stage.targets:
        return stage.function
    with mode:
        examples = stage.arguments(memory)
    return build(stage.function, examples, mode)


for _device in ("CPU", "CUDA"):
    _library.impl("steps", _run, _device)
torch.library.register_fake("ftbptt::steps", _outputs, lib=_library)


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: Any,
) -> ScanResult:
    """A scan block as one operator of the program, which calls the step K times."""
    number = _numbers.setdefault(block, next(_next_number))
    _blocks[number] = block
    result = torch.ops.ftbptt.steps([*invariants, *sequences, *carries], number, steps)
    first_history, first_emit = len(carries), len(carries) + sum(block.history)
    histories = histories_by_carry(block, result[first_history:first_emit])
    return ScanResult(result[:first_history], histories, result[first_emit:])


def _describe(block: ScanBlock) -> str:
    where = "in one CUDA graph" if block.device.type == "cuda" else "in turn"
    return f"its step compiled once, and called K times {where}"


CUDAGRAPH = Backend(
    "cudagraph", _describe, run_scan, partial(build, calls_python=True), captured=True
)
