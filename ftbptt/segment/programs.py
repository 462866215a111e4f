"""The compiled functions of a plan on a backend, each built when it is first needed.

They are pure functions of tensors with time as axis 0, of a chunk of K consecutive steps, and hold
for any K, so that a compiler can trace them with K as a symbol:

    prepare(*inputs)                                   -> [*prepared]        once per segment
    forward(*invariants, *x, *state)                   -> [*state, *out, *saved]
    loss(*out, *y, *captured)                          -> [loss, *d_out]
    reverse(*invariants, *x, *saved, *d_out, *d_state) -> [*d_state, *d_probes, *d_invariants]
    finish(*inputs, *d_prepared)                       -> [*d_inputs]        once per segment

A segment whose steps are never cut into chunks is one function instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._compat.tracing import (
    FakeTensorMode,
    is_pinned,
    most_indexed,
    symbolic_steps,
    unseen_by_tools,
)
from .._garbage import without_garbage_collection
from .._trees import in_groups
from ..backends import Backend
from ..backends.base import Function
from ..backends.cache_folder import built_somewhere
from ..compiler.blocks import DistributedLoop, ScanBlock
from ..compiler.distribute import distribute
from ..compiler.graphs import Node, value_of
from ..compiler.plan import Plan
from ..compiler.run_loop import ChunkInputs
from ..compiler.sliding_window import check_is_linear
from ..compiler.split_recurrences import SplitLoop, split_recurrences
from ..compiler.tracing.trace import TRACING
from ..compiler.written_loss import WrittenGraph
from .phases import Phases


@dataclass
class Count:
    """Of the functions that were built. Known to what counts and to what reads it."""

    value: int = 0


class Programs(Phases):
    """The same, each function compiled. A function that is built serves every K."""

    def __init__(self, plan: Plan, backend: Backend, compiled: Count | None = None) -> None:
        loops = plan.loops
        super().__init__(
            plan,
            backend,
            *(
                distribute(loop, backend.fusion)
                for loop in (loops.forward, loops.evaluate, loops.reverse)
            ),
        )
        # What a program is traced from. It does not refer to this object: what a dropped segment
        # holds, on a GPU its memory, is freed at once.
        self.as_written = Phases(plan, backend, self.forward, self.evaluate, self.reverse)
        self.compiled = compiled or Count()
        self.functions: dict[Any, Function] = {}
        self._unfinished: dict[Any, Function] | None = None  # while several are compiled
        self._sources: list[Function] = []  # keeps blocks alive that operators refer to by number

    @cached_property
    def split_reverse(self) -> SplitLoop:
        """The reverse loop in two; raises ValueError if windows cannot be added up in between."""
        split = split_recurrences(self.plan.loops.reverse)
        if self.plan.sliding is not None:
            check_is_linear(split, self.plan.step.graph, self.plan.loops.d_outs)
        return split

    def run_chunk(
        self, name: Any, distributed: DistributedLoop, inputs: ChunkInputs
    ) -> list[Tensor]:
        if name not in self.functions:
            self.build_chunk(name, distributed, inputs)
        return self.functions[name](*inputs.flat())

    def build_chunk(self, name: Any, distributed: DistributedLoop, inputs: ChunkInputs) -> None:
        """Builds what ``run_chunk`` calls."""
        as_written, sizes = self.as_written, [len(group) for group in inputs]

        def function(*args: Tensor) -> list[Tensor]:
            return as_written.run_chunk(name, distributed, ChunkInputs(*in_groups(args, sizes)))

        first, n_sequences, _ = sizes
        self.build_once(name, function, inputs.flat(), first, first + n_sequences)

    def call(
        self,
        name: Any,
        graph: Callable[..., list[Tensor]],
        args: Sequence[Tensor],
        n_symbolic: int = 0,
    ) -> list[Tensor]:
        if isinstance(graph, WrittenGraph):
            return graph(*args)
        if name not in self.functions:
            self.build_once(name, graph, args, 0, n_symbolic)
        return self.functions[name](*args)

    def begin_kernels(self, with_grad: bool) -> None:
        """Begins to compile all kernels: those of the reverse loop while the forward is built."""
        start = self.backend.start_kernel
        loops = [self.forward, self.reverse] if with_grad else [self.evaluate]
        with TRACING:
            for block in (block for loop in loops for block in loop.blocks):
                if start is not None and isinstance(block, ScanBlock):
                    start(block)

    def build_at_once(self, build: Callable[[], Any]) -> None:
        """Compiles the functions that are built by ``build`` at the same time.

        If it fails there are none: each will be built for itself, which tells why it cannot be.
        """
        at_once = self.backend.at_once
        if at_once is None or self.plan.signature.x[0].device.type != "cpu":
            return
        with TRACING, without_garbage_collection(), suppress(Exception):
            self._unfinished = {}
            try:
                with at_once():
                    build()
                self.compiled.value += len(self._unfinished)
                self.functions |= self._unfinished
            finally:
                self._unfinished = None

    def build_once(
        self, name: Any, function: Function, args: Sequence[Tensor], first: int, last: int
    ) -> None:
        """Builds a function for tensors like ``args``; axis 0 of args[first:last] is symbolic."""
        with TRACING, without_garbage_collection(), unseen_by_tools():
            if name in self.functions:  # another thread was first
                return
            self._sources.append(function)
            built = self._built(function, args, first, last)
            if self._unfinished is None:
                self.functions[name] = built
                self.compiled.value += 1
            else:
                self._unfinished[name] = built

    def _built(self, function: Function, args: Sequence[Tensor], first: int, last: int) -> Function:
        build = self.backend.build
        if build is None:
            return function
        likes = [(tuple(arg.shape), arg.dtype, arg.device) for arg in args]

        def built_for(example_steps: int) -> _Program:
            steps: Any = None

            def built() -> Function:
                nonlocal steps
                mode, steps = symbolic_steps(example_steps)
                with mode:
                    examples = [
                        torch.empty(
                            (steps, *shape[1:]) if first <= i < last else shape,
                            dtype=dtype,
                            device=device,
                        )
                        for i, (shape, dtype, device) in enumerate(likes)
                    ]
                return build(function, examples, mode)

            program = built_somewhere(built)
            if first < last and is_pinned(steps):
                raise RuntimeError(
                    f"an operation fixed the number of steps to {steps} while it was compiled, as "
                    "antialiased resizing and a few others do outside the recurrence, but one "
                    "compilation is for every K. backend='eager' runs it."
                )
            most_steps = most_indexed(steps, example_steps) if first < last else math.inf
            return _Program(program, most_steps)

        program = built_for(self.plan.loss.example_steps)
        if program.most_steps == math.inf:
            return program.run
        return _ByLength([program], built_for, first, self.compiled)


class Builder(Phases):
    """Builds what the phases call, and calls none of it: results are tensors without data."""

    def __init__(self, programs: Programs) -> None:
        own = programs.as_written
        super().__init__(own.plan, own.backend, own.forward, own.evaluate, own.reverse)
        self.programs = programs

    def run_chunk(
        self, name: Any, distributed: DistributedLoop, inputs: ChunkInputs
    ) -> list[Tensor]:
        self.programs.build_chunk(name, distributed, inputs)
        loop, steps = distributed.loop, inputs.sequences[0].shape[0]
        stacked = [(steps, *value_of(node).shape) for node in loop.stacked]
        summed = [value_of(node).shape for node in loop.summed]
        return [*inputs.carries, *_without_data([*loop.stacked, *loop.summed], [*stacked, *summed])]

    def call(
        self,
        name: Any,
        graph: Callable[..., list[Tensor]],
        args: Sequence[Tensor],
        n_symbolic: int = 0,
    ) -> list[Tensor]:
        if isinstance(graph, WrittenGraph):
            return graph.without_data(args)
        assert isinstance(graph, fx.GraphModule)
        self.programs.build_once(name, graph, args, 0, n_symbolic)
        results, steps = graph.graph.output_node().args[0], args[0].shape[0]
        shapes = [
            [size if isinstance(size, int) else steps for size in value_of(node).shape]
            for node in results
        ]
        return _without_data(results, shapes)


def _without_data(nodes: Sequence[Node], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes, of the dtypes of the nodes' values."""
    values = map(value_of, nodes)
    with FakeTensorMode():
        return [
            torch.empty(shape, dtype=value.dtype, device=value.device)
            for value, shape in zip(values, shapes, strict=True)
        ]


class _Program(NamedTuple):
    """What was compiled, and the most steps that it is for."""

    run: Function
    most_steps: float


@dataclass
class _ByLength:
    """Programs of one function: Inductor chooses indices of 32 bits where those of a K fit in.

    ``axis_of`` is the argument whose axis 0 has K steps.
    """

    programs: list[_Program]
    built_for: Callable[[int], _Program]
    axis_of: int
    compiled: Count

    def __call__(self, *args: Tensor) -> list[Tensor]:
        return self._for(args[self.axis_of].shape[0])(*args)

    def _for(self, steps: int) -> Function:
        for run, most_steps in self.programs:
            if steps <= most_steps:
                return run
        with TRACING, without_garbage_collection(), unseen_by_tools():
            most_steps = self.programs[-1].most_steps
            if steps > most_steps:  # else another thread was first
                # With this as the example, what was too large for 32 bits gets more.
                self.programs.append(self.built_for(2 * int(most_steps)))
                self.compiled.value += 1
        return self._for(steps)
