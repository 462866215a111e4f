"""The compile backend: Inductor compiles the full program, with each loop as a ``while_loop``.

The program is traced with the number of steps as a symbol, so one compilation serves every K. A
loop's body is compiled once, and the cost of compiling does not grow with K. Unlike torch's
``scan`` operator, the loop writes each step's values directly into the stacked sequences, and a
reverse loop indexes backwards instead of flipping its inputs.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._compat.background import compiling_in_background
from .._compat.graph_modules import GraphModule, tracing_without_code
from .._compat.inductor import inductor_compile, inductor_decompositions, while_loop
from .._compat.tracing import enable_python_dispatcher, make_fx
from .._interrupt import uninterrupted
from .._memory import resolved
from ..compiler.blocks import ScanBlock
from ..compiler.gemms import gemm_flops
from ..compiler.run_loop import ScanResult
from ..kernels.cpu.build import abandon, cancel, finish
from .base import Backend, Function, histories_by_carry
from .constants import CONSTANTS
from .inductor_workarounds import DECOMPOSITIONS, work_around_defects
from .parallel_matmul import products_in_cpp, share_products


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: Any,
) -> ScanResult:
    """A scan block as ``while_loop``; meant to be traced, with ``steps`` a symbol."""
    loop = _ScanLoop(block, carries, steps)
    tensors = loop.allocate(invariants, sequences, carries)
    first, end = (steps - 1, -1) if block.reverse else (0, steps)
    # ``steps`` is an int only for a loss that is compiled for one K.
    is_short = isinstance(steps, int) and steps < _UNROLLED
    if carries[0].device.type == "cpu" and _is_small(block) and not is_short:
        middle = first + loop.direction * (steps // _UNROLLED * _UNROLLED)
        tensors = loop.run(tensors, first, middle, stride=_UNROLLED)
        first = middle
    tensors = loop.run(tensors, first, end, stride=1)
    return loop.collect(tensors)


class _LoopTensors(NamedTuple):
    """The tensors of a ``while_loop``, which takes and returns them as one flat list."""

    histories: list[Tensor]  # buffers (see ``_Buffers``), written in place, as are the emits
    emits: list[Tensor]
    carries: list[Tensor]  # those without a history, at their current value
    sequences: list[Tensor]
    invariants: list[Tensor]

    def carried(self) -> list[Tensor]:
        return [*self.histories, *self.emits, *self.carries]

    def inputs(self) -> list[Tensor]:
        return [*self.sequences, *self.invariants]

    def unflatten(self, flat: Sequence[Tensor]) -> _LoopTensors:
        """``[*carried, *inputs]``, split into groups of the same lengths as these."""
        remaining = iter(flat)
        return _LoopTensors(*(list(islice(remaining, len(group))) for group in self))


class _ScanLoop:
    """A scan block as a ``while_loop``.

    A carry with a history is read from and written to that history; the other carries are loop
    variables. A history has K + 1 slots: step t reads slot t and writes slot t + 1, or the other
    way round in reverse.
    """

    def __init__(self, block: ScanBlock, carries: Sequence[Tensor], steps: Any) -> None:
        on_cpu = carries[0].device.type == "cpu"
        self.module = with_small_products(block.module) if on_cpu else block.module
        self.block, self.reverse = block, block.reverse
        self.direction = -1 if block.reverse else 1
        self.with_history = [i for i, flag in enumerate(block.history) if flag]
        self.without_history = [i for i, flag in enumerate(block.history) if not flag]
        self.histories = _Buffers([carries[i] for i in self.with_history], steps + 1)
        self.emits = _Buffers([node.meta["val"] for node in block.emits], steps)

    def allocate(
        self,
        invariants: Sequence[Tensor],
        sequences: Sequence[Tensor],
        carries: Sequence[Tensor],
    ) -> _LoopTensors:
        """The tensors that the loop starts with; each history holds its carry's initial value."""
        for history, i in zip(self.histories.views(), self.with_history, strict=True):
            history.select(0, -1 if self.reverse else 0).copy_(carries[i])
        return _LoopTensors(
            self.histories.tensors,
            self.emits.tensors,
            [carries[i].clone() for i in self.without_history],
            # A while_loop does not take a lazy conjugate.
            [resolved(value) for value in sequences],
            [resolved(value).contiguous() for value in invariants],
        )

    def run(self, tensors: _LoopTensors, first: Any, end: Any, stride: int) -> _LoopTensors:
        """Runs the steps from ``first`` up to but excluding ``end``, ``stride`` in each turn."""

        def is_unfinished(counter: Tensor, *flat: Tensor) -> Tensor:
            return counter != flat[-1]

        def body(counter: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            updated = self._turn(tensors.unflatten(flat[:-1]), counter, stride)
            return (counter + self.direction * stride, *updated.carried())

        # The counter is the index of the step. Its end is a tensor too, which keeps the symbol K
        # out of the loop. Both are read at each turn, whatever torch.set_default_device says.
        counter = torch.full((), first, dtype=torch.int64, device="cpu")
        last = torch.full((), end, dtype=torch.int64, device="cpu")
        inputs = tensors.inputs()
        _, *carried = while_loop(
            is_unfinished, body, (counter, *tensors.carried()), (*inputs, last)
        )
        return tensors.unflatten([*carried, *inputs])

    def _turn(self, tensors: _LoopTensors, counter: Tensor, stride: int) -> _LoopTensors:
        """Runs ``stride`` steps, of which ``counter`` is the first."""
        histories = self.histories.views(tensors.histories)
        emits = self.emits.views(tensors.emits)
        first: Any = counter.item()
        torch._check(first >= 0)
        slot = first + 1 if self.reverse else first
        saved = histories_by_carry(self.block, [h.select(0, slot) for h in histories])
        passed = iter(tensors.carries)
        carries = [next(passed) if carry is None else carry for carry in saved]
        for offset in range(stride):
            t = first + self.direction * offset
            inputs = [sequence.select(0, t) for sequence in tensors.sequences]
            result = self.module(*tensors.invariants, *inputs, *carries)
            carries = result[: len(carries)]
            for history, i in zip(histories, self.with_history, strict=True):
                history.select(0, t if self.reverse else t + 1).copy_(carries[i])
            for emit, value in zip(emits, result[len(carries) :], strict=True):
                emit.select(0, t).copy_(value)
        return tensors._replace(
            carries=[
                carries[i].clone(memory_format=torch.contiguous_format)
                for i in self.without_history
            ]
        )

    def collect(self, tensors: _LoopTensors) -> ScanResult:
        """The result of a finished loop."""
        histories = histories_by_carry(self.block, self.histories.views(tensors.histories))
        last_slot = 0 if self.reverse else -1
        passed = iter(tensors.carries)
        finals = [
            next(passed) if history is None else history.select(0, last_slot).clone()
            for history in histories
        ]
        return ScanResult(finals, histories, self.emits.views(tensors.emits))


# A turn of the loop has an overhead of some microseconds, so a small body does several steps.
_UNROLLED = 4
_SMALL_FLOPS = 300_000
_SMALL_NODES = 40


def _is_small(block: ScanBlock) -> bool:
    """Whether several steps should share a turn: few FLOPs, and few operations to compile."""
    nodes = [node for node in block.module.graph.nodes if node.op == "call_function"]
    return len(nodes) <= _SMALL_NODES and sum(map(gemm_flops, nodes)) < _SMALL_FLOPS


class _Buffers:
    """Sequences of ``length`` steps for values like ``examples``.

    Those of the same shape and dtype share one tensor ``[count, length, *shape]``: every tensor
    passed to a loop costs time at every step.
    """

    def __init__(self, examples: Sequence[Tensor], length: Any) -> None:
        groups: dict[Any, list[int]] = {}
        for i, example in enumerate(examples):
            groups.setdefault((example.shape, example.dtype), []).append(i)
        # Example -> (the tensor, the index in it).
        self.positions = {
            i: (group, index)
            for group, members in enumerate(groups.values())
            for index, i in enumerate(members)
        }
        self.tensors = [
            torch.empty(
                (len(members), length, *shape), dtype=dtype, device=examples[members[0]].device
            )
            for (shape, dtype), members in groups.items()
        ]

    def views(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The sequence ``[length, ...]`` of each example, in ``tensors`` or else in its own."""
        tensors = self.tensors if tensors is None else tensors
        positions = (position for _, position in sorted(self.positions.items()))
        return [tensors[group].select(0, index) for group, index in positions]


# Up to this many rows, calling a library GEMM costs more than the arithmetic.
_FEW_ROWS = 2


def with_small_products(module: fx.GraphModule) -> fx.GraphModule:
    """The step with products of very few rows as multiply and sum, which Inductor fuses.

    Not those of whole numbers: a sum of them is of 64 bits, and does not wrap around.
    """
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        value = node.meta["val"]
        if value.shape[0] <= _FEW_ROWS and (value.is_floating_point() or value.is_complex()):
            with graph.inserting_before(node):
                product = graph.call_function(_small_product, node.args)
            node.replace_all_uses_with(product)
            graph.erase_node(node)
    return GraphModule(module, graph)


def _small_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b).sum(-2)


# Options of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@cache
def _keep_freed_memory() -> None:
    """Makes the C allocator keep the memory that a segment frees, for the next segment.

    glibc returns large blocks to the system, and what is free at the end of its heap. Every segment
    would then fault all of its pages in again, which takes a quarter of its time. So blocks of up
    to 32 MiB, the most that glibc takes, come from the heap, of which up to 1 GiB is kept.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 32 << 20)
            mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def build(
    function: Function, examples: Sequence[Tensor], mode: Any, calls_python: bool = False
) -> Function:
    """The function compiled as one Inductor graph, with the libraries that it calls.

    ``calls_python``: the graph has custom operators that are implemented in Python.
    """
    _keep_freed_memory()
    with nullcontext() if _at_once.get() else _with_kernels():
        # Ctrl-C would leave torch's modes in a broken state.
        with uninterrupted(), mode, enable_python_dispatcher(), tracing_without_code():
            table = inductor_decompositions() | DECOMPOSITIONS | CONSTANTS
            program = make_fx(function, decomposition_table=table)(*examples)
        work_around_defects(program)
        share_products(program)
        with products_in_cpp():
            return inductor_compile(program, examples, mode, calls_python)


_at_once = ContextVar("at_once", default=False)


@contextmanager
def at_once() -> Iterator[None]:
    """What is built within is compiled at the same time, and may be called when it ends."""
    token = _at_once.set(True)
    try:
        with _with_kernels(), compiling_in_background():
            yield
    finally:
        _at_once.reset(token)


@contextmanager
def _with_kernels() -> Iterator[None]:
    """When it ends, the kernels of what is built within are ready too."""
    try:
        yield
    except Exception:
        abandon()
        raise
    except KeyboardInterrupt:
        cancel()
        raise
    finish()


def _describe(block: ScanBlock) -> str:
    return "a while_loop inside the compiled program"


COMPILE = Backend("compile", _describe, run_scan, build, at_once)
