"""Runs batches of sequences in TBPTT windows, for a module that takes chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._autograd_graph import leaves_behind
from ..._messages import describe_type
from ..._trees import Tree, keystr, tree_flatten_with_path, tree_leaves, tree_map
from ...contract.as_step import as_step
from ...contract.layout import Layout
from ...contract.loss import Loss
from ...segment.make_segment import make_train_segment
from ...training.data.chunk import Chunk, TimeAxes, as_chunk, as_tensors, error_prefix
from ...training.data.cursor import Cursor, Place, Span
from ...training.data.prefetch import Mover
from ...training.data.source import Arrays
from ...training.data.windows import Truncation, Window, kept_within
from ...training.segments import Segments
from ...training.updates.window_stats import WindowStats


class OneStep(nn.Module):
    """A module for chunks as a module for one time step, which has no axis of time."""

    def __init__(self, module: nn.Module, time_dim: int) -> None:
        super().__init__()
        self.module, self.time_dim = module, time_dim

    def forward(self, x_t: Tree, state: Tree) -> tuple[Tree, Tree]:
        result = self.module(tree_map(lambda leaf: leaf.unsqueeze(self.time_dim), x_t), state)
        out, state = _pair(result)
        return tree_map(self._without_time, out), state

    def _without_time(self, leaf: Tensor) -> Tensor:
        if not -leaf.dim() <= self.time_dim < leaf.dim() or leaf.shape[self.time_dim] != 1:
            raise ValueError(
                f"forward: out has shape {list(leaf.shape)} for a chunk of one step, so its axis "
                f"{self.time_dim} (time_dim) is not time. Return one output for each step of x."
            )
        return leaf.squeeze(self.time_dim)


def _pair(result: Any) -> tuple[Tree, Tree]:
    """``(out, state)`` as ``forward`` returned it. Raises TypeError for anything else."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"forward: expected (out, state), found {describe_type(result)}. Return the output and "
            "the state after the last step as a pair."
        )
    out, state = result
    for path, leaf in tree_flatten_with_path(out)[0]:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"forward: expected tensors in the output that it returns, found "
                f"{describe_type(leaf)} at out{keystr(path)}. Leave it out."
            )
    for path, leaf in tree_flatten_with_path(state)[0]:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"forward: expected tensors in the state that it returns, found "
                f"{describe_type(leaf)} at state{keystr(path)}. Return the state after the last "
                "step, also where it was given None."
            )
    return out, state


def _call_chunk(one_step: Any, x: Tree, state: Tree) -> tuple[Tree, Tree]:
    """The own ``forward`` of the module in a :class:`OneStep`; here time is axis 0."""
    layout = Layout(one_step.time_dim)
    out, state = _pair(one_step.module(layout.time_back(x), state))
    return layout.time_first(out), state


