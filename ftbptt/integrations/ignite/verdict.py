"""Whether a compiled chunk gives the results of the model as it is written."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._trees import Tree, tree_leaves, tree_map
from ...training.data.chunk import Chunk
from .agreement import Outcome, difference, not_stepwise
from .compiled_chunk import CompiledChunk, NotCompiled
from .eager_chunk import EagerChunk, Forward
from .noise import CONSTANTS, ConstantNoise, Trial, noise_difference


@dataclass(frozen=True)
class Verdict:
    """How chunks of a kind run: compiled, or eagerly.

    ``reached``: the parameters that the loss depends on; the others get no gradient, not zero.
    ``start``: the state to start from if a compiled chunk comes without one.
    ``reason``: why the kind is not compiled, if a comparison failed.
    """

    compiled: bool
    reached: frozenset[str]
    start: Tree = None
    reason: str | None = None


@dataclass(frozen=True)
class FirstChunk:
    """The first chunk of a kind, to be run in several ways."""

    chunk: Chunk
    state: Tree
    save_at: int | None
    eager: EagerChunk
    compiled: CompiledChunk

    def outcome(self, forward: Forward, grads: dict[str, Tensor | None]) -> Outcome:
        """Raises NotCompiled for a state that is not of tensors."""
        saved = None if self.save_at is None else _detached(forward.saved)
        return Outcome(forward.loss.detach(), _detached(forward.state), saved, grads)

    def judge(self, expected: Outcome, drew: bool, reached_before: Set[str]) -> Verdict:
        """Compares a compiled run with ``expected``, the eager one.

        ``drew``: whether that one drew random numbers. ``reached_before``: the parameters that the
        loss of compiled chunks with a state depended on. Raises NotCompiled if no chunk of the
        model can be compiled.
        """
        reached = frozenset(name for name, grad in expected.grads.items() if grad is not None)
        start = tree_map(torch.zeros_like, expected.state) if self.state is None else self.state
        cast = self.eager.autocast_dtype(self.chunk)
        with _random_state_preserved():
            result = self.compiled.run(self.chunk, start, self.save_at)
            if drew:
                reason = noise_difference(self._with_constant_noise(start), expected, cast)
            else:
                reason = difference(result, expected, cast)
                if reason is not None and self.state is not None:
                    reason = not_stepwise(reason)
        if self.state is not None:
            if reason is not None:
                raise NotCompiled(reason)
            return Verdict(True, reached)
        # Without a state a difference says nothing about other chunks: the model may start from
        # something else than zeros. A gradient of zero may be that of a learned initial state.
        unsure = [name for name in reached - reached_before if not result.grads[name].any()]  # type: ignore[union-attr]
        return Verdict(reason is None and not unsure, reached, start, reason)

    def _with_constant_noise(self, start: Tree) -> Iterator[Trial]:
        """The chunk in one call and step by step, its random numbers each of ``CONSTANTS``."""
        params = {name: p for name, p in self.compiled.params.items() if p.requires_grad}

        def run(state: Tree, each_step: bool, noise: ConstantNoise) -> Outcome:
            with noise:
                forward = self.eager.forward(self.chunk, state, self.save_at, each_step=each_step)
                grads = torch.autograd.grad(forward.loss, [*params.values()], allow_unused=True)
            return self.outcome(forward, dict(zip(params, grads, strict=True)))

        for constants in CONSTANTS:
            chunk_noise, stepwise_noise = ConstantNoise(*constants), ConstantNoise(*constants)
            yield Trial(
                run(self.state, False, chunk_noise),
                run(start, True, stepwise_noise),
                chunk_noise,
                stepwise_noise,
            )


def _detached(state: Tree) -> Tree:
    """The state without its graph."""
    for leaf in tree_leaves(state):
        if not isinstance(leaf, Tensor):
            raise NotCompiled(f"its hidden state holds a {type(leaf).__name__}, which is no tensor")
    return tree_map(Tensor.detach, state)


def _random_state_preserved() -> Any:
    """A context that restores torch's generators, of all GPUs as well, at its end."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng(range(torch.cuda.device_count()) if initialized else [])
