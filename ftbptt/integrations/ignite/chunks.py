"""Chunks of a model that takes chunks: compiled where that gives the same results, else eager.

The first chunk of each kind (shapes, number of steps, with or without a state) runs eagerly, and
its results are used. If its Python only called operations, it also runs compiled with the same
parameters, and loss, state and gradients are compared. They differ for a model that looks at
several steps at once (convolution, attention or a norm over time): it is no step-wise recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..._messages import first_line
from ..._trees import tree_flatten, tree_leaves, tree_map
from ..._warnings import warn
from ...contract.as_step import as_step
from ...contract.step import Step
from ...segment.make_segment import make_train_segment
from ...training.data.chunk import Chunk
from ...training.segments import Segments
from ...training.updates.learner import scale_of
from .agreement import Outcome, difference, is_conclusive, not_stepwise
from .eager_chunk import EagerChunk, Forward, loss_reads_parameters
from .noise import CONSTANTS, ConstantNoise, Trial, noise_difference
from .surroundings import SideEffects, Snapshot, Surroundings, first_change

Tree = Any
_MOST_VERDICTS = 64
_MAX_CHANGES = 4  # of the surroundings: after more, nothing is compiled any longer


class ChunkOutput(NamedTuple):
    """The loss, detached; the state after the chunk, and the one saved before ``save_at``."""

    loss: Tensor
    state: Tree
    saved: Tree


@dataclass(frozen=True)
class _Verdict:
    """How chunks of a kind run: compiled, or eagerly.

    ``reached``: the parameters that the loss depends on; the others get no gradient, not zero.
    ``start``: the state to start from if a compiled chunk comes without one.
    ``reason``: why the kind is not compiled, if a comparison failed.
    """

    compiled: bool
    reached: frozenset[str] = frozenset()
    start: Tree = None
    reason: str | None = None


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
        self.model, self.loss, self.dim, self.backend = model, loss, dim, backend
        self._initial, self._autocast, self._scaler = initial, autocast, scaler
        self._step: Step | None = None
        self.eager_reason: str | None = None  # why nothing is compiled
        self._eager = EagerChunk(model, loss, dim, initial, self._row_axis, autocast)
        self._surroundings: Surroundings | None = None
        self._snapshot: Snapshot | None = None
        self._changes = self._impure_calls = 0
        self._segments: Segments | None = None
        self._params: dict[str, nn.Parameter] = {}
        self._verdicts: dict[Any, _Verdict] = {}
        self._reached: frozenset[str] = frozenset()  # by chunks that came with a state
        self._warned_without_state = False
        if backend == "eager":
            self.eager_reason = "backend='eager'"

    def run(self, chunk: Chunk, state: Tree, save_at: int | None, weight: float) -> ChunkOutput:
        """Runs the chunk and adds ``weight`` times its (scaled) gradient to ``.grad``."""
        if self.eager_reason is None:
            reason = self._check_surroundings(chunk)
            if reason is not None:
                self._give_up(reason)
        if self.eager_reason is not None:
            return self._run_eager(chunk, state, save_at, weight)
        kind = self._kind(chunk, state, save_at)
        verdict = self._verdicts.get(kind)
        if verdict is None:
            return self._run_first(kind, chunk, state, save_at, weight)
        if not verdict.compiled:
            self._warn_without_state(verdict.reason)
            return self._run_eager(chunk, state, save_at, weight)
        start = verdict.start if state is None else state
        outcome = self._run_compiled(chunk, start, save_at)
        for name in verdict.reached:
            grad = outcome.grads[name]
            assert grad is not None
            _add_grad(self._params[name], _with_strides_of(self._params[name], grad), weight)
        return ChunkOutput(outcome.loss, outcome.state, outcome.saved)

    # -- what a chunk depends on ------------------------------------------------------------------

    def _check_surroundings(self, chunk: Chunk) -> str | None:
        """Starts over if the model's surroundings changed; returns why nothing can be compiled."""
        if self._surroundings is None:
            if not isinstance(self.model, nn.Module):
                return f"it is no nn.Module but a {type(self.model).__name__}"
            try:
                self._surroundings = Surroundings(self.model, self.loss)
            except Exception as error:
                return f"what its functions refer to cannot be read ({first_line(error)})"
        obstacle = self._surroundings.obstacle()
        if obstacle is not None:
            return obstacle
        for name, tree in (("x", chunk.x), ("y", chunk.y)):
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(tree)):
                return f"{name} requires a gradient, and only parameters get one in a segment"
        try:
            snapshot = self._surroundings.snapshot()
        except Exception as error:  # the caller's objects may raise anything
            return f"what its functions refer to cannot be read ({first_line(error)})"
        if snapshot == self._snapshot:
            return None
        if self._snapshot is not None:
            self._changes += 1
            if self._changes > _MAX_CHANGES:
                change = first_change(self._snapshot, snapshot)
                return f"{change} is changed again and again from outside"
        self._snapshot = snapshot
        return self._make_segments()

    def _make_segments(self) -> str | None:
        """Makes segments of the current model, and drops all verdicts; returns why it cannot."""
        self._verdicts.clear()
        self._params = dict(self.model.named_parameters())
        if self.dim not in (0, 1):
            return f"dim={self.dim}, and only time on axis 0 or 1 is compiled"
        try:
            self._step = as_step(self.model, sequence=True, batch_first=self.dim == 1)
            self._segments = Segments(
                make_train_segment(
                    self._step,
                    self.loss,
                    # "auto" would fall back to an eager segment; the model itself is faster.
                    backend="fused" if self.backend == "auto" else self.backend,
                    time_dim=self.dim,
                    initial_state=self._initial,
                ),
                scaled=self._scaler is not None,
                autocast=self._autocast,
            )
        except (TypeError, ValueError) as error:
            return first_line(error)
        return None

    def _kind(self, chunk: Chunk, state: Tree, save_at: int | None) -> Any:
        """What a verdict is valid for."""

        def shapes(tree: Tree) -> Any:
            leaves, spec = tree_flatten(tree)
            return spec, tuple(
                (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)
                for leaf in leaves
            )

        device = _device(chunk)
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        inputs = tuple(map(shapes, (chunk.x, chunk.y, chunk.reset, state)))
        if state is not None:
            return inputs, save_at, cast, None
        assert self._surroundings is not None
        # The model may read its initial state from a buffer.
        buffers = self._surroundings.versions(parameters=False)
        return inputs, save_at, cast, tuple((where, v) for where, (_, v) in buffers.items())

    def _row_axis(self, leaf: Tensor) -> int:
        if self._step is None:
            try:
                self._step = as_step(self.model, sequence=True, batch_first=self.dim == 1)
            except (TypeError, ValueError):
                return 0
        return self._step.row_axis(leaf)

    # -- eager ------------------------------------------------------------------------------------

    def _run_eager(
        self, chunk: Chunk, state: Tree, save_at: int | None, weight: float
    ) -> ChunkOutput:
        forward = self._eager.forward(chunk, state, save_at)
        self._backward(forward, weight)
        return ChunkOutput(forward.loss.detach(), forward.state, forward.saved)

    def _backward(self, forward: Forward, weight: float) -> None:
        loss = forward.loss if weight == 1 else forward.loss * weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    # -- compiled ---------------------------------------------------------------------------------

    def _run_compiled(self, chunk: Chunk, state: Tree, save_at: int | None) -> Outcome:
        assert self._segments is not None
        scale = scale_of(self._scaler, next(iter(self._params.values())).device)
        result, saved = self._segments.train(self._params, state, chunk, save_at, scale)
        grads = {name: result.grads[name] for name, p in self._params.items() if p.requires_grad}
        return Outcome(result.loss, result.state, None if save_at is None else saved, grads)

    def _give_up(self, reason: str) -> None:
        name = type(self.model).__name__
        self.eager_reason = reason
        self._verdicts.clear()
        self._segments = None
        if self.backend != "auto":
            raise RuntimeError(
                f"backend: {self.backend!r} cannot run {name}: {reason}. backend='auto' runs such "
                "a model as it is written."
            )
        warn(
            f"ftbptt: {name} runs as it is written, not compiled: {reason}. The results are those "
            "of Ignite's own trainer; backend='eager' turns this warning off.",
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

    # -- the first chunk of a kind ----------------------------------------------------------------

    def _run_first(
        self, kind: Any, chunk: Chunk, state: Tree, save_at: int | None, weight: float
    ) -> ChunkOutput:
        """Runs the chunk eagerly, then decides how chunks of this kind run."""
        assert self._surroundings is not None
        effects = SideEffects(self._surroundings)
        with effects.watching():
            forward = self._eager.forward(chunk, state, save_at)
        grads = self._backward_alone(forward, weight)
        output = ChunkOutput(forward.loss.detach(), forward.state, forward.saved)
        if effects.description is not None:
            self._impure_calls += 1
            # The first call may legitimately build a cache for later ones: masks, positions.
            if self._impure_calls > 1:
                self._give_up(f"{effects.description}, which a compiled chunk would not repeat")
            return output
        if any(grad is not None and grad.layout != torch.strided for grad in grads.values()):
            self._give_up("it has sparse gradients")
            return output
        if loss_reads_parameters(forward):
            self._give_up("the loss itself uses parameters, beside the output of the model")
            return output
        reason = None
        try:
            expected = Outcome(
                output.loss, _detached(forward.state), _detached(forward.saved, save_at), grads
            )
            if is_conclusive(expected):
                reason = self._judge(kind, chunk, state, save_at, expected, effects.drew)
        except Exception as error:
            reason = first_line(error)
        if reason is not None:
            self._give_up(reason)
        return output

    def _backward_alone(self, forward: Forward, weight: float) -> dict[str, Tensor | None]:
        """The gradients of this chunk alone; ``weight`` times them are added to ``.grad``."""
        before = {name: p.grad for name, p in self._params.items()}
        for p in self._params.values():
            p.grad = None
        try:
            self._backward(forward, 1)
        finally:
            grads = {name: p.grad for name, p in self._params.items()}
            for name, p in self._params.items():
                p.grad, grad = before[name], grads[name]
                if grad is not None:
                    _add_grad(p, grad, weight)
        return grads

    def _judge(
        self,
        kind: Any,
        chunk: Chunk,
        state: Tree,
        save_at: int | None,
        expected: Outcome,
        drew: bool,
    ) -> str | None:
        """Sets the verdict on chunks of this kind; returns the reason to compile none at all."""
        reached = frozenset(name for name, grad in expected.grads.items() if grad is not None)
        start = tree_map(torch.zeros_like, expected.state) if state is None else state
        with _random_state_preserved():
            result = self._run_compiled(chunk, start, save_at)
            if drew:
                trials = self._with_constant_noise(chunk, state, start, save_at)
                reason = noise_difference(trials, expected, self._cast(chunk))
            else:
                reason = difference(result, expected, self._cast(chunk))
                if reason is not None and state is not None:
                    reason = not_stepwise(reason)
        if state is not None:
            if reason is None:
                self._reached |= reached
                self._verdicts[kind] = _Verdict(True, reached)
            return reason
        # Without a state a difference says nothing about other chunks: the model may start from
        # something else than zeros. A gradient of zero may be that of a learned initial state.
        if len(self._verdicts) >= _MOST_VERDICTS:  # as where a buffer is written for each batch
            self._verdicts.pop(next(iter(self._verdicts)))
        unsure = [name for name in reached - self._reached if not result.grads[name].any()]  # type: ignore[union-attr]
        self._verdicts[kind] = _Verdict(reason is None and not unsure, reached, start, reason)
        return None

    def _cast(self, chunk: Chunk) -> torch.dtype | None:
        """The dtype of autocast; None if it is off."""
        device = _device(chunk)
        if self._autocast is None and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self._autocast

    def _with_constant_noise(
        self, chunk: Chunk, state: Tree, start: Tree, save_at: int | None
    ) -> Iterator[Trial]:
        """The chunk in one call and step by step, its random numbers each of ``CONSTANTS``."""
        params = {name: p for name, p in self._params.items() if p.requires_grad}

        def run(state: Tree, each_step: bool, noise: ConstantNoise) -> Outcome:
            with noise:
                forward = self._eager.forward(chunk, state, save_at, each_step=each_step)
                grads = torch.autograd.grad(forward.loss, [*params.values()], allow_unused=True)
            return Outcome(
                forward.loss.detach(),
                _detached(forward.state),
                _detached(forward.saved, save_at),
                dict(zip(params, grads, strict=True)),
            )

        for constants in CONSTANTS:
            chunk_noise, stepwise_noise = ConstantNoise(*constants), ConstantNoise(*constants)
            yield Trial(
                run(state, False, chunk_noise),
                run(start, True, stepwise_noise),
                chunk_noise,
                stepwise_noise,
            )


def _add_grad(p: Tensor, grad: Tensor, weight: float) -> None:
    """Accumulates into ``p.grad`` as autograd does."""
    grad = grad if weight == 1 else grad * weight
    if p.grad is None:
        p.grad = grad
    else:
        with torch.no_grad():
            p.grad += grad


def _with_strides_of(p: Tensor, grad: Tensor) -> Tensor:
    """The gradient in its parameter's memory layout, which some optimizers rely on."""
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


def _detached(state: Tree, save_at: int | None = -1) -> Tree:
    """The state without its graph; None if there is no step to save it at."""
    if save_at is None:
        return None
    for leaf in tree_leaves(state):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"its hidden state holds a {type(leaf).__name__}, which is no tensor")
    return tree_map(Tensor.detach, state)


def _device(chunk: Chunk) -> str:
    leaves = [leaf for leaf in tree_leaves(chunk.x) if isinstance(leaf, Tensor)]
    return leaves[0].device.type if leaves else "cpu"


def _random_state_preserved() -> Any:
    """A context that restores torch's generators, of all GPUs as well, at its end."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng(range(torch.cuda.device_count()) if initialized else [])
