"""The calls of ``train_segment`` that the steps of a window are made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._consecutive_calls import Following
from .._layout import Layout, SharedLayout, broadcast_rows
from .._loss import Loss
from .._output import EarlyGradients, SegmentOutput
from .._segment import TrainSegment
from .._trees import in_order_of, tree_leaves, tree_map
from ..distributed.shares import share_of
from .chunk import Chunk, TimeAxes, check_leaves, error_prefix
from .cursor import Span
from .rows import count_rows, join_rows, split_rows, valid_steps

Tree = Any
_AS_IT_IS = nullcontext()
_ADVANCE = 256  # steps at most that run at once where no gradient is asked for

# A variant compiles anew, so it is kept as long as the segment it was made from.
_variants: WeakKeyDictionary[TrainSegment, dict[Any, TrainSegment]] = WeakKeyDictionary()


def variant(train_segment: TrainSegment, states: bool, scaled: bool, context: int) -> TrainSegment:
    """A segment's variant, made once. What it returns is kept, so its memory is never reused."""
    key = (states, scaled, context)
    if key == (False, False, train_segment.context) and not train_segment.reuses_output:
        return train_segment
    made = _variants.setdefault(train_segment, {})
    if key not in made:
        loss = _scaled if scaled else None
        made[key] = train_segment.variant(states=states, loss=loss, context=context)
    return made[key]


def _scaled(loss: Loss) -> Loss:
    """The loss times a factor that comes with ``y``: what a gradient scaler wants graded.

    In float32 at least: what overflows is to be a gradient, which the scaler makes no step with.
    """

    def run(out: Tree, y: tuple[Tree, Tensor] | tuple[Tensor]) -> Tensor:
        *targets, scale = y
        value = loss(out, targets[0] if targets else None)
        wide = torch.promote_types(value.dtype, torch.float32)
        return value.to(wide) * scale[(0,) * scale.dim()]

    return run


