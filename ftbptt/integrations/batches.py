"""Batches of sequences through windows of TBPTT, for a module that takes chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._loss import Loss
from .._make_segment import make_train_segment
from .._step import as_step
from .._trees import tree_leaves, tree_map
from ..training.chunk import Chunk, TimeAxes
from ..training.cursor import Span
from ..training.segments import Segments
from ..training.window_stats import WindowStats
from ..training.windows import Truncation, Window

Tree = Any


class OneStep(nn.Module):
    """``module(x[1, ...], state) -> (out[1, ...], state)``, time on any axis, as one time step."""

    def __init__(self, module: nn.Module, time_dim: int) -> None:
        super().__init__()
        self.module, self.time_dim = module, time_dim

    def forward(self, x_t: Tree, state: Tree) -> tuple[Tree, Tree]:
        found = self.module(tree_map(lambda leaf: leaf.unsqueeze(self.time_dim), x_t), state)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(
                f"forward: expected forward(x, state) to return (out, state), found "
                f"{type(found).__name__}. Return the state beside the output."
            )
        out, state = found
        return tree_map(self._squeezed, out), state

    def _squeezed(self, leaf: Tensor) -> Tensor:
        if not -leaf.dim() <= self.time_dim < leaf.dim() or leaf.shape[self.time_dim] != 1:
            raise ValueError(
                f"forward: out has shape {list(leaf.shape)} for a chunk of one step, so its axis "
                f"{self.time_dim} (time_dim) is not time. Return one output for each step of x."
            )
        return leaf.squeeze(self.time_dim)


class Batches:
    """What a module and a loss make of a batch.

    Inside, time is axis 0 and the rows are axis 1, wherever the caller has them.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        time_dim: int,
        backend: str,
        recompute: bool,
    ) -> None:
        self.time_dim = time_dim
        # A class of its own, so that messages name the caller's.
        named = type(type(module).__name__, (OneStep,), {})
        self._step: nn.Module = named(module, time_dim)
        self._flags_time = 0 if time_dim == 0 else 1
        self.train_segment = make_train_segment(
            as_step(self._step), self._time_first_loss(loss), backend=backend, time_dim=0,
            recompute=recompute,
        )  # fmt: skip
        self._names = [name for name, _ in self._step.named_parameters()]
        self._modules = list(self._step.modules())
        self._segments: dict[tuple[int, bool], Segments] = {}
        self._predicting: Segments | None = None

    def _time_first_loss(self, loss: Loss) -> Loss:
        def run(out: Tree, y: Tree) -> Tensor:
            value = loss(self.time_back(out), self.time_back(y))
            if isinstance(value, Tensor) and value.dim() == 2:
                return value.movedim(self._flags_time, 0)
            return value

        return run

    def is_current(self) -> bool:
        """Whether the module still has the parts that this was made of."""
        return self._modules == list(self._step.modules()) and self._names == list(self.params())

    def params(self) -> dict[str, Tensor]:
        """The module's own tensors, as the segment names them."""
        return dict(self._step.named_parameters())

    def segments(self, context: int, scaled: bool) -> Segments:
        """As windows need them; ``scaled``: the loss is multiplied by what a scaler says."""
        key = context, scaled
        if key not in self._segments:
            self._segments[key] = Segments(self.train_segment, context=context, scaled=scaled)
        return self._segments[key]

    def chunk(self, item: Any) -> Chunk:
        """A batch with time in front, checked.

        Raises TypeError for another structure, ValueError for lengths that differ.
        """
        if not isinstance(item, Chunk):
            if not (isinstance(item, (tuple, list)) and 2 <= len(item) <= 4):
                many = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
                raise TypeError(
                    "batch: expected (x, y), (x, y, reset) or (x, y, reset, mask), found a "
                    f"{type(item).__name__}{many}. Return one of these from chunk(batch)."
                )
            item = Chunk(*item)
        TimeAxes(self.time_dim, self.time_dim).length(Chunk(item.x, item.y))
        reset, mask = (
            flags if flags is None or flags.dim() < 2 else flags.movedim(self._flags_time, 0)
            for flags in (item.reset, item.mask)
        )
        chunk = Chunk(self.time_first(item.x), self.time_first(item.y), reset, mask)
        TimeAxes().length(chunk)
        return chunk

    def time_first(self, tree: Tree) -> Tree:
        return _moved(tree, self.time_dim, 0)

    def time_back(self, tree: Tree) -> Tree:
        return _moved(tree, 0, self.time_dim)

    # -- forward alone --------------------------------------------------------------------------

    def evaluate(
        self, params: Tree, state: Tree, chunk: Chunk, k: int
    ) -> Iterator[tuple[Tree, Chunk, WindowStats, Tree]]:
        """``(out, chunk, measured, state)`` of each ``k`` steps, without a gradient."""
        yield from self._forward(self.segments(0, False), params, state, chunk, k)

    def predict(self, params: Tree, state: Tree, chunk: Chunk, k: int) -> tuple[Tree, Tree]:
        """``(out, state)`` of all steps, without a target or a loss."""
        if self._predicting is None:
            own = self.train_segment.variant(loss=lambda _: _no_loss, context=0)
            self._predicting = Segments(own)
        found = list(self._forward(self._predicting, params, state, chunk, k))
        outs = [out for out, *_ in found]
        return self.time_back(tree_map(lambda *parts: torch.cat(parts), *outs)), found[-1][-1]

    def _forward(
        self, segments: Segments, params: Tree, state: Tree, chunk: Chunk, k: int
    ) -> Iterator[tuple[Tree, Chunk, WindowStats, Tree]]:
        axes = TimeAxes()
        steps = axes.steps(chunk)
        for start in range(0, steps, k):
            part = axes.cut(chunk, start, start + k)
            result = segments.evaluate(params, state, part)
            state = result.state
            weight, tokens = segments.weigh(part, state, 0)
            measured = WindowStats(result.loss, weight, axes.steps(part), tokens)
            yield result.out, part, measured, state


