"""Chunks of a model that takes chunks: compiled where that gives the same results, else eager.

The first chunk of each kind (shapes, number of steps, with or without a state) runs eagerly, and
its results are used. If its Python only called operations, it also runs compiled with the same
parameters, and loss, state and gradients are compared. They differ for a model that looks at
several steps at once (convolution, attention or a norm over time): it is no step-wise recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..._messages import first_line
from ..._trees import Tree, tree_flatten, tree_leaves
from ..._warnings import warn
from ...training.data.chunk import Chunk
from .agreement import is_conclusive
from .compiled_chunk import CompiledChunk, NotCompiled
from .eager_chunk import EagerChunk, Forward, loss_reads_parameters
from .gradients import add_gradients, backward, backward_alone
from .surroundings import SideEffects, Snapshot, Surroundings, first_change
from .verdict import FirstChunk, Verdict

_MOST_VERDICTS = 64
_MAX_CHANGES = 4  # of the surroundings: after more, nothing is compiled any longer


class ChunkOutput(NamedTuple):
    """The loss, detached; the state after the chunk, and the one saved before ``save_at``."""

    loss: Tensor
    state: Tree
    saved: Tree


class Chunks:
    """Runs chunks, and adds their gradients to ``.grad`` as ``backward()`` does."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tree, Tree], Tensor],
        dim: int,
        *,
        backend: str,
        initial: Tree = None,
        autocast: torch.dtype | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.model, self.loss, self.backend, self._scaler = model, loss, backend, scaler
        self._eager = EagerChunk(model, loss, dim, initial, autocast)
        self._compile = partial(
            CompiledChunk, model, loss, dim, backend=backend, initial=initial, autocast=autocast,
            scaler=scaler,
        )  # fmt: skip
        self._only_eager = backend == "eager"
        self._surroundings: Surroundings | None = None
        self._snapshot: Snapshot | None = None
        self._changes = self._impure_calls = 0
        self._compiled: CompiledChunk | None = None
        self._verdicts: dict[Any, Verdict] = {}
        self._reached: frozenset[str] = frozenset()  # by compiled chunks that came with a state
        self._warned_without_state = False

    def run(self, chunk: Chunk, state: Tree, save_at: int | None, weight: float) -> ChunkOutput:
        """Runs the chunk and adds ``weight`` times its (scaled) gradient to ``.grad``."""
        compiled = None
        if not self._only_eager:
            try:
                compiled = self._up_to_date(chunk)
            except NotCompiled as obstacle:
                self._give_up(obstacle)
        if compiled is None:
            return self._run_eager(chunk, state, save_at, weight)
        kind = self._kind(chunk, state, save_at)
        verdict = self._verdicts.get(kind)
        if verdict is None:
            first = FirstChunk(chunk, state, save_at, self._eager, compiled)
            return self._run_first(kind, first, weight)
        if not verdict.compiled:
            self._warn_without_state(verdict.reason)
            return self._run_eager(chunk, state, save_at, weight)
        outcome = compiled.run(chunk, verdict.start if state is None else state, save_at)
        grads = {name: outcome.grads[name] for name in verdict.reached}
        add_gradients(compiled.params, grads, weight)
        return ChunkOutput(outcome.loss, outcome.state, outcome.saved)

    def _run_eager(
        self, chunk: Chunk, state: Tree, save_at: int | None, weight: float
    ) -> ChunkOutput:
        forward = self._eager.forward(chunk, state, save_at)
        backward(forward.loss, weight, self._scaler)
        return _output(forward)

    def _run_first(self, kind: Any, first: FirstChunk, weight: float) -> ChunkOutput:
        """Runs the chunk eagerly, then decides how chunks of this kind run."""
        assert self._surroundings is not None
        effects = SideEffects(self._surroundings)
        with effects.watching():
            forward = self._eager.forward(first.chunk, first.state, first.save_at)
        grads = backward_alone(first.compiled.params, forward.loss, weight, self._scaler)
        try:
            self._decide(kind, first, forward, grads, effects)
        except NotCompiled as obstacle:
            self._give_up(obstacle)
        return _output(forward)

    def _decide(
        self,
        kind: Any,
        first: FirstChunk,
        forward: Forward,
        grads: dict[str, Tensor | None],
        effects: SideEffects,
    ) -> None:
        """Sets the verdict on chunks of this kind, if this one is enough for it."""
        if effects.description is not None:
            self._impure_calls += 1
            # The first call may legitimately build a cache for later ones: masks, positions.
            if self._impure_calls > 1:
                raise NotCompiled(f"{effects.description}, which a compiled chunk would not repeat")
            return
        if any(grad is not None and grad.layout != torch.strided for grad in grads.values()):
            raise NotCompiled("it has sparse gradients")
        if loss_reads_parameters(forward):
            raise NotCompiled("the loss itself uses parameters, beside the output of the model")
        try:
            expected = first.outcome(forward, grads)
            if not is_conclusive(expected):
                return
            verdict = first.judge(expected, effects.drew, self._reached)
        except NotCompiled:
            raise
        except Exception as error:
            raise NotCompiled(first_line(error)) from error
        if first.state is not None:
            self._reached |= verdict.reached
        elif len(self._verdicts) >= _MOST_VERDICTS:  # as where a buffer is written for each batch
            self._verdicts.pop(next(iter(self._verdicts)))
        self._verdicts[kind] = verdict

    # -- what a chunk depends on ------------------------------------------------------------------

    def _up_to_date(self, chunk: Chunk) -> CompiledChunk:
        """The compiled chunk of the model; made anew, without verdicts, after any change.

        Raises NotCompiled.
        """
        if not isinstance(self.model, nn.Module):
            raise NotCompiled(f"it is no nn.Module but a {type(self.model).__name__}")
        try:  # the caller's objects may raise anything
            if self._surroundings is None:
                self._surroundings = Surroundings(self.model, self.loss)
            obstacle = self._surroundings.obstacle()
            snapshot = self._surroundings.snapshot()
        except Exception as error:
            raise NotCompiled(
                f"what its functions refer to cannot be read ({first_line(error)})"
            ) from error
        if obstacle is not None:
            raise NotCompiled(obstacle)
        for name, tree in (("x", chunk.x), ("y", chunk.y)):
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(tree)):
                raise NotCompiled(
                    f"{name} requires a gradient, and only parameters get one in a segment"
                )
        if self._compiled is not None and snapshot == self._snapshot:
            return self._compiled
        if self._snapshot is not None:
            self._changes += 1
            if self._changes > _MAX_CHANGES:
                change = first_change(self._snapshot, snapshot)
                raise NotCompiled(f"{change} is changed again and again from outside")
        self._snapshot = snapshot
        self._verdicts.clear()
        self._compiled = self._compile()
        return self._compiled

    def _kind(self, chunk: Chunk, state: Tree, save_at: int | None) -> Any:
        """What a verdict is valid for."""
        cast = self._eager.autocast_dtype(chunk)
        inputs = tuple(map(_types, (chunk.x, chunk.y, chunk.reset, state)))
        if state is not None:
            return inputs, save_at, cast, None
        assert self._surroundings is not None
        # The model may read its initial state from a buffer.
        buffers = self._surroundings.versions(parameters=False)
        return inputs, save_at, cast, tuple((where, v) for where, (_, v) in buffers.items())

    # -- what the user is told --------------------------------------------------------------------

    def _give_up(self, obstacle: NotCompiled) -> None:
        name = type(self.model).__name__
        self._only_eager = True
        self._verdicts.clear()
        self._compiled = None
        if self.backend != "auto":
            raise RuntimeError(
                f"backend: {self.backend!r} cannot run {name}: {obstacle}. backend='auto' runs "
                "such a model as it is written."
            ) from obstacle.__cause__
        warn(
            f"ftbptt: {name} runs as it is written, not compiled: {obstacle}. The results are "
            "those of Ignite's own trainer; backend='eager' turns this warning off.",
            RuntimeWarning,
        )

    def _warn_without_state(self, reason: str | None) -> None:
        """Warns, once, that chunks without a state stay eager although others are compiled."""
        if reason is None or self._warned_without_state:
            return
        self._warned_without_state = True
        warn(
            f"ftbptt: {type(self.model).__name__} runs chunks without a hidden state as written, "
            f"not compiled: from a hidden state of zeros, {reason}. The results are those of "
            "Ignite's own trainer; backend='eager' turns this warning off.",
            RuntimeWarning,
        )


def _output(forward: Forward) -> ChunkOutput:
    return ChunkOutput(forward.loss.detach(), forward.state, forward.saved)


def _types(tree: Tree) -> Any:
    """The structure of a tree, and the types of its leaves."""
    leaves, spec = tree_flatten(tree)
    return spec, tuple(
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves
    )
