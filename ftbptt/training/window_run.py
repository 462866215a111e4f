"""One window of a stream: warmed up, run in all its parts, its gradients gathered."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._output import SegmentOutput
from .cursor import Place, Span
from .events import Events, emit, tell_sequence_ends
from .measured import Measured
from .nonfinite import Guard, nonfinite_window
from .optimizing import Learner
from .segments import Segments
from .source import Chunk
from .windows import Truncation

Tree = Any


class Ran(NamedTuple):
    """``measured`` is None for a window that does not count, ``behind`` the state after it."""

    measured: Measured | None
    behind: Tree
    place: Place


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
    ) -> None:
        self.segments, self.learner, self.truncation = segments, learner, truncation
        self.initial, self.guard, self.events = initial, guard, events
        self.micro_batches = micro_batches

    def run(self, span: Span, place: Place, update: int) -> Ran | None:
        """A window of that update, the state at ``place``; None if the run is to stop."""
        segments, events, learner, window = self.segments, self.events, self.learner, span.window
        if events.sequence_end:
            tell_sequence_ends(events, span, place.end, segments.axes(span.chunk.x))
        # Where the next window will start: its state is kept when this one comes past.
        keep = self.truncation.first_after(window)
        state = kept = self.initial if self.truncation.fresh else place.state
        chunk = span.chunk
        if span.first < window.start:
            state, kept = segments.warm_up(learner.params, state, span, keep)
            chunk = segments.trained_part(span)
        within = keep - window.start if window.start < keep < window.end else None
        measured, behind, held, sound = [], [], [], True
        steps = window.end - window.start
        rows = segments.rows(chunk, state)
        parts, gathered = [(chunk, state)], learner.gathered
        if self.micro_batches > 1:
            parts = segments.in_parts(chunk, state, self.micro_batches)
        first = 0  # row of a part
        for part, own in parts:
            if events.before_window:
                emit(events.before_window, window, part)
            scale = learner.scale()
            result, own_kept = segments.train(learner.params, own, part, within, scale)
            if events.after_window:
                emit(events.after_window, window, result)
            behind.append(result.state)
            held.append(own_kept)
            loss = result.loss if scale is None else result.loss / scale
            own_rows = rows if len(parts) == 1 else segments.rows(part, result.state)
            weight, tokens = segments.weigh_rows(part, steps, own_rows, segments.context)
            if self.guard.is_sound(loss):
                learner.add(result.grads, weight)
                measured.append(Measured(loss, weight, steps, tokens))
            else:
                sound = False
                row = None if rows is None else first
                if self._stops(update, loss, span, part, result, row):
                    return None
            first += own_rows or 0
        position, after = min(keep, window.end), behind[0]
        if position > window.start:
            kept = held[0] if len(held) == 1 else segments.joined(held)
        if len(behind) > 1:
            after = segments.joined(behind)
        if not sound:
            # As a whole, also in micro-batches of which some were sound.
            learner.gathered, measured = gathered, []
            after = segments.restarted(after, self.initial, rows)
            kept = segments.restarted(kept, self.initial, rows)
        place = Place(place.epoch, window.index + 1, position, kept, window.end)
        return Ran(Measured.joined(measured, steps) if measured else None, after, place)

    def _stops(
        self,
        update: int,
        loss: Tensor,
        span: Span,
        part: Chunk,
        result: SegmentOutput,
        row: int | None,
    ) -> bool:
        layout, start = self.segments.layout(part.x), span.window.start
        words = nonfinite_window(self.learner.params, result, part, layout, start, row)
        return self.guard.stops(
            f"the loss of update {update} is {loss.tolist()}: {words}",
            "The run stops before that update; the parameters are those before it.",
        )
