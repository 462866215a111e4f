"""The compile backend: a whole program through Inductor, each loop as one ``while_loop`` in it.

The program is traced with the number of steps as a symbol, so one compilation serves every K. A
loop's body is compiled once, and its cost does not grow with K. Unlike torch's ``scan`` operator,
the loop here writes each step's values straight into their place in the sequences, and a reverse
loop indexes backwards instead of flipping its inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import inductor_compile, inductor_decompositions, make_fx, while_loop
from .._interrupt import uninterrupted
from ..compiler.distribute import ScanBlock
from ..compiler.graphs import gemm_flops
from .base import Backend, Function
from .inductor_workarounds import work_around_defects
from .parallel_matmul import products_in_cpp, share_products


def run_scan(
    block: ScanBlock,
    invariants: list[Tensor],
    sequences: list[Tensor],
    carries: list[Tensor],
    steps: Any,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """A scan block as one ``while_loop``; meant to be traced, with ``steps`` a symbol."""
    device = carries[0].device
    invariants = [value.contiguous() for value in invariants]
    module = with_small_products(block.module) if device.type == "cpu" else block.module
    n_carries, n_seq = len(carries), len(sequences)
    # A carry whose history is read lives in it; the others are passed from step to step.
    kept = [i for i, flag in enumerate(block.history) if flag]
    passed = [i for i, flag in enumerate(block.history) if not flag]
    histories = _Buffers([carries[i] for i in kept], steps + 1)
    emits = _Buffers([node.meta["val"] for node in block.emits], steps)
    for history, i in zip(histories.views(), kept, strict=True):
        history.select(0, -1 if reverse else 0).copy_(carries[i])

    n_histories, n_emits = len(histories.tensors), len(emits.tensors)
    direction = -1 if reverse else 1

    def loop(carried: Sequence[Tensor], first: Any, behind: Any, stride: int) -> list[Tensor]:
        """Steps from ``first`` up to ``behind``, ``stride`` of them in each turn of the loop."""

        def again(counter: Tensor, *rest: Tensor) -> Tensor:
            return counter != rest[-1]

        def body(counter: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            own_histories, rest = rest[:n_histories], rest[n_histories:]
            own_emits, rest = rest[:n_emits], rest[n_emits:]
            own, rest = rest[: len(passed)], rest[len(passed) :]
            sequences, invariants = rest[:n_seq], rest[n_seq:-1]
            written, stacked = histories.views(own_histories), emits.views(own_emits)
            start: Any = counter.item()
            torch._check(start >= 0)
            values: dict[int, Tensor] = dict(zip(passed, own, strict=True))
            for i, history in zip(kept, written, strict=True):
                values[i] = history.select(0, start + 1 if reverse else start)
            for turn in range(stride):
                t = start + direction * turn
                inputs = [*(s.select(0, t) for s in sequences), *map(values.get, range(n_carries))]
                result = module(*invariants, *inputs)
                values = dict(enumerate(result[:n_carries]))
                for i, history in zip(kept, written, strict=True):
                    history.select(0, t if reverse else t + 1).copy_(values[i])
                for sequence, value in zip(stacked, result[n_carries:], strict=True):
                    sequence.select(0, t).copy_(value)
            following = [values[i].clone(memory_format=torch.contiguous_format) for i in passed]
            return (counter + direction * stride, *own_histories, *own_emits, *following)

        # The counter is the step itself, and its end a tensor: the symbol K stays out of the loop.
        counter = torch.full((), first, dtype=torch.int64)
        end = torch.full((), behind, dtype=torch.int64)
        _, *result = while_loop(again, body, (counter, *carried), (*sequences, *invariants, end))
        return result

    first, behind = (steps - 1, -1) if reverse else (0, steps)
    result = [*histories.tensors, *emits.tensors, *(carries[i].clone() for i in passed)]
    is_short = isinstance(steps, int) and steps < _UNROLLED  # a loss that holds for one K
    if device.type == "cpu" and _is_small(block) and not is_short:
        middle = first + direction * (steps // _UNROLLED * _UNROLLED)
        result = loop(result, first, middle, _UNROLLED)
        first = middle
    result = loop(result, first, behind, 1)
    finals = dict(zip(passed, result[n_histories + n_emits :], strict=True))
    traces: list[Tensor | None] = [None] * n_carries
    for i, history in zip(kept, histories.views(result[:n_histories]), strict=True):
        finals[i], traces[i] = history.select(0, 0 if reverse else -1).clone(), history
    stacked = emits.views(result[n_histories:][:n_emits])
    return [finals[i] for i in range(n_carries)], traces, stacked


# A turn of the loop costs some microseconds whatever is in it: a small body does several steps.
_UNROLLED = 4
_SMALL_FLOPS = 300_000
_SMALL_NODES = 40


def _is_small(block: ScanBlock) -> bool:
    """Few enough FLOPs, and few enough operations that the longer body compiles quickly."""
    nodes = [node for node in block.module.graph.nodes if node.op == "call_function"]
    return len(nodes) <= _SMALL_NODES and sum(map(gemm_flops, nodes)) < _SMALL_FLOPS


class _Buffers:
    """Sequences of ``length`` steps for values like ``examples``, those alike in one tensor.

    Every tensor that a loop is given costs it time at every step; a group of them costs once.
    """

    def __init__(self, examples: Sequence[Tensor], length: Any) -> None:
        groups: dict[Any, list[int]] = {}
        for i, example in enumerate(examples):
            groups.setdefault((example.shape, example.dtype), []).append(i)
        self.places = {
            i: (g, at) for g, own in enumerate(groups.values()) for at, i in enumerate(own)
        }
        self.tensors = [
            torch.empty((len(own), length, *shape), dtype=dtype, device=examples[own[0]].device)
            for (shape, dtype), own in groups.items()
        ]

    def views(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The sequence ``[length, ...]`` of each example, in these tensors or others like them."""
        tensors = self.tensors if tensors is None else tensors
        return [tensors[g].select(0, at) for _, (g, at) in sorted(self.places.items())]


# Up to this many rows a library GEMM costs more to call than to compute.
_FEW_ROWS = 2


def with_small_products(module: fx.GraphModule) -> fx.GraphModule:
    """The body with products of very few rows as multiply and add, which Inductor fuses."""
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        if node.meta["val"].shape[0] <= _FEW_ROWS:
            with graph.inserting_before(node):
                fused = graph.call_function(_small_product, node.args)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
    return fx.GraphModule(module, graph)


def _small_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b).sum(-2)


@cache
def _keep_freed_memory() -> None:
    """Lets the C allocator keep what a segment frees, for the next one.

    glibc hands a large block back to the system when it is freed, and every segment would pay a
    page fault for each of its pages again, a quarter of its time. It stops to do so for blocks up
    to the largest it has seen freed, 32 MiB at most (mallopt(3), M_MMAP_THRESHOLD): show it one.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def build(
    function: Function, examples: Sequence[Tensor], mode: Any, calls_python: bool = False
) -> Function:
    """The function as one Inductor graph; whether there are operators in it that are Python."""
    _keep_freed_memory()
    with uninterrupted(), mode:  # torch's modes do not survive Ctrl-C
        program = make_fx(function, decomposition_table=inductor_decompositions())(*examples)
    work_around_defects(program)
    share_products(program)
    with products_in_cpp():
        return inductor_compile(program, examples, mode, calls_python)


def _describe(block: ScanBlock) -> str:
    return "a while_loop inside the compiled program"


COMPILE = Backend("compile", _describe, run_scan, build)
