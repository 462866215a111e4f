"""Chunks of a model that takes chunks: compiled where that gives the same, else as written.

A chunk of each kind (shapes, number of steps, with or without a state) first runs as written; that
is the chunk that counts. If its Python did nothing but call operations, it also runs compiled, from
the same parameters, and loss, state and gradients are compared: a model that looks at several steps
at once (convolution, attention or a norm over time) is no step-wise recurrence, and differs there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from .._make_segment import make_train_segment
from .._messages import first_line
from .._step import Step, as_step
from .._trees import tree_flatten, tree_leaves, tree_map
from ..training.chunk import Chunk
from ..training.segments import Segments
from .agreement import Outcome, can_be_judged, disagreement
from .eager_chunk import EagerChunk, Forward, reads_leaf
from .noise import CONSTANTS, ConstantNoise, Trial, noise_differs
from .surroundings import Marks, SideEffects, Surroundings, difference

Tree = Any
_CHANGES = 4  # of the surroundings, after which compiling for each is given up


class ChunkOutput(NamedTuple):
    """The loss, detached; the state after the chunk, and before the step that was to be kept."""

    loss: Tensor
    state: Tree
    kept: Tree


@dataclass(frozen=True)
class _Verdict:
    """How a chunk of a kind runs: compiled, from ``start`` if there is no state; or as written.

    ``reached``: the parameters that the loss depends on; the others have no gradient, not zero.
    """

    compiled: bool
    reached: frozenset[str] = frozenset()
    start: Tree = None


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
        self.reason: str | None = None  # why nothing is compiled
        self._eager = EagerChunk(model, loss, dim, initial, self._row_axis, autocast)
        self._around: Surroundings | None = None
        self._marks: Marks | None = None
        self._changes = self._impure = 0
        self._segments: Segments | None = None
        self._params: dict[str, nn.Parameter] = {}
        self._verdicts: dict[Any, _Verdict] = {}
        self._reached: frozenset[str] = frozenset()  # by a chunk that was given a state
        if backend == "eager":
            self.reason = "backend='eager'"

    def run(self, chunk: Chunk, state: Tree, keep: int | None, weight: float) -> ChunkOutput:
        """The chunk, and ``weight`` times its gradient, scaled by the scaler, into ``.grad``."""
        if self.reason is None:
            reason = self._look_around(chunk)
            if reason is not None:
                self._give_up(reason)
        if self.reason is not None:
            return self._as_written(chunk, state, keep, weight)
        key = self._kind(chunk, state, keep)
        verdict = self._verdicts.get(key)
        if verdict is None:
            return self._judged(key, chunk, state, keep, weight)
        if not verdict.compiled:
            return self._as_written(chunk, state, keep, weight)
        start = verdict.start if state is None else state
        outcome = self._run_compiled(chunk, start, keep)
        for name in verdict.reached:
            grad = outcome.grads[name]
            assert grad is not None
            _add_grad(self._params[name], _lying_as(self._params[name], grad), weight)
        return ChunkOutput(outcome.loss, outcome.state, outcome.kept)

    # -- what a chunk depends on ------------------------------------------------------------------

    def _look_around(self, chunk: Chunk) -> str | None:
        """Notices what changed besides the arguments: why nothing can be compiled, or None."""
        if self._around is None:
            if not isinstance(self.model, nn.Module):
                return f"it is no nn.Module but a {type(self.model).__name__}"
            try:
                self._around = Surroundings(self.model, self.loss)
            except Exception as error:
                return f"what its functions refer to cannot be read ({first_line(error)})"
        hindrance = self._around.hindrance()
        if hindrance is not None:
            return hindrance
        for name, tree in (("x", chunk.x), ("y", chunk.y)):
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(tree)):
                return f"{name} requires a gradient, and only parameters get one in a segment"
        try:
            marks = self._around.read()
        except Exception as error:  # of the caller's objects
            return f"what its functions refer to cannot be read ({first_line(error)})"
        if marks == self._marks:
            return None
        if self._marks is not None:
            self._changes += 1
            if self._changes > _CHANGES:
                return f"{difference(self._marks, marks)} is changed again and again from outside"
        self._marks = marks
        return self._begin_anew()

    def _begin_anew(self) -> str | None:
        """A segment of the model as it is now, of which nothing is known yet."""
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
                    # Where compiling fails, the model as written is the better way out.
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

    def _kind(self, chunk: Chunk, state: Tree, keep: int | None) -> Any:
        """What a verdict holds for."""

        def shapes(tree: Tree) -> Any:
            leaves, spec = tree_flatten(tree)
            return spec, tuple(
                (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)
                for leaf in leaves
            )

        device = _device(chunk)
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        given = tuple(map(shapes, (chunk.x, chunk.y, chunk.reset, state)))
        if state is not None:
            return given, keep, cast, None
        assert self._around is not None
        # The state to start with may come from a buffer.
        buffers = self._around.versions(parameters=False)
        return given, keep, cast, tuple((place, mark[1]) for place, mark in buffers.items())

    def _row_axis(self, leaf: Tensor) -> int:
        if self._step is None:
            try:
                self._step = as_step(self.model, sequence=True, batch_first=self.dim == 1)
            except (TypeError, ValueError):
                return 0
        return self._step.row_axis(leaf)

    # -- as written -------------------------------------------------------------------------------

    def _as_written(
        self, chunk: Chunk, state: Tree, keep: int | None, weight: float
    ) -> ChunkOutput:
        found = self._eager.forward(chunk, state, keep)
        self._backward(found, weight)
        return ChunkOutput(found.loss.detach(), found.state, found.kept)

    def _backward(self, found: Forward, weight: float) -> None:
        loss = found.loss if weight == 1 else found.loss * weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    # -- compiled ---------------------------------------------------------------------------------

    def _run_compiled(self, chunk: Chunk, state: Tree, keep: int | None) -> Outcome:
        assert self._segments is not None
        scale = None
        if self._scaler is not None:
            device = next(iter(self._params.values())).device
            scale = self._scaler.scale(torch.ones((), device=device))
        result, kept = self._segments.train(self._params, state, chunk, keep, scale)
        loss = result.loss if scale is None else result.loss / scale
        grads = {name: result.grads[name] for name, p in self._params.items() if p.requires_grad}
        return Outcome(loss, result.state, None if keep is None else kept, grads)

    def _give_up(self, reason: str) -> None:
        name = type(self.model).__name__
        self.reason = reason
        self._verdicts.clear()
        self._segments = None
        if self.backend != "auto":
            raise RuntimeError(
                f"backend: {self.backend!r} cannot run {name}: {reason}. backend='auto' runs such "
                "a model as it is written."
            )
        warnings.warn(
            f"ftbptt: {name} runs as it is written, not compiled: {reason}. The results are those "
            "of Ignite's own trainer; backend='eager' says that this is meant.",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- the first chunk of a kind ----------------------------------------------------------------

    def _judged(
        self, key: Any, chunk: Chunk, state: Tree, keep: int | None, weight: float
    ) -> ChunkOutput:
        """The chunk as written; and what is to be thought of compiling such chunks."""
        assert self._around is not None
        effects = SideEffects(self._around)
        with effects.watching():
            found = self._eager.forward(chunk, state, keep)
        before = {name: p.grad for name, p in self._params.items()}
        for p in self._params.values():
            p.grad = None
        try:
            self._backward(found, 1)
        finally:
            grads = {name: p.grad for name, p in self._params.items()}
            for name, p in self._params.items():
                p.grad, own = before[name], grads[name]
                if own is not None:
                    _add_grad(p, own, weight)
        output = ChunkOutput(found.loss.detach(), found.state, found.kept)
        reason = effects.words
        if reason is not None:
            self._impure += 1
            # The first call may well build what later ones use: masks, positions.
            if self._impure > 1:
                self._give_up(f"{reason}, which a compiled chunk would not repeat")
            return output
        if any(grad is not None and grad.layout != torch.strided for grad in grads.values()):
            self._give_up("it has sparse gradients")
            return output
        if reads_leaf(found):
            self._give_up("the loss itself uses parameters, beside the output of the model")
            return output
        try:
            expected = Outcome(
                output.loss, _detached(found.state), _detached(found.kept, keep), grads
            )
            if can_be_judged(expected):
                reason = self._judge(key, chunk, state, keep, expected, effects.drew)
        except Exception as error:
            reason = first_line(error)
        if reason is not None:
            self._give_up(reason)
        return output

    def _judge(
        self, key: Any, chunk: Chunk, state: Tree, keep: int | None, expected: Outcome, drew: bool
    ) -> str | None:
        """The verdict on chunks of this kind; or the reason to compile none."""
        reached = frozenset(name for name, grad in expected.grads.items() if grad is not None)
        start = tree_map(torch.zeros_like, expected.state) if state is None else state
        with _random_numbers_kept():
            found = self._run_compiled(chunk, start, keep)
            if drew:
                runs = self._with_constant_noise(chunk, state, start, keep)
                words = noise_differs(runs, expected, self._cast(chunk))
            else:
                words = disagreement(found, expected, self._cast(chunk))
        if state is not None:
            if words is None:
                self._reached |= reached
                self._verdicts[key] = _Verdict(True, reached)
            return words
        # From zeros or not; a gradient of zero may be that of a learned state to start with.
        unsure = [name for name in reached - self._reached if not found.grads[name].any()]  # type: ignore[union-attr]
        self._verdicts[key] = _Verdict(words is None and not unsure, reached, start)
        return None

    def _cast(self, chunk: Chunk) -> torch.dtype | None:
        """The type that autocast computes in, if it does."""
        device = _device(chunk)
        if self._autocast is None and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self._autocast

    def _with_constant_noise(
        self, chunk: Chunk, state: Tree, start: Tree, keep: int | None
    ) -> Iterator[Trial]:
        """The chunk as one and step by step, its random numbers constants: each of them in turn."""
        params = {name: p for name, p in self._params.items() if p.requires_grad}

        def run(state: Tree, each_step: bool, noise: ConstantNoise) -> Outcome:
            with noise:
                found = self._eager.forward(chunk, state, keep, each_step=each_step)
                grads = torch.autograd.grad(found.loss, list(params.values()), allow_unused=True)
            return Outcome(
                found.loss.detach(),
                _detached(found.state),
                _detached(found.kept, keep),
                dict(zip(params, grads, strict=True)),
            )

        for constants in CONSTANTS:
            whole, stepwise = ConstantNoise(*constants), ConstantNoise(*constants)
            yield Trial(run(state, False, whole), run(start, True, stepwise), whole, stepwise)


def _add_grad(p: Tensor, grad: Tensor, weight: float) -> None:
    """As autograd does it."""
    grad = grad if weight == 1 else grad * weight
    if p.grad is None:
        p.grad = grad
    else:
        with torch.no_grad():
            p.grad += grad


def _lying_as(p: Tensor, grad: Tensor) -> Tensor:
    """A gradient lies in memory as its parameter does: some optimizers count on it."""
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


def _detached(state: Tree, keep: int | None = -1) -> Tree:
    """The state, or None for one that was not kept."""
    if keep is None:
        return None
    for leaf in tree_leaves(state):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"its hidden state holds a {type(leaf).__name__}, which is no tensor")
    return tree_map(Tensor.detach, state)


def _device(chunk: Chunk) -> str:
    leaves = [leaf for leaf in tree_leaves(chunk.x) if isinstance(leaf, Tensor)]
    return leaves[0].device.type if leaves else "cpu"


def _random_numbers_kept() -> Any:
    """What is drawn within is as if it had not been."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng(range(torch.cuda.device_count()) if initialized else [])
