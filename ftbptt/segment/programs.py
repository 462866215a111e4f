"""The compiled functions of a plan on a backend, each built when it is first needed.

They are pure functions of tensors with time as axis 0, of a chunk of K consecutive steps, and hold
for any K, so that a compiler can trace them with K as a symbol:

    prepare(*inputs)                                   -> [*prepared]        once per segment
    forward(*invariants, *x, *state)                   -> [*state, *out, *saved]
    loss(*out, *y)                                     -> [loss, *d_out]
    reverse(*invariants, *x, *saved, *d_out, *d_state) -> [*d_state, *d_probes, *d_invariants]
    finish(*inputs, *d_prepared)                       -> [*d_inputs]        once per segment

A segment whose steps are never cut into chunks is one function instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._compat.tracing import is_pinned, symbolic_steps, unseen_by_tools
from ..backends import Backend
from ..backends.base import Function
from ..compiler.distribute import DistributedLoop, distribute
from ..compiler.graphs import value_of
from ..compiler.plan import Plan
from ..compiler.program import run_loop
from ..compiler.tracing.trace import TRACING
from ..compiler.windows import WindowedLoop, split_windows
from .compile_cache import built_somewhere


class Programs:
    """Functions on tensors, by name. A function that is built serves every K."""

    def __init__(self, plan: Plan, backend: Backend, count_compile: Callable[[], None]) -> None:
        self.plan, self.backend, self.count_compile = plan, backend, count_compile
        self.functions: dict[Any, Function] = {}
        # Keeps the blocks alive that operators refer to by number.
        self._sources: list[Function] = []
        self.forward = distribute(plan.loops.forward, backend.fusion)
        self.evaluate = distribute(plan.loops.evaluate, backend.fusion)
        self.reverse = distribute(plan.loops.reverse, backend.fusion)

    @cached_property
    def windowed(self) -> WindowedLoop:
        """The reverse loop, split for a sliding window."""
        return split_windows(self.plan.loops.reverse)

    def zero_gradients(self, device: torch.device) -> list[Tensor]:
        """The gradient of the state after the last step: zero, since the segment is cut there."""
        return [
            torch.zeros(value_of(node).shape, dtype=value_of(node).dtype, device=device)
            for node in self.plan.loops.reverse.carries
        ]

    def run_chunk(
        self,
        name: Any,
        distributed: DistributedLoop,
        invariants: list[Tensor],
        sequences: list[Tensor],
        carries: list[Tensor],
    ) -> list[Tensor]:
        """One chunk of a loop: ``[*final carries, *stacked, *sums]``."""
        n_inv, n_seq = len(invariants), len(sequences)
        if name not in self.functions:

            def function(*args: Tensor) -> list[Tensor]:
                invariants, sequences = args[:n_inv], args[n_inv : n_inv + n_seq]
                finals, stacked, sums = run_loop(
                    distributed, self.backend.run_scan, invariants, sequences,
                    args[n_inv + n_seq :], sequences[0].shape[0],
                )  # fmt: skip
                return [*finals, *stacked, *sums]

            self.build_once(
                name, function, [*invariants, *sequences, *carries], n_inv, n_inv + n_seq
            )
        return self.functions[name](*invariants, *sequences, *carries)

    def call(
        self, name: Any, graph: Function, args: Sequence[Tensor], *, symbolic: bool = False
    ) -> list[Tensor]:
        """``symbolic``: axis 0 of all arguments is that of the steps, and stands for any K."""
        if name not in self.functions:
            self.build_once(name, graph, args, 0, len(args) if symbolic else 0)
        return self.functions[name](*args)

    def build_once(
        self, name: Any, function: Function, args: Sequence[Tensor], first: int, last: int
    ) -> None:
        """Builds a function for tensors like ``args``; axis 0 of args[first:last] is symbolic."""
        with TRACING, unseen_by_tools():
            if name not in self.functions:  # another thread may have been first
                self._sources.append(function)
                self.functions[name] = self._built(function, args, first, last)
                self.count_compile()

    def _built(self, function: Function, args: Sequence[Tensor], first: int, last: int) -> Function:
        if self.backend.build is None:
            return function
        build = self.backend.build
        steps: Any = None

        def built() -> Function:
            nonlocal steps
            mode, steps = symbolic_steps(self.plan.loss.example_steps)
            with mode:
                examples = [
                    torch.empty(
                        (steps, *a.shape[1:]) if first <= i < last else a.shape,
                        dtype=a.dtype,
                        device=a.device,
                    )
                    for i, a in enumerate(args)
                ]
            return build(function, examples, mode)

        program = built_somewhere(built)
        if first < last and is_pinned(steps):
            raise RuntimeError(
                f"an operation fixed the number of steps to {steps} while it was compiled, as "
                "antialiased resizing and a few others do outside the recurrence, but one "
                "compilation is for every K. backend='eager' runs it."
            )
        return program
