"""The phases of a segment: prepare, forward, loss, reverse, finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._memory import resolved
from ..backends import Backend
from ..compiler.blocks import DistributedLoop
from ..compiler.loss import ANY_STEPS, LossProgram
from ..compiler.plan import Plan
from ..compiler.run_loop import ChunkInputs, run_loop
from ..contract.output import EarlyGradients

# Consecutive steps that run at once; None: all of the segment's.
Chunk = slice | None


class LoopInputs(NamedTuple):
    """What the loops of a segment read."""

    fixed: list[Tensor]  # parameters, buffers, captured tensors, initial state
    x: list[Tensor]  # with reset and mask
    targets: list[Tensor]  # what the loss reads besides the outputs: y and mask
    carries: list[Tensor]


class LoopOutputs(NamedTuple):
    """What the loops of a segment return; no ``grads`` and ``d_probes`` without a gradient."""

    grads: list[Tensor]  # of the trained invariants
    carries: list[Tensor]
    loss: Tensor
    out: list[Tensor]
    d_probes: list[Tensor]  # at every step


class Forward(NamedTuple):
    """What the forward loop returns, and what both loops read."""

    invariants: list[Tensor]
    x: list[Tensor]
    carries: list[Tensor]
    out: list[Tensor]
    saved: list[list[Tensor]]  # by chunk

    def last_read(self, chunk: Chunk, d_outs: list[Tensor]) -> list[Tensor]:
        """The reverse loop's sequences in the last chunk left, whose saved values are let go."""
        return [*_cut(self.x, chunk), *self.saved.pop(), *_cut(d_outs, chunk)]


@dataclass(eq=False)
class Phases:
    """The loops of a plan on a backend, and what a segment does with them.

    Here each function runs as it is: within a program that is compiled as a whole.
    """

    plan: Plan
    backend: Backend
    forward: DistributedLoop
    evaluate: DistributedLoop
    reverse: DistributedLoop

    def run_chunk(
        self, name: Any, distributed: DistributedLoop, inputs: ChunkInputs
    ) -> list[Tensor]:
        """One chunk of a loop: ``[*final carries, *stacked, *sums]``."""
        steps = inputs.sequences[0].shape[0]
        finals, stacked, sums = run_loop(distributed, self.backend.run_scan, inputs, steps)
        return [*finals, *stacked, *sums]

    def call(
        self,
        name: Any,
        graph: Callable[..., list[Tensor]],
        args: Sequence[Tensor],
        n_symbolic: int = 0,
    ) -> list[Tensor]:
        """Axis 0 of the first ``n_symbolic`` arguments is that of the steps, for any K."""
        return graph(*args)

    def run_phases(
        self,
        inputs: LoopInputs,
        chunks: Sequence[Chunk],
        loss: LossProgram,
        with_grad: bool,
        early: EarlyGradients | None = None,
    ) -> LoopOutputs:
        """All chunks forward, the loss, all chunks in reverse."""
        plan = self.plan
        forward = self.run_forward(inputs, chunks, with_grad)
        carries, out = forward.carries, forward.out
        n_symbolic = len(out) + len(inputs.targets) if loss.key is ANY_STEPS else 0
        args = [*out, *inputs.targets, *loss.captured]
        value, *d_outs = self.call(("loss", with_grad, loss.key), loss.graph, args, n_symbolic)
        if not with_grad:
            return LoopOutputs([], carries, value, out, [])
        grads, d_probes = self.run_reverse(chunks, forward, d_outs, value, early)
        if plan.finish is not None:
            d_prepared = plan.of_prepared(grads, len(inputs.fixed))
            grads += self.call("finish", plan.finish, [*inputs.fixed, *d_prepared])
        return LoopOutputs(grads, carries, value, out, d_probes)

    def run_forward(self, inputs: LoopInputs, chunks: Sequence[Chunk], with_grad: bool) -> Forward:
        """With what is prepared for it; nothing is saved if not ``with_grad``."""
        fixed, x, _, carries = inputs
        preparation = self.plan.preparation
        prepared = [] if preparation is None else self.call("prepare", preparation.prepare, fixed)
        invariants = [*fixed, *prepared]
        name, loop = ("forward", self.forward) if with_grad else ("evaluate", self.evaluate)
        n_carries, n_outs = len(carries), self.plan.loops.outs
        outs: list[list[Tensor]] = []
        saved: list[list[Tensor]] = []
        for chunk in chunks:
            result = self.run_chunk(name, loop, ChunkInputs(invariants, _cut(x, chunk), carries))
            carries = result[:n_carries]
            # As the loop stacks them: a loss may not read a pending conjugate as real numbers.
            outs.append([*map(resolved, result[n_carries : n_carries + n_outs])])
            saved.append(result[n_carries + n_outs :])
        return Forward(invariants, x, carries, _joined(outs), saved)

    def run_reverse(
        self,
        chunks: Sequence[Chunk],
        forward: Forward,
        d_outs: list[Tensor],
        loss: Tensor,
        early: EarlyGradients | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradient of each trained invariant, and that of each probe at every step."""
        _, sums, probes = self.reverse_chunks(chunks, forward, d_outs)
        return sums, _joined(probes)

    def reverse_chunks(
        self, chunks: Sequence[Chunk], forward: Forward, d_outs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        """(the gradients of the carries, sums of those of the invariants, probes' by chunk)

        The last chunk comes first; what it saved is taken from the list, so that it is freed.
        """
        loop, invariants = self.reverse, forward.invariants
        d_carries = self.plan.loops.zero_gradients(forward.x[0].device)
        n_carries, n_probes = len(d_carries), len(loop.loop.stacked)
        sums: list[Tensor] = []
        probes: list[list[Tensor]] = []
        for chunk in reversed(chunks):
            sequences = forward.last_read(chunk, d_outs)
            given = ChunkInputs(invariants, sequences, d_carries)
            result = self.run_chunk("reverse", loop, given)
            d_carries = result[:n_carries]
            probes.insert(0, result[n_carries : n_carries + n_probes])
            chunk_sums = result[n_carries + n_probes :]
            sums = [p + q for p, q in zip(sums, chunk_sums, strict=True)] if sums else chunk_sums
        return d_carries, sums, probes


def _cut(leaves: list[Tensor], chunk: Chunk) -> list[Tensor]:
    """The chunk of each sequence."""
    return leaves if chunk is None else [leaf[chunk] for leaf in leaves]


def _joined(by_chunk: list[list[Tensor]]) -> list[Tensor]:
    """The sequences of all chunks."""
    if len(by_chunk) == 1:
        return by_chunk[0]
    return [torch.cat(chunks) for chunks in zip(*by_chunk, strict=True)]
