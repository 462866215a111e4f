"""One window of a stream: warmed up, run in all its parts, its gradients gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._output import SegmentOutput
from .._trees import tree_leaves
from .chunk import Chunk
from .cursor import Place, Span
from .events import Events, emit, tell_sequence_ends
from .learner import Learner
from .nonfinite import Guard, nonfinite_window
from .rank_sync import RankSync
from .segments import Segments
from .window_stats import WindowStats
from .windows import Truncation, Window

Tree = Any


# What was measured (None: it does not count), the state after a window, and the next place. A
# tuple, since one is made for every update.
Ran = tuple[WindowStats | None, Tree, Place]


class WindowRunner:
    """Runs windows, of which ``learner`` gathers the gradients."""

    def __init__(
        self,
        segments: Segments,
        learner: Learner,
        truncation: Truncation,
        initial: Tree,
        guard: Guard,
        events: Events,
        micro_batches: int,
        together: RankSync | None,
    ) -> None:
        """``together``: of a run whose windows are updates of their own, with those of others."""
        self.segments, self.learner, self.truncation = segments, learner, truncation
        self.initial, self.guard, self.events = initial, guard, events
        self.micro_batches = micro_batches
        self.together = together if micro_batches == 1 else None
        self._before: torch.Size | None = None  # the shape of x in the window before

    def run(self, span: Span, place: Place, update: int) -> Ran | None:
        """A window of that update, the state at ``place``; None if the run is to stop."""
        segments, window, chunk = self.segments, span.window, span.chunk
        if self.events.sequence_end:
            tell_sequence_ends(self.events, span, place.end, segments.axes(chunk.x))
        # Where the next window will start: its state is kept when this one comes past.
        keep = self.truncation.first_after(window)
        state = kept = self.initial if self.truncation.fresh else place.state
        if span.first < window.start:
            state, kept = segments.warm_up(self.learner.params, state, span, keep)
            chunk = segments.trained_part(span)
        within = keep - window.start if window.start < keep < window.end else None
        gathered = self.learner.gathered
        run = self._run_part if self.micro_batches == 1 else self._run_parts
        shape = tree_leaves(chunk.x)[0].shape
        try:
            ran = run(window, chunk, state, within, update)
        except Exception as error:
            if self._before is not None and not self.truncation.fresh:
                self._add_note(error, shape, self._before, segments.axes(chunk.x).x)
            raise
        self._before = shape
        if ran is None:
            return None
        measured, after, own_kept = ran
        position = min(keep, window.end)
        if position > window.start:
            kept = own_kept
        if measured is None:
            # As a whole, also in micro-batches of which some were sound.
            self.learner.gathered = gathered
            rows, start = segments.rows(chunk, state), self.initial
            if start is None:
                start = segments.start(self.learner.params)
            after = segments.restart_nonfinite_rows(after, start, rows)
            kept = segments.restart_nonfinite_rows(kept, start, rows)
        after_it = Place(place.epoch, window.index + 1, position, kept, window.end)
        return measured, after, after_it

    def _add_note(self, error: Exception, now: torch.Size, before: torch.Size, axis: int) -> None:
        """Says it if the shape of x has changed otherwise than in its steps."""
        a, b = ([size for i, size in enumerate(shape) if i != axis] for shape in (now, before))
        if a != b:
            error.add_note(
                f"ftbptt: apart from its steps, x has shape {a} in this window and {b} in the one "
                "before, from which the state is carried. All need the same rows; the last batch "
                "of a DataLoader may have fewer: drop_last=True."
            )

    def _run_part(
        self,
        window: Window,
        chunk: Chunk,
        state: Tree,
        within: int | None,
        update: int,
        first: int = 0,
    ) -> tuple[WindowStats | None, Tree, Tree] | None:
        """Rows of a window, from row ``first`` on: what was measured, the state after, that kept.

        Nothing was measured if the loss is not finite; None if the run is to stop then.
        """
        segments, events, learner = self.segments, self.events, self.learner
        if events.before_window:
            emit(events.before_window, window, chunk)
        steps = window.end - window.start
        rows, weight, tokens = segments.count(chunk, state, steps, segments.context)
        scale, early = learner.scale(), None
        if self.together is not None and segments.hands_over:
            early = self.together.early(weight, self.guard.is_sound)
        result, kept = segments.train(learner.params, state, chunk, within, scale, early)
        if events.after_window:
            emit(events.after_window, window, result)
        loss = result.loss if scale is None else result.loss / scale
        if self.guard.is_sound(loss):
            learner.add(result.grads, weight)
            return WindowStats(loss, weight, steps, tokens), result.state, kept
        row = None if rows is None else first
        if self._stops(update, loss, window.start, chunk, result, row):
            return None
        return None, result.state, kept

    def _run_parts(
        self,
        window: Window,
        chunk: Chunk,
        state: Tree,
        within: int | None,
        update: int,
    ) -> tuple[WindowStats | None, Tree, Tree] | None:
        """The same in micro-batches."""
        segments, first = self.segments, 0
        parts = []
        for part, own in segments.micro_batches(chunk, state, self.micro_batches):
            ran = self._run_part(window, part, own, within, update, first)
            if ran is None:
                return None
            parts.append(ran)
            first += segments.rows(part, own) or 0
        measured, behind, kept = zip(*parts, strict=True)
        joined = None
        if all(own is not None for own in measured):
            joined = WindowStats.joined(measured, window.end - window.start)
        return joined, segments.join_states(list(behind)), segments.join_states(list(kept))

    def _stops(
        self,
        update: int,
        loss: Tensor,
        start: int,
        chunk: Chunk,
        result: SegmentOutput,
        row: int | None,
    ) -> bool:
        layout = self.segments.layout(chunk.x)
        words = nonfinite_window(self.learner.params, result, chunk, layout, start, row)
        return self.guard.stops(
            f"the loss of update {update} is {loss.tolist()}: {words}",
            "The run stops before that update; the parameters are those before it.",
        )