class Trained(NamedTuple):
    """What a window gave. ``chunk`` has the steps that ``out`` is of, time in front."""

    grads: Tree
    measured: WindowStats
    out: Tree
    chunk: Chunk


class Windows:
    """The windows of one batch, each run when it is asked for, so by the newest parameters.

    ``state`` is the state after the last step that was run; after the last window, that behind
    the batch. Windows do not reach back to before the batch.
    """

    def __init__(
        self,
        batches: Batches,
        truncation: Truncation,
        params: Tree,
        state: Tree,
        chunk: Chunk,
        *,
        scaled: bool,
    ) -> None:
        self._segments = batches.segments(truncation.context, scaled)
        self._truncation, self._params, self._chunk = truncation, params, chunk
        self.state = state

    def run(self, scale: Callable[[], Tensor | None]) -> Iterator[Trained]:
        """``scale()`` is what the next loss is to be multiplied by, or None."""
        segments, truncation, chunk = self._segments, self._truncation, self._chunk
        axes = segments.axes(chunk.x)
        total = axes.steps(chunk)
        carried, position = self.state, 0  # the state before step `position`
        index = done = 0
        while (window := truncation.cut(truncation.window(index), total)) is not None:
            index += 1
            if not truncation.learns(window):
                continue
            span = Span(window, position, axes.cut(chunk, position, window.end))
            keep = truncation.window(index).warm  # where the next window starts
            state, kept = segments.warm_up(self._params, carried, span, keep)
            part = segments.trained_part(span)
            within = keep - window.start if window.start < keep < window.end else None
            factor = scale()
            result, own = segments.train(self._params, state, part, within, factor)
            if min(keep, window.end) > window.start:
                kept = own
            carried, position, done = kept, min(keep, window.end), window.end
            self.state = result.state
            weight, tokens = segments.weigh(part, result.state, segments.context)
            loss = result.loss if factor is None else result.loss / factor
            measured = WindowStats(loss, weight, window.end - window.start, tokens)
            yield Trained(result.grads, measured, result.out, part)
        if done < total:  # steps after the last window with a loss: the state goes over them
            rest = Span(Window(index, total, total, total), position,
                        axes.cut(chunk, position, total))  # fmt: skip
            self.state, _ = segments.warm_up(self._params, carried, rest, total)


def _moved(tree: Tree, axis: int, to: int) -> Tree:
    """The tree (None: no target) with an axis of its leaves elsewhere."""
    return None if tree is None else tree_map(lambda leaf: leaf.movedim(axis, to), tree)


def _no_loss(out: Tree, y: Tree) -> Tensor:
    return torch.zeros((), device=tree_leaves(out)[0].device)


def zero_state(module: nn.Module, x: Tree) -> Tree:
    """zero_state : module(x, state), x[1, ...] -> zeros like the state that it returns

    What ``state=None`` means to torch's own layers. Raises TypeError if the module does not take
    None, ValueError if it starts from something else than zeros then.
    """
    training = [own for own in module.modules() if own.training]
    module.eval()  # so that a trial run draws no random number and changes no statistics
    try:
        with torch.no_grad():
            try:
                first = module(x, None)
            except Exception as error:
                raise TypeError(
                    f"initial_state: forward(x, None) failed ({type(error).__name__}: {error}), so "
                    "there is no state to start from. Define initial_state(self, x) -> state."
                ) from error
            zeros = tree_map(torch.zeros_like, first[1])
            again = module(x, zeros)
    finally:
        for own in training:
            own.training = True
    pairs = zip(tree_leaves(first), tree_leaves(again), strict=True)
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs):
        raise ValueError(
            "initial_state: forward(x, None) starts from another state than zeros. Define "
            "initial_state(self, x) -> state, which says from which."
        )
    return zeros
