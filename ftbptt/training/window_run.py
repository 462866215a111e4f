"""One window of a stream: warmed up, run in one or more micro-batches, its gradients gathered."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from .._trees import Tree, tree_leaves
from .data.chunk import Chunk
from .data.cursor import Place, Span
from .data.rows import leaf_with_rows
from .data.windows import Truncation, Window, kept_within
from .reports.events import Events, emit, tell_sequence_ends
from .segments import Segments
from .updates.ensembles import is_ensemble
from .updates.learner import Learner
from .updates.nonfinite import Guard, in_words, nonfinite_window
from .updates.rank_sync import RankSync
from .updates.window_stats import WindowStats

# The stats of a window (None: its loss is not finite, so it does not count), the state after it,
# and the next place.
Ran = tuple[WindowStats | None, Tree, Place]


class _Job(NamedTuple):
    """A window with a gradient: its steps, and the state before the first.

    ``keep`` is the step within it before which the state is wanted (None: after the last one),
    ``update`` the index of the update that the window is for.
    """

    window: Window
    chunk: Chunk
    state: Tree
    keep: int | None
    update: int


# The stats of a window or a micro-batch, as in Ran; the state after it; the state before `keep`.
_Result = tuple[WindowStats | None, Tree, Tree]


class WindowRunner:
    """Runs windows, whose gradients ``learner`` gathers."""

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
        """``together``: if each window is an update, made together with other ranks."""
        self.segments, self.learner, self.truncation = segments, learner, truncation
        self.initial, self.guard, self.events = initial, guard, events
        self.micro_batches = micro_batches
        self.together = together if micro_batches == 1 else None
        self._last_x_shape: torch.Size | None = None

    def run(self, span: Span, place: Place, update: int) -> Ran | None:
        """Runs a window for an update, from the state at ``place``; None if the run is to stop."""
        segments, learner, window = self.segments, self.learner, span.window
        if self.events.sequence_end:
            tell_sequence_ends(self.events, span, place.end, segments.layout(span.chunk.x))
        next_start = self.truncation.next_start(window)
        state = self.initial if self.truncation.fresh else place.state
        chunk, state, next_state = segments.warm_up(learner.params, state, span, next_start)
        keep = kept_within(window, next_start)
        gathered_before = learner.gathered
        result = self._run_checked(_Job(window, chunk, state, keep, update), place.state)
        if result is None:
            return None
        stats, state_after, state_within = result
        if next_start > window.start:
            next_state = state_within
        if stats is None:
            # The window is left out entirely, with the micro-batches that were finite.
            learner.gathered = gathered_before
            rows, start = segments.rows(chunk, state), self.initial
            if start is None:
                start = segments.start(learner.params)
            state_after = segments.restart_nonfinite_rows(state_after, start, rows)
            next_state = segments.restart_nonfinite_rows(next_state, start, rows)
        next_place = Place(place.epoch, window.index + 1, next_start, next_state, window.end)
        return stats, state_after, next_place

    def _run_checked(self, job: _Job, carried: Tree) -> _Result | None:
        """Runs a window; an error gets a note if the rows of the data may have changed."""
        x_shape = leaf_with_rows(job.chunk.x).shape
        run = self._run_part if self.micro_batches == 1 else self._run_micro_batches
        try:
            result = run(job)
        except Exception as error:
            if self.truncation.fresh:
                raise
            if self._last_x_shape is not None:
                time_axis = self.segments.axes(job.chunk.x).x
                _add_shape_note(error, x_shape, self._last_x_shape, time_axis)
                if self.initial is not None and self.segments.under_vmap:
                    _add_state_note(error, carried, self.initial)
            elif self.initial is None and carried is not None:
                shapes = [list(leaf.shape) for leaf in tree_leaves(carried)]
                error.add_note(
                    f"ftbptt: the state comes from a checkpoint, its tensors have shape {shapes}. "
                    "Resume with the rows that the run was started with."
                )
            raise
        self._last_x_shape = x_shape
        return result

    def _initial_has_rows(self, job: _Job) -> bool:
        """Whether ``initial_state`` has as many rows as the window."""
        segments = self.segments
        initial_state = segments.start(self.learner.params)
        if initial_state is None:
            return False
        rows = segments.rows(job.chunk, job.state)
        axes = [(leaf, segments.row_axis(leaf)) for leaf in tree_leaves(initial_state)]
        return any(leaf.dim() > axis and leaf.shape[axis] == rows for leaf, axis in axes)

    def _run_micro_batches(self, job: _Job) -> _Result | None:
        segments, first_row = self.segments, 0
        results = []
        for chunk, state in segments.micro_batches(job.chunk, job.state, self.micro_batches):
            try:
                result = self._run_part(job._replace(chunk=chunk, state=state), first_row)
            except (ValueError, RuntimeError) as error:
                if self._initial_has_rows(job):
                    error.add_note(
                        "ftbptt: micro_batches splits the rows of the data and of the state, but "
                        "not those of initial_state. Give one without an axis of rows, pass a "
                        "state of all rows as state=, and reset the first step."
                    )
                raise
            if result is None:
                return None
            results.append(result)
            first_row += segments.rows(chunk, state) or 0
        stats, states_after, states_within = zip(*results, strict=True)
        joined = None
        if all(part is not None for part in stats):
            joined = WindowStats.joined(stats, job.window.end - job.window.start)
        return (
            joined,
            segments.join_states(list(states_after)),
            segments.join_states(list(states_within)),
        )

    def _run_part(self, job: _Job, first_row: int = 0) -> _Result | None:
        """Runs a window, or a micro-batch of it whose first row in the batch is ``first_row``.

        The stats are None if the loss is not finite; the result is None if the run stops then.
        """
        segments, events, learner = self.segments, self.events, self.learner
        window, chunk, state, keep, update = job
        if events.before_window:
            emit(events.before_window, window, chunk)
        start = segments.start(learner.params) if state is None else state
        counts = segments.count(chunk, start, segments.context)
        scale, early = learner.scale(), None
        if self.together is not None and segments.hands_over:
            early = self.together.early(counts.weight, self.guard.is_sound)
        output, state_within = segments.train(learner.params, state, chunk, keep, scale, early)
        if events.after_window:
            emit(events.after_window, window, output)
        if not self.guard.is_sound(output.loss, learner.of_trained(output.grads)):
            row = None if counts.rows is None else segments.first_row + first_row
            layout = segments.layout(chunk.x)
            losses = partial(segments.losses, output, chunk)
            cause = nonfinite_window(
                learner.params, output, chunk, layout, window.start, row, losses
            )
            value = in_words(output.loss, learner.stopped_models.new)
            if self.guard.stops(
                f"the loss of update {update} is {value}: {cause}",
                "The run stops before that update; the parameters are those before it.",
            ):
                return None
            if self.guard.mode == "skip":
                return None, output.state, state_within
        if is_ensemble(learner.of_trained(output.grads), output.loss):
            counts = segments.count_of_models(chunk, start, segments.context, output.loss)
        learner.add(output.grads, counts.weight)
        loss = learner.stopped_models.marked(output.loss)
        stats = WindowStats(loss, counts.weight, counts.steps, counts.tokens)
        return stats, output.state, state_within


def _add_state_note(error: Exception, carried: Tree, initial: Tree) -> None:
    """Adds a note if the segment returned a state of other shapes than the one it started from."""
    pairs = zip(tree_leaves(carried), tree_leaves(initial), strict=False)
    for returned, given in pairs:
        if returned.shape != given.shape:
            error.add_note(
                f"ftbptt: the run started from state= of shape {list(given.shape)}, but the "
                f"segment returned one of {list(returned.shape)}, which this window starts from. "
                "Under torch.func.vmap give the state its axis from the start, and map over it: "
                "in_dims=(0, 0, ...)."
            )
            return


def _add_shape_note(
    error: Exception, shape: torch.Size, last_shape: torch.Size, time_axis: int
) -> None:
    """Adds a note if the shape of x has changed in more than its number of steps."""
    now, before = (
        [size for axis, size in enumerate(sizes) if axis != time_axis]
        for sizes in (shape, last_shape)
    )
    if now != before:
        error.add_note(
            f"ftbptt: apart from its steps, x has shape {now} in this window and {before} in the "
            "one before, from which the state is carried. All need the same rows; the last batch "
            "of a DataLoader may have fewer: drop_last=True."
        )