class Segments:
    """A segment as windows need it: forward alone, and graded with a state from within kept."""

    def __init__(
        self,
        train_segment: Callable[..., SegmentOutput],
        *,
        context: int = 0,
        scaled: bool = False,
        autocast: torch.dtype | None = None,
        time_dim: int | None = None,
    ) -> None:
        if not callable(train_segment):
            raise TypeError(
                "train_segment: expected what make_train_segment returns, or a function of its "
                f"contract, found {type(train_segment).__name__}."
            )
        if not isinstance(train_segment, TrainSegment) and (context or scaled):
            name = "context" if context else "scaler"
            raise TypeError(f"{name}: needs what make_train_segment returns as train_segment.")
        # That itself, or the one that a function around it is made of, as by random_truncation.
        inner = getattr(train_segment, "train_segment", train_segment)
        self.inner = inner if isinstance(inner, TrainSegment) else None
        if self.inner is not None and time_dim is not None:
            raise ValueError(
                "time_dim: is what make_train_segment was told. Give it there: "
                f"make_train_segment(..., time_dim={time_dim})."
            )
        if isinstance(train_segment, TrainSegment):
            if context and train_segment.context:
                raise ValueError(
                    f"context: the segment was made with context={train_segment.context}. Give it "
                    "there or here, not both."
                )
            self._has_own_context = bool(context)
            context = context or train_segment.context
            train_segment = variant(train_segment, False, False, train_segment.context)
        self.train_segment = train_segment
        self.context, self._autocast, self._time_dim = context, autocast, time_dim
        self._layout: Layout | None = None  # known once there is data
        self._axes: TimeAxes | None = None
        self._following = (
            Following(train_segment) if isinstance(train_segment, TrainSegment) else None
        )
        self._rows: dict[int, int | None] = {}  # by the length of the axis where they would be

    def layout(self, x: Tree) -> Layout:
        """Where time and rows lie in the data, of which ``x`` is a part: tensors or arrays."""
        if self._layout is None:
            self._layout = self._layout_of(x)
        return self._layout

    def _layout_of(self, x: Tree) -> Layout:
        if self.inner is None:
            return Layout(self._time_dim or 0)
        if not isinstance(x, Tensor):
            x = tree_map(lambda leaf: torch.empty(tuple(leaf.shape), device="meta"), x)
        return self.inner.layout(x)

    def axes(self, x: Tree) -> TimeAxes:
        """The axes of time alone."""
        if self._axes is None:
            layout = self.layout(x)
            self._axes = TimeAxes(layout.x_time, layout.y_time)
        return self._axes

    def prepared(self, prepare: Callable[[Tree, Tree], tuple[Tree, Tree]], chunk: Chunk) -> Chunk:
        """The chunk as ``prepare(x, y)`` makes it.

        Raises TypeError and ValueError if that is no pair of sequences of as many steps.
        """
        made = prepare(chunk.x, chunk.y)
        with error_prefix("prepare"):
            if not isinstance(made, (tuple, list)) or len(made) != 2:
                raise TypeError(f"expected it to return (x, y), found {type(made).__name__}.")
            before, after = self.axes(chunk.x), check_leaves(chunk._replace(x=made[0], y=made[1]))
            axis = self._layout_of(after.x).x_time
            if axis != before.x:
                raise ValueError(
                    f"time is on axis {before.x} of the x that it is given, but on axis {axis} of "
                    f"what it returns. Say where: make_train_segment(..., time_dim={axis})."
                )
            steps, found = before.steps(chunk), before.length(after)
            if found != steps:
                raise ValueError(f"it was given {steps} steps and returned {found}.")
        return after

    def warm_up(self, params: Tree, state: Tree, span: Span, keep: int) -> tuple[Tree, Tree]:
        """Runs up to where the window has a gradient: the state there, and that before ``keep``.

        The second is only meant if ``keep`` is not behind the first.
        """
        axes, kept, at = self.axes(span.chunk.x), state, span.first
        start = span.window.start
        for stop in (min(keep, start), start):
            if at < stop:
                part = axes.cut(span.chunk, at - span.first, stop - span.first)
                state = self._advance(params, state, part, axes, stop - at)
                at = stop
            if at <= keep:
                kept = state
        return state, kept

    def trained_part(self, span: Span) -> Chunk:
        """The steps of a span that have a gradient."""
        start, end = span.window.start - span.first, span.window.end - span.first
        return span.chunk if not start else self.axes(span.chunk.x).cut(span.chunk, start, end)

    @property
    def hands_over(self) -> bool:
        """Whether gradients can be had before the segment is done."""
        return isinstance(self.train_segment, TrainSegment)

    def train(
        self,
        params: Tree,
        state: Tree,
        chunk: Chunk,
        keep: int | None,
        scale: Tensor | None,
        early: EarlyGradients | None = None,
    ) -> tuple[SegmentOutput, Tree]:
        """The segment, and the state before step ``keep`` of it (None: after its last step)."""
        run = self.train_segment
        if isinstance(run, TrainSegment):
            if keep is not None or scale is not None or self._has_own_context:
                run = variant(run, keep is not None, scale is not None, self.context)
        elif keep is not None:
            raise TypeError(
                "k2: windows that overlap need a state from within a segment, which a function "
                f"{type(run).__name__} does not give. Pass what make_train_segment returns."
            )
        y = chunk.y
        if scale is not None:
            y = self._with_scale(chunk, scale)
        call: Callable[..., SegmentOutput] = run
        if early is not None and isinstance(run, TrainSegment):
            call = partial(run.with_early_gradients, early)
        elif run is self.train_segment and chunk.reset is None and chunk.mask is None:
            call = self._following or run
        with self._cast(chunk):
            result = call(params, state, chunk.x, y, **_flags(chunk))
        if keep is None:
            return result, result.state
        out, states = result.out
        layout = self.layout(chunk.x)
        # A copy of its own: it is kept longer than the states of all steps.
        kept = tree_map(lambda leaf: layout.at_step(leaf, keep).clone(), states)
        return result._replace(out=out), kept

    def _with_scale(self, chunk: Chunk, scale: Tensor) -> tuple[Tree, Tensor] | tuple[Tensor]:
        """``(y, scale)``, or ``(scale,)`` without a target; the scale has the axes of ``y``."""
        if chunk.y is not None:
            return chunk.y, scale.expand(tree_leaves(chunk.y)[0].shape)
        layout, x = self.layout(chunk.x), tree_leaves(chunk.x)[0]
        sizes = {layout.y_time: x.shape[layout.x_time]}
        if isinstance(layout, SharedLayout) and layout.y_dim is not None:
            sizes[layout.y_dim] = x.shape[layout.x_dim]
        elif x.dim() > layout.x_rows and not isinstance(layout, SharedLayout):
            sizes[layout.x_rows] = x.shape[layout.x_rows]
        return (scale.expand([sizes.get(axis, 1) for axis in range(max(sizes) + 1)]),)

    def _advance(self, params: Tree, state: Tree, chunk: Chunk, axes: TimeAxes, steps: int) -> Tree:
        """The state ``steps`` later, without a gradient."""
        for start in range(0, steps, _ADVANCE):
            part = axes.cut(chunk, start, min(start + _ADVANCE, steps))
            state = self.evaluate(params, state, part).state
        return state

    def evaluate(self, params: Tree, state: Tree, chunk: Chunk) -> SegmentOutput:
        """The segment without a gradient, the loss of all its steps."""
        if self.inner is None:
            raise TypeError(
                "burn_in, k2: steps without a gradient need train_segment.evaluate. Pass what "
                "make_train_segment returns."
            )
        run = variant(self.inner, False, False, 0)
        with self._cast(chunk):
            return run.evaluate(params, state, chunk.x, chunk.y, **_flags(chunk))

    def in_parts(self, chunk: Chunk, state: Tree, parts: int) -> list[tuple[Chunk, Tree]]:
        """The rows of a chunk and a state in micro-batches."""
        if parts == 1:
            return [(chunk, state)]
        if self.rows(chunk, state) is None:
            raise ValueError(
                "micro_batches: x, y and the state have no rows in common that could be shared out."
            )
        return split_rows(chunk, state, parts, self.layout(chunk.x), self.row_axis)

    def own_rows(self, rank: int, size: int, chunk: Chunk) -> Chunk:
        """The rows of a chunk that are those of a rank."""
        layout = self.layout(chunk.x)
        if tree_leaves(chunk.x)[0].dim() <= layout.x_rows:
            raise ValueError("mesh: x has no rows that could be shared out.")
        share_of(tree_leaves(chunk.x)[0].shape[layout.x_rows], rank, size)
        return split_rows(chunk, (), size, layout, self.row_axis)[rank][0]

    def own_state(self, rank: int, size: int, state: Tree) -> Tree:
        """The rows of a state that are those of a rank."""
        if state is None:
            return None
        return tree_map(lambda s: s.tensor_split(size, self.row_axis(s))[rank], state)

    def joined(self, states: list[Tree]) -> Tree:
        """The states of micro-batches as one."""
        return join_rows(states, self.row_axis)

    def weigh(self, chunk: Chunk, state: Tree, context: int) -> tuple[int | Tensor, int]:
        """What a chunk's loss weighs, and how many steps it has, all rows together.

        The weight is the number of valid steps: the loss is a mean over those. With ``in_dims`` it
        is a mean over sequences, so there it is the number of all steps.
        """
        _, weight, tokens = self.count(chunk, state, self.axes(chunk.x).steps(chunk), context)
        return weight, tokens

    def count(
        self, chunk: Chunk, state: Tree, steps: int, context: int
    ) -> tuple[int | None, int | Tensor, int]:
        """The same of a chunk of so many steps, behind its rows: None for data without rows."""
        layout = self._layout or self.layout(chunk.x)
        x = chunk.x if isinstance(chunk.x, Tensor) else tree_leaves(chunk.x)[0]
        across = x.shape[layout.x_rows] if x.dim() > layout.x_rows else 0
        if across not in self._rows:
            least = 2 if self.inner is None else self.inner.batched_axes
            self._rows[across] = count_rows(chunk, state, layout, self.row_axis, least)
        rows = self._rows[across]
        all_rows = rows or 1
        if chunk.mask is None or isinstance(layout, SharedLayout):
            return rows, (steps - context) * all_rows, steps * all_rows
        return rows, valid_steps(chunk.mask, steps, all_rows, context, layout), steps * all_rows

    def valid_steps(self, chunk: Chunk, state: Tree) -> int | Tensor:
        """How many steps of a chunk are valid, all rows together."""
        rows, steps = self.rows(chunk, state) or 1, self.axes(chunk.x).steps(chunk)
        if chunk.mask is None:
            return steps * rows
        return valid_steps(chunk.mask, steps, rows, 0, self.layout(chunk.x))

    def rows(self, chunk: Chunk, state: Tree) -> int | None:
        """The rows of the batch; None for data without rows."""
        return self.count(chunk._replace(mask=None), state, 0, 0)[0]

    def restarted(self, state: Tree, initial: Tree, rows: int | None) -> Tree:
        """The state, its rows that are not finite as at the start (None: zeros)."""
        if initial is None:
            initial = tree_map(torch.zeros_like, state)
        initial = tree_map(self._with_rows, in_order_of(state, initial), state)
        leaves = tree_leaves(state)
        if rows is None:
            return state if all(leaf.isfinite().all() for leaf in leaves) else initial
        for leaf in leaves:
            axis = self.row_axis(leaf)
            bad = ~torch.isfinite(leaf.movedim(axis, 0).reshape(leaf.shape[axis], -1)).all(1)
            state = broadcast_rows(torch.where, bad, initial, state, self.row_axis)
        return state

    def _with_rows(self, own: Tensor, leaf: Tensor) -> Tensor:
        """A state without an axis of rows, as an ``initial_state`` may be, with one."""
        return own.unsqueeze(self.row_axis(leaf)) if own.dim() == leaf.dim() - 1 else own

    def start(self, params: Tree) -> Tree:
        """The state of the segment's own that it begins with; None if it was told of none."""
        own = None if self.inner is None else self.inner.recipe.initial_state
        if not callable(own):
            return own
        with torch.no_grad():
            return own(params)

    @property
    def generator(self) -> torch.Generator | None:
        """What the segment itself draws from, as :func:`random_truncation` does."""
        own = getattr(self.train_segment, "generator", None)
        return own if isinstance(own, torch.Generator) else None

    def row_axis(self, leaf: Tensor) -> int:
        """The axis of the rows in a leaf of the state."""
        return 0 if self.inner is None else self.inner.row_axis(leaf)

    def _cast(self, chunk: Chunk) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return _AS_IT_IS
        device = next(leaf.device for leaf in tree_leaves(chunk.x))
        return torch.autocast(device.type, self._autocast)


def _flags(chunk: Chunk) -> dict[str, Tensor]:
    if chunk.reset is None and chunk.mask is None:
        return {}
    flags = {"reset": chunk.reset, "mask": chunk.mask}
    return {name: value for name, value in flags.items() if value is not None}
