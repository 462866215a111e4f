"""The cudagraph backend: each block's step compiled once, all of a segment in one CUDA graph.

On a GPU torch's own loop operator waits for the device at every step. Here a loop is a custom
operator that calls the compiled step from Python, which only puts kernels into a queue, and the
graph (see ``_capture``) replays them all without Python. The rest of the program is compiled
around the loops, as by ``compile``. It runs on a CPU as well, without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from .._compat import FakeTensorMode, not_traced
from ..compiler.distribute import ScanBlock
from ..compiler.graphs import value_of
from .base import Backend, Function
from .compile import build

_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define(
    "steps(Tensor[] inputs, int block, SymInt steps, bool reverse) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)

# An operator is given numbers, not blocks.
_numbers: WeakKeyDictionary[ScanBlock, int] = WeakKeyDictionary()
_blocks: WeakValueDictionary[int, ScanBlock] = WeakValueDictionary()
_steps: WeakKeyDictionary[ScanBlock, Function] = WeakKeyDictionary()
_next = count()


def _outputs(inputs: Sequence[Tensor], number: int, steps: Any, reverse: bool) -> list[Tensor]:
    """``[*finals, *histories, *emits]``, not yet filled: what fake tensors become."""
    block = _blocks[number]
    values = [value_of(node) for node in block.carries]
    kept = [value for value, flag in zip(values, block.history, strict=True) if flag]
    emits = [value_of(node) for node in block.emits]
    lengths: list[tuple[Tensor, tuple[Any, ...]]] = [(value, ()) for value in values]
    lengths += [(value, (steps + 1,)) for value in kept] + [(value, (steps,)) for value in emits]
    device = inputs[-1].device
    return [
        torch.empty((*length, *value.shape), dtype=value.dtype, device=device)
        for value, length in lengths
    ]


def _run(inputs: Sequence[Tensor], number: int, steps: int, reverse: bool) -> list[Tensor]:
    block, outputs = _blocks[number], _outputs(inputs, number, steps, reverse)
    n_inv, n_seq, n_carries = map(len, (block.invariants, block.sequences, block.carries))
    invariants = [tensor.contiguous() for tensor in inputs[:n_inv]]
    sequences, carries = inputs[n_inv : n_inv + n_seq], inputs[n_inv + n_seq :]
    finals, rest = outputs[:n_carries], outputs[n_carries:]
    emits = rest[sum(block.history) :]
    # A carry without a history goes to and fro between two places.
    kept = iter(rest)
    places = [
        next(kept) if flag else torch.empty((2, *carry.shape), dtype=carry.dtype,
                                            device=carry.device)
        for carry, flag in zip(carries, block.history, strict=True)
    ]  # fmt: skip
    step = _compiled(block)

    def at(slot: int) -> list[Tensor]:
        return [p[slot if f else slot % 2] for p, f in zip(places, block.history, strict=True)]

    for place, carry in zip(at(steps if reverse else 0), carries, strict=True):
        place.copy_(carry)
    for t in range(steps - 1, -1, -1) if reverse else range(steps):
        before, after = (t + 1, t) if reverse else (t, t + 1)
        now = [s[t] for s in sequences]
        step(*invariants, *now, *at(before), *at(after), *(e[t] for e in emits))
    for final, last in zip(finals, at(0 if reverse else steps), strict=True):
        final.copy_(last)
    return outputs


def _compiled(block: ScanBlock) -> Function:
    """The step, which writes its results where they belong: ``step(*inputs, *places)``."""
    if block not in _steps:
        module = block.module
        given = [value_of(node) for node in module.graph.find_nodes(op="placeholder")]
        results = [value_of(node) for node in module.graph.output_node().args[0]]

        def step(*args: Tensor) -> list[Tensor]:
            places = args[len(given) :]
            for place, value in zip(places, module(*args[: len(given)]), strict=True):
                place.copy_(value)
            return list(places)

        with not_traced():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                examples = [
                    torch.empty(value.shape, dtype=value.dtype, device=value.device)
                    for value in (*given, *results)
                ]
            _steps[block] = build(step, examples, mode)
    return _steps[block]


for _device in ("CPU", "CUDA"):
    _library.impl("steps", _run, _device)
torch.library.register_fake("ftbptt::steps", _outputs, lib=_library)


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: Any,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """A scan block as calls of its step, in one operator of the program."""
    number = _numbers.setdefault(block, next(_next))
    _blocks[number] = block
    result = torch.ops.ftbptt.steps([*invariants, *sequences, *carries], number, steps, reverse)
    n, n_kept = len(carries), sum(block.history)
    kept = iter(result[n : n + n_kept])
    histories = [next(kept) if flag else None for flag in block.history]
    return result[:n], histories, result[n + n_kept :]


def _describe(block: ScanBlock) -> str:
    where = "in one CUDA graph" if value_of(block.carries[0]).device.type == "cuda" else "in turn"
    return f"its step compiled once, and called K times {where}"


CUDAGRAPH = Backend(
    "cudagraph", _describe, run_scan, partial(build, calls_python=True), captured=True
)
