"""The compile backend: a whole program through Inductor, each loop as one ``while_loop`` in it.

The program is traced with the number of steps as a symbol, so one compilation serves every K. A
loop's body is compiled once, and its cost does not grow with K. Unlike torch's ``scan`` operator,
the loop here writes each step's values straight into their place in the sequences, and a reverse
loop indexes backwards instead of flipping its inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import inductor_compile, make_program_graph, while_loop
from ..compiler.distribute import ScanBlock

Function = Callable[..., list[Tensor]]


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
    examples = [node.meta["val"] for node in block.emits]
    # A carry whose history is read lives in it; the others are carried from step to step.
    kept = [i for i, flag in enumerate(block.history) if flag]
    passed = [i for i, flag in enumerate(block.history) if not flag]
    histories = []
    for i in kept:
        history = carries[i].new_empty((steps + 1, *carries[i].shape))
        history.select(0, -1 if reverse else 0).copy_(carries[i])
        histories.append(history)
    emits = [torch.empty((steps, *e.shape), dtype=e.dtype, device=device) for e in examples]
    n_kept, n_emits = len(kept), len(emits)

    # The counter is the step itself, and its end a tensor: the symbol K stays out of the loop.
    start = torch.full((), steps - 1 if reverse else 0, dtype=torch.int64)
    end = torch.full((), -1 if reverse else steps, dtype=torch.int64)

    def again(counter: Tensor, *rest: Tensor) -> Tensor:
        return counter != rest[-1]

    def body(counter: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        histories, rest = rest[:n_kept], rest[n_kept:]
        emits, rest = rest[:n_emits], rest[n_emits:]
        own, rest = rest[: len(passed)], rest[len(passed) :]
        sequences, invariants = rest[:n_seq], rest[n_seq:-1]
        t = counter.item()
        torch._check(t >= 0)
        before, after = (t + 1, t) if reverse else (t, t + 1)
        values: list[Tensor | None] = [None] * n_carries
        for at, history in zip(kept, histories, strict=True):
            values[at] = history.select(0, before)
        for at, value in zip(passed, own, strict=True):
            values[at] = value
        result = module(*invariants, *(s.select(0, t) for s in sequences), *values)
        for at, history in zip(kept, histories, strict=True):
            history.select(0, after).copy_(result[at])
        for sequence, value in zip(emits, result[n_carries:], strict=True):
            sequence.select(0, t).copy_(value)
        following = [result[at].clone(memory_format=torch.contiguous_format) for at in passed]
        return (counter - 1 if reverse else counter + 1, *histories, *emits, *following)

    mutable = (start, *histories, *emits, *(carries[i].clone() for i in passed))
    _, *result = while_loop(again, body, mutable, (*sequences, *invariants, end))
    histories, result = result[:n_kept], result[n_kept:]
    emits, own = result[:n_emits], result[n_emits:]
    finals: list[Any] = [None] * n_carries
    traces: list[Tensor | None] = [None] * n_carries
    for at, history in zip(kept, histories, strict=True):
        finals[at], traces[at] = history.select(0, 0 if reverse else -1).clone(), history
    for at, value in zip(passed, own, strict=True):
        finals[at] = value
    return finals, traces, list(emits)


# Below this many rows a library GEMM costs more to call than to compute.
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


class CompileBackend:
    """Every function of the program as one Inductor graph."""

    name = "compile"
    run_scan = staticmethod(run_scan)

    def build(self, function: Function, examples: Sequence[Tensor], mode: Any) -> Function:
        _keep_freed_memory()
        graph = make_program_graph(function, examples, mode)
        return inductor_compile(graph, examples, mode)