class Batches:
    """The segments of a module and a loss, and the conversion of batches to their layout.

    Here time is always axis 0 and the batch axis 1, wherever the caller has them. ``context`` is
    that of the windows that are trained on.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        time_dim: int,
        context: int,
        backend: str,
        recompute: bool,
    ) -> None:
        self.layout = Layout(time_dim)
        # A subclass with the name of the caller's class, which error messages show.
        step_class = type(type(module).__name__, (OneStep,), {})
        self._step: nn.Module = step_class(module, time_dim)
        self._row_layout = Layout(0 if time_dim == 0 else 1)  # of reset, mask and losses per row
        self._axes = replace(TimeAxes.of(self._row_layout), x=time_dim, y=time_dim)
        self.train_segment = make_train_segment(
            replace(as_step(self._step), call_chunk=_call_chunk), self._time_first_loss(loss),
            backend=backend, time_dim=0, recompute=recompute,
        )  # fmt: skip
        self._parameter_names = [name for name, _ in self._step.named_parameters()]
        self._modules = list(self._step.modules())
        self.segments = Segments(self.train_segment, context=context)
        self._predicting = Segments(self.train_segment.variant(loss=lambda _: _no_loss))

    def _time_first_loss(self, loss: Loss) -> Loss:
        def time_first_loss(out: Tree, y: Tree) -> Tensor:
            value = loss(self.layout.time_back(out), self.layout.time_back(y))
            if isinstance(value, Tensor) and value.dim() == 2:
                return self._row_layout.time_first(value)
            return value

        return time_first_loss

    def is_current(self) -> bool:
        """Whether the module still has the submodules and parameters that this was built from."""
        return self._modules == list(self._step.modules()) and self._parameter_names == list(
            self.params()
        )

    def params(self) -> dict[str, Tensor]:
        """The module's parameters, by the segment's names for them."""
        return dict(self._step.named_parameters())

    def chunk(self, item: Any) -> Chunk:
        """Checks a batch and moves time to the front.

        Raises TypeError for another structure, ValueError if the numbers of steps differ.
        """
        if not (isinstance(item, (tuple, list)) and 2 <= len(item) <= 4):
            raise TypeError(
                "batch: expected (x, y) or (x, y, reset, mask), found "
                f"{describe_type(item)}. Return one of these from chunk(batch)."
            )
        with error_prefix("batch"):
            item = as_chunk(item)
        item = as_tensors(item)
        if not self._axes.length(item):
            raise ValueError("batch: has 0 steps. Leave empty sequences out.")
        reset, mask = (
            None if flags is None else self._row_layout.flags_first(flags)
            for flags in (item.reset, item.mask)
        )
        return Chunk(self.layout.time_first(item.x), self.layout.time_first(item.y), reset, mask)

    # -- without gradients ----------------------------------------------------------------------

    def evaluate(self, state: Tree, chunk: Chunk, k: int) -> Iterator[EvaluatedPart]:
        """Runs a batch in parts of ``k`` steps."""
        return _evaluate(self.segments, self.params(), state, chunk, k)

    def predict(self, state: Tree, chunk: Chunk, k: int) -> tuple[Tree, Tree]:
        """``(out, state)`` of all steps, without a target or a loss."""
        chunk = chunk._replace(y=chunk.mask)  # which says how many values a loss must have
        parts = list(_evaluate(self._predicting, self.params(), state, chunk, k))
        out = tree_map(lambda *leaves: torch.cat(leaves), *(part.out for part in parts))
        return self.layout.time_back(out), parts[-1].state


class EvaluatedPart(NamedTuple):
    """The results of consecutive steps of a batch, time first, and the state after them."""

    out: Tree
    y: Tree
    stats: WindowStats
    state: Tree


def _evaluate(
    segments: Segments, params: Tree, state: Tree, chunk: Chunk, k: int
) -> Iterator[EvaluatedPart]:
    axes = TimeAxes()
    for start in range(0, axes.steps(chunk), k):
        part = axes.cut(chunk, start, start + k)
        result = segments.evaluate(params, state, part)
        state = result.state
        _, weight, steps, tokens = segments.count(part, state, 0)
        stats = WindowStats(result.loss, weight, steps, tokens)
        yield EvaluatedPart(result.out, part.y, stats, state)


class TrainedWindow(NamedTuple):
    """The results of a window, time first."""

    grads: Tree
    stats: WindowStats
    out: Tree
    y: Tree


class Windows:
    """The windows of one batch, each run when it is asked for, with the current parameters.

    ``state`` is the state after the last step run; once all windows are done, the state after the
    batch. Windows never start before the first step of the batch.
    """

    def __init__(
        self, segments: Segments, truncation: Truncation, params: Tree, state: Tree, chunk: Chunk
    ) -> None:
        self._segments, self._truncation, self._params = segments, truncation, params
        self.state, self._chunk = state, chunk

    def run(self, next_scale: Callable[[], Tensor | None]) -> Iterator[TrainedWindow]:
        """Runs the windows; ``next_scale()`` is the factor for the next loss, or None."""
        segments, truncation, params = self._segments, self._truncation, self._params
        axes = segments.axes(self._chunk.x)
        cursor = Cursor(Arrays(self._chunk, axes), truncation, segments.axes, [], Mover(None))
        place = Place(0, 0, 0, self.state)
        while (span := cursor.take(place)) is not None:
            window, next_start = span.window, truncation.next_start(span.window)
            chunk, state, next_state = segments.warm_up(params, place.state, span, next_start)
            keep = kept_within(window, next_start)
            result, state_within = segments.train(params, state, chunk, keep, next_scale())
            if next_start > window.start:
                next_state = state_within
            self.state = result.state
            place = Place(0, window.index + 1, next_start, next_state, window.end)
            _, weight, steps, tokens = segments.count(chunk, result.state, segments.context)
            stats = WindowStats(result.loss, weight, steps, tokens)
            yield TrainedWindow(result.grads, stats, result.out, chunk.y)
        end = axes.steps(self._chunk)
        if place.end < end:  # steps after the last window with a loss still advance the state
            rest = axes.cut(self._chunk, place.position, end)
            span = Span(Window(place.index, end, end, end), place.position, rest)
            _, self.state, _ = segments.warm_up(params, place.state, span, end)


def _no_loss(out: Tree, mask: Tensor | None) -> Tensor:
    if mask is not None:
        return mask.new_zeros(mask.shape, dtype=torch.float32)
    return torch.zeros((), device=tree_leaves(out)[0].device)


def zero_state(module: nn.Module, x: Tree) -> Tree:
    """zero_state : module(x, state), x[1, ...] -> zeros with the structure of its state

    The state that ``state=None`` means to torch's own layers. Raises TypeError if the module does
    not take None, ValueError if it then starts from something other than zeros, or from parameters.
    """
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()  # so that these trial runs draw no random numbers and update no statistics
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = tree_map(Tensor.clone, x)  # made in inference mode, it could not be saved
            try:
                from_none = module(x, None)
            except Exception as error:
                raise TypeError(
                    f"initial_state: forward(x, None) failed ({type(error).__name__}: {error}), so "
                    f"there is no state to start from. {_remedy(module, x)}"
                ) from error
            zeros = tree_map(torch.zeros_like, _pair(from_none)[1])
            from_zeros = module(x, zeros)
    finally:
        for submodule in training:
            submodule.training = True
    from_start, from_zero = (leaves_behind(tree_leaves(r)) for r in (from_none, from_zeros))
    trained = from_start.keys() - from_zero.keys()
    if names := [name for name, p in module.named_parameters() if id(p) in trained]:
        raise ValueError(
            f"initial_state: forward(x, None) computes the state to start from with {names[0]}, "
            "which would not be trained, since windows start from a detached state. Define "
            "initial_state(self, x) -> state, of constants; make_train_segment(..., "
            "initial_state=) trains a start, in a loop of your own or in train_stream."
        )
    pairs = zip(tree_leaves(from_none), tree_leaves(from_zeros), strict=True)
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs):
        raise ValueError(
            "initial_state: forward(x, None) starts from another state than zeros. Define "
            "initial_state(self, x) -> state, which says from which."
        )
    return zeros


def _remedy(module: nn.Module, x: Tree) -> str:
    """What helps where ``forward(x, None)`` failed: a cast, if it does not fail after that."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    others = [(path, leaf) for path, leaf in tree_flatten_with_path(x)[0] if leaf.dtype != dtype]
    floating = [(path, leaf) for path, leaf in others if leaf.is_floating_point()]
    if dtype is not None and others:
        wrong = {id(leaf) for _, leaf in floating or others}  # whole numbers may be tokens
        path, first = (floating or others)[0]
        with suppress(Exception):
            module(tree_map(lambda leaf: leaf.to(dtype) if id(leaf) in wrong else leaf, x), None)
            return (
                f"x{keystr(path)} is {first.dtype}, but the module is {dtype}: cast one of them, "
                f"such as x.to({dtype}) in chunk(batch)."
            )
    return "Define initial_state(self, x) -> state."


def check_like(state: Tree, start: Tree) -> Tree:
    """The carried state; ValueError if it does not fit the batch."""
    leaves, start_leaves = tree_leaves(state), tree_flatten_with_path(start)[0]
    if len(leaves) != len(start_leaves):
        raise ValueError(
            f"carry: the state that forward returns has {len(leaves)} leaves, but initial_state "
            f"has {len(start_leaves)}. Return the same structure from both."
        )
    for leaf, (path, like) in zip(leaves, start_leaves, strict=True):
        if leaf.shape != like.shape:
            raise ValueError(
                f"carry: state{keystr(path)} is {list(leaf.shape)} after the batch before, but "
                f"this batch begins with {list(like.shape)}. Give batches with the same sequences "
                "in the same order (drop_last=True, shuffle=False), or carry=False."
            )
    return state
