"""The calls of ``train_segment`` that make up a window: steps without a gradient, and with one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .._random_state import random_state, set_random_state
from .._trees import Tree, tree_leaves, tree_map
from ..contract.layout import InDimsLayout
from ..contract.loss import without_first
from ..contract.output import EarlyGradients, SegmentOutput
from ..segment.consecutive_calls import ConsecutiveCalls
from ..segment.train_segment import TrainSegment
from .data.chunk import Chunk, TimeAxes
from .data.cursor import Span
from .data.layout import DataLayout
from .random_truncation import RandomTruncation
from .variants import variant, with_scale

_NO_AUTOCAST = nullcontext()
_MAX_WARM_UP_STEPS = 256  # per call without a gradient, which bounds its memory


class Segments(DataLayout):
    """Calls ``train_segment`` on parts of windows, and knows the layout of its data.

    ``train_segment`` is a :class:`TrainSegment`; a function around one, as
    :func:`random_truncation` returns it, whose attribute ``train_segment`` is that; or any other
    function of its contract, for windows that need neither variants nor steps without a gradient.
    ``context``: of the windows; None: that of the segment.
    """

    def __init__(
        self,
        train_segment: Callable[..., SegmentOutput],
        *,
        context: int | None = None,
        autocast: torch.dtype | None = None,
        time_dim: int | None = None,
    ) -> None:
        if not callable(train_segment) or isinstance(train_segment, nn.Module):
            is_module = isinstance(train_segment, nn.Module)
            advice = " Make a segment of it: make_train_segment(module, loss)." if is_module else ""
            raise TypeError(
                "train_segment: expected what make_train_segment returns, or a function of its "
                f"contract, found {type(train_segment).__name__}.{advice}"
            )
        mapped = getattr(train_segment, "__wrapped__", None)  # a segment, or its evaluate
        mapped = getattr(mapped, "__self__", mapped)
        self.under_vmap = is_segment(mapped)
        inner = None  # of what is under vmap: that has the attributes of what it wraps
        if not self.under_vmap:
            inner = getattr(train_segment, "train_segment", train_segment)
        super().__init__(inner if isinstance(inner, TrainSegment) else None, time_dim)
        if self.inner is not None and time_dim is not None:
            raise ValueError(
                "time_dim: belongs to the segment. Pass it to "
                f"make_train_segment(..., time_dim={time_dim})."
            )
        if time_dim is None and self.under_vmap:
            raise ValueError(
                "time_dim: train_segment is under vmap, which adds an axis to x and y. Say where "
                "time is, counting that axis: time_dim=1 for x of [models, K, ...]."
            )
        known = mapped if self.under_vmap else train_segment
        own = known.context if isinstance(known, TrainSegment) else 0
        if own and context is not None:
            raise ValueError(
                f"context: the segment was made with context={own}. Give it there or here, not "
                "both."
            )
        self.context = own if context is None else context
        # Whether the segment has no context of its own, so that training needs a variant with one.
        self._adds_context = bool(context)
        self._consecutive: ConsecutiveCalls | None = None
        if isinstance(train_segment, TrainSegment):
            train_segment = variant(train_segment, states=False, scaled=False, context=own)
            self._consecutive = ConsecutiveCalls(train_segment)
        elif context:
            raise TypeError("context: needs what make_train_segment returns as train_segment.")
        self.train_segment, self._autocast = train_segment, autocast

    @property
    def hands_over(self) -> bool:
        """Whether gradients can be had before the segment has returned."""
        return isinstance(self.train_segment, TrainSegment)

    @property
    def generator(self) -> torch.Generator | None:
        """What the segment itself draws from, as :func:`random_truncation` does."""
        generator = getattr(self.train_segment, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the module that the segment was made of, on the CPU."""
        found = {} if self.inner is None else self.inner.recipe.step.buffers()
        return {name: buffer.detach().cpu() for name, buffer in found.items()}

    def saved_buffers(self) -> dict[str, Tensor]:
        """Those that a checkpoint holds."""
        return {} if self.inner is None else self.inner.recipe.step.saved_buffers()

    def set_buffers(self, values: dict[str, Tensor]) -> None:
        """Gives the module's buffers these values."""
        if self.inner is not None:
            self.inner.recipe.step.set_buffers(values)

    def start(self, params: Tree) -> Tree:
        """The ``initial_state`` that the segment was made with; None without one."""
        initial_state = None if self.inner is None else self.inner.recipe.initial_state
        if not callable(initial_state):
            return initial_state
        with torch.no_grad():
            return initial_state(params)

    # -- steps with a gradient --------------------------------------------------------------------

    def train(
        self,
        params: Tree,
        state: Tree,
        chunk: Chunk,
        keep: int | None,
        scale: Tensor | None,
        early: EarlyGradients | None = None,
    ) -> tuple[SegmentOutput, Tree]:
        """The segment's output, and the state before step ``keep`` (None: after its last step).

        The loss is that without ``scale``, the gradients are those with it.
        """
        segment = self.train_segment
        if isinstance(segment, TrainSegment):
            if keep is not None or scale is not None or self._adds_context:
                segment = variant(
                    segment,
                    states=keep is not None,
                    scaled=scale is not None,
                    context=self.context,
                )
        elif keep is not None:
            raise TypeError(
                "k2, burn_in: the next window starts within this one, and needs a state from "
                f"there, which a function {type(segment).__name__} does not give. Pass what "
                "make_train_segment returns."
            )
        y = chunk.y if scale is None else with_scale(chunk, scale, self.layout(chunk.x))
        call: Callable[..., SegmentOutput] = segment
        if early is not None and isinstance(segment, TrainSegment):
            call = partial(segment.with_early_gradients, early)
        elif segment is self.train_segment and chunk.reset is None and chunk.mask is None:
            call = self._consecutive or segment
        with self._autocasting(chunk):
            result = call(params, state, chunk.x, y, **_flags(chunk))
        if keep is None:
            return result, result.state
        out, states = result.out
        layout = self.layout(chunk.x)
        # A copy, so that the states of all the other steps are freed.
        kept = tree_map(lambda leaf: layout.at_step(leaf, keep).clone(), states)
        return result._replace(out=out), kept

    # -- steps without a gradient -----------------------------------------------------------------

    def warm_up(
        self, params: Tree, state: Tree, span: Span, next_start: int
    ) -> tuple[Chunk, Tree, Tree]:
        """Runs the steps of a span before its gradient starts, from ``state`` before the first.

        Returns the steps with a gradient, the state before them, and the state before step
        ``next_start``, which is of use only if that is not after the gradient's start.
        """
        start, position, next_state = span.window.start, span.first, state
        if position == start:
            return span.chunk, state, state
        if self.inner is None:
            raise TypeError(
                "burn_in, k2: steps without a gradient need train_segment.evaluate. Pass what "
                "make_train_segment returns."
            )
        axes = self.axes(span.chunk.x)
        for stop in (min(next_start, start), start):
            if position < stop:
                part = axes.cut(span.chunk, position - span.first, stop - span.first)
                state = self._advance(params, state, part, axes, stop - position)
                position = stop
            if position <= next_start:
                next_state = state
        chunk = axes.cut(span.chunk, start - span.first, span.window.end - span.first)
        return chunk, state, next_state

    def _advance(self, params: Tree, state: Tree, chunk: Chunk, axes: TimeAxes, steps: int) -> Tree:
        """The state after the ``steps`` steps of a chunk."""
        for start in range(0, steps, _MAX_WARM_UP_STEPS):
            part = axes.cut(chunk, start, min(start + _MAX_WARM_UP_STEPS, steps))
            state = self.evaluate(params, state, part).state
        return state

    def evaluate(self, params: Tree, state: Tree, chunk: Chunk) -> SegmentOutput:
        """The output without gradients, with the loss of all steps: of a segment without context.

        What the caller's function returns, if it is no segment.
        """
        evaluate = self.train_segment
        if self.inner is not None:
            evaluate = variant(self.inner, states=False, scaled=False, context=0).evaluate
        with self._autocasting(chunk):
            return evaluate(params, state, chunk.x, chunk.y, **_flags(chunk))

    # -- what a loss consists of ------------------------------------------------------------------

    def losses(self, output: SegmentOutput, chunk: Chunk) -> Tensor | None:
        """The loss of each step, ``[K]`` or ``[K, B]``, 0 where it has none; computed once more.

        None for one that is a scalar, or that sees other data than the chunk's.
        """
        inner, layout = self.inner, self.layout(chunk.x)
        if inner is None or inner.tapped or isinstance(layout, InDimsLayout):
            return None
        time, context = layout.time_dim, self.context
        pair = [without_first(tree, context, time) for tree in (output.out, chunk.y)]
        state = random_state()
        try:
            with torch.no_grad(), self._autocasting(chunk):
                value = inner.recipe.loss(*pair)
        except Exception:  # it is asked only for a message
            return None
        finally:
            set_random_state(state)
        if value.dim() not in (1, 2):
            return None
        axis = time if value.dim() == 2 else 0
        value = value.movedim(axis, 0)
        if len(value) != self.steps(chunk) - context:
            return None
        value = torch.cat([value.new_zeros(context, *value.shape[1:]), value])
        if chunk.mask is not None:
            mask = layout.flags_first(chunk.mask)
            if mask.dim() < value.dim():
                mask = mask.unsqueeze(1)
            value = torch.where(mask, value, 0)
        return value

    def _autocasting(self, chunk: Chunk) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return _NO_AUTOCAST
        device = tree_leaves(chunk.x)[0].device
        return torch.autocast(device.type, self._autocast)


def is_segment(function: Any) -> TypeGuard[TrainSegment | RandomTruncation]:
    """Whether it is what ``make_train_segment`` returns, or ``random_truncation`` of that."""
    return isinstance(function, (TrainSegment, RandomTruncation))


def _flags(chunk: Chunk) -> dict[str, Tensor]:
    if chunk.reset is None and chunk.mask is None:
        return {}
    flags = {"reset": chunk.reset, "mask": chunk.mask}
    return {name: value for name, value in flags.items() if value is not None}
