"""Makes the updates of a run: windows, gradients of all ranks, the optimizer's step, epochs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .._interrupt import uninterrupted
from .._random_state import random_state, set_random_state
from .._trees import Tree, tree_leaves
from .checkpoints.comparison import check_like, check_names
from .data.cursor import Cursor, Place
from .reports.events import SequenceEnd, emit
from .reports.monitor import Monitor
from .reports.report import Report
from .resume_point import ResumePoint
from .updates.nonfinite import in_words
from .updates.norms import total_norm
from .updates.rank_sync import RankSync
from .updates.update import Update
from .updates.window_stats import WindowStats
from .window_run import WindowRunner

_NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class Limits:
    """How long a run lasts, and how many windows an update has."""

    epochs: int | None
    updates: int | None
    accumulate: int


class Trainer:
    """Makes the updates of a run, alone or with other ranks, and tracks where it stands.

    ``keeps_resume_point``: an update that is interrupted can be made again, with all its windows.
    Keeping that point takes as long as a small window, so it is done only for a run that is saved,
    and with ranks, which may be interrupted at different windows.
    """

    def __init__(
        self,
        windows: WindowRunner,
        cursor: Cursor,
        monitor: Monitor,
        limits: Limits,
        rank_sync: RankSync | None,
        keeps_resume_point: bool,
    ) -> None:
        self.windows, self.cursor, self.monitor = windows, cursor, monitor
        self.learner, self.guard, self.events = windows.learner, windows.guard, windows.events
        self.limits, self.rank_sync = limits, rank_sync
        self.keeps_resume_point = keeps_resume_point
        cursor.goes_back(keeps_resume_point)
        self.place = Place(0, 0, 0, windows.initial)  # of the next window
        self.state_after = windows.initial  # after the last step of the last window
        # Where the run stood before the update in progress; None between two updates.
        self.resume_point: ResumePoint | None = None
        self.index = 0  # the number of updates that were made
        self.ended = False  # there are no more updates
        self.is_consistent = True  # False while the optimizer writes the parameters
        self.seconds = 0.0  # up to the last update, by the first rank's clock
        self._had_windows = False  # in this epoch, on any rank
        self._epochs_ended = 0  # epochs whose end was announced by an event
        self._random_at_start: dict[str, Any] = {}

    def begin(self) -> None:
        """Begins the first epoch, or continues from where a resumed run stood."""
        if self.resume_point is None:
            self._random_at_start = self._random_at_start or random_state()
            set_random_state(self._random_at_start)  # also if it was interrupted while it began
            self.cursor.begin(0)
            emit(self.events.epoch_start, 0)
        else:
            self.resume_point.restore(self.cursor, self.windows.segments)
        self.set_resume_point()

    def set_resume_point(self) -> None:
        """The next update begins: if it is interrupted, it is saved and made again from here."""
        self.resume_point = self._current_point() if self.keeps_resume_point else None

    def rewind(self) -> None:
        """Goes back to where the interrupted update began."""
        if self.resume_point is not None and self.is_consistent:
            self._move_to(self.resume_point)
            self.resume_point.restore(self.cursor, self.windows.segments)

    def _move_to(self, point: ResumePoint) -> None:
        self.place, self.state_after = point.place, point.state_after
        self._had_windows = point.had_windows

    def _current_point(self) -> ResumePoint:
        return ResumePoint.of(
            self.place, self.state_after, self._had_windows, self.cursor, self.windows.segments
        )

    def uninterrupted(self) -> AbstractContextManager[object]:
        """Defers Ctrl-C, where it would leave something half done that can be saved or shared."""
        return uninterrupted() if self.keeps_resume_point else _NO_CONTEXT

    def ends_on_a_rank(self, *, when_due: bool) -> bool:
        """Whether the run has ended on any rank. With ranks a collective, called before saving.

        ``when_due``: the run saves itself.
        """
        if self.rank_sync is not None:
            self.ended |= self.rank_sync.check(self.index, self.ended, when_due=when_due)
        return self.ended

    def total_updates(self) -> int | None:
        """The number of updates that the run will make, if it is known."""
        limits, steps = self.limits, self.cursor.source.total
        if steps is None or limits.epochs is None:
            return limits.updates
        windows = self.cursor.truncation.updates(steps)
        updates = limits.epochs * -(-windows // limits.accumulate)
        return updates if limits.updates is None else min(updates, limits.updates)

    # -- one update -----------------------------------------------------------------------------

    def next_update(self) -> Update | None:
        """The next update; None if the run has ended."""
        while not self._is_at_limit():
            stats, more = self._run_windows()
            self._had_windows |= more  # before the update: after that, an error leaves the run
            if self.rank_sync is None:
                update = None if stats is None or self.ended else self._update(stats)
            else:
                # With Ctrl-C all ranks stop before the update, or all after it.
                with self.uninterrupted():
                    update, more = self._joint_update(stats, more, self.rank_sync)
            if update is not None or self.ended:
                return update
            if not more and not self._next_epoch():
                return None
        return None

    def _is_at_limit(self) -> bool:
        """Whether there are to be no more updates; in the last epoch, none after its end."""
        epochs, updates = self.limits.epochs, self.limits.updates
        # A run may be resumed with fewer epochs than it has had.
        is_past = epochs is not None and self.place.epoch >= epochs
        return is_past or (updates is not None and self.index >= updates)

    def _run_windows(self) -> tuple[WindowStats | None, bool]:
        """Runs the windows of an update, fewer at the end of an epoch.

        Returns their statistics, None if no window counts, and whether there was a window at all.
        A window that does not count is replaced by the next one, but not with ranks, where the
        others would have to wait.
        """
        self.learner.begin_update()
        windows: list[WindowStats] = []
        remaining, more = self.limits.accumulate, False
        while remaining:
            span = self.cursor.take(self.place)
            if span is None:
                break
            more = True
            result = self.windows.run(span, self.place, self.index)
            if result is None:
                self.ended = True
                return None, True
            stats, self.state_after, self.place = result
            if stats is not None:
                windows.append(stats)
            if stats is not None or self.rank_sync is not None:
                remaining -= 1
            self.cursor.prefetch(self.place, of_next_update=not remaining)
        return WindowStats.joined(windows) if windows else None, more

    def _joint_update(
        self, stats: WindowStats | None, more: bool, rank_sync: RankSync
    ) -> tuple[Update | None, bool]:
        """The update from the windows of all ranks, and whether any rank had a window."""
        meter = self.monitor.meter
        joint = rank_sync.update(
            self.index, stats, more=more, due=meter.is_due(), stops=self.ended,
            seconds=meter.seconds,
        )  # fmt: skip
        self.ended |= bool(joint.stopping)
        self.seconds = joint.seconds
        self._had_windows |= joint.more
        if joint.stats is None or self.ended:
            return None, joint.more
        return self._update(joint.stats, joint.due), joint.more

    def _update(self, stats: WindowStats, due: bool | None = None) -> Update | None:
        """Makes the optimizer's step; None if the norm of the gradient forbids it.

        ``due``: whether to read the losses after it; None: as this process's clock says.
        """
        learner = self.learner
        grads, norm = learner.ready(stats.loss)
        # A NaN in steps that are masked has no part in the loss, but in the gradient.
        is_masked = isinstance(stats.weight, Tensor)
        if norm is None and is_masked and grads and self.guard.reads_now(grads[0]):
            norm = total_norm(grads, stats.loss)
        if norm is not None and self._stops_at(grads, norm):
            return None
        learner.stopped_models.silence(grads)
        self._announce(grads)
        if norm is None and learner.changes_gradients:
            norm = total_norm(grads, stats.loss)
        with self.uninterrupted():
            update, report = self._step(stats, grads, norm, due)
        if report is not None:
            self.publish(report)
        if self.events.after_update:
            emit(self.events.after_update, update)
        return update

    def _stops_at(self, grads: list[Tensor], norm: Tensor) -> bool:
        """Whether the gradients are not finite, or their norm, by which they would be clipped."""
        scaler = self.learner.scaler
        skips = scaler is not None and scaler.is_enabled()  # it leaves such an update out itself
        if skips:
            return False
        if self.learner.clip_norm is None:  # then only a sum of float16 may have overflowed
            is_read = self.guard.reads_now(norm)
            if not is_read or norm.isfinite().all() or all(g.isfinite().all() for g in grads):
                return False
        if self.guard.is_sound(norm, grads):
            return False
        value = in_words(norm, self.learner.stopped_models.new)
        stops = self.guard.stops(
            f"the gradient's norm is {value} in update {self.index}, though its loss is "
            "finite, as with a NaN in the data that a mask, or torch.where in the loss, leaves "
            "out. Fill it with a number before anything is computed with it",
            "The run stops before that update; the parameters are those before it.",
        )
        self.ended |= stops
        return stops or self.guard.mode == "skip"

    def _announce(self, grads: Tree) -> None:
        """Calls the handlers that run before the optimizer's step."""
        try:
            if self.events.before_update:
                emit(self.events.before_update, grads)
        except BaseException:
            if self.learner.is_sharded:  # the step is a collective, which the other ranks make
                self.is_consistent = False
                self.learner.step(grads)
            raise

    def _step(
        self, stats: WindowStats, grads: Tree, norm: Tensor | None, due: bool | None
    ) -> tuple[Update, Report | None]:
        """The optimizer's step and what it changes in the run; what was read of it, if anything."""
        learner, place, meter = self.learner, self.place, self.monitor.meter
        self.is_consistent, learning_rate = False, learner.learning_rate
        stepped = learner.step(grads)
        self.is_consistent, self.resume_point = True, None
        self.index += 1
        meter.add(stats)
        update = Update(
            self.index - 1, place.epoch, place.end, stats.loss, stats.weight,
            learner.params, self.state_after, meter.tokens_per_second, learning_rate, grads, norm,
        )  # fmt: skip
        self.monitor.unreported = update
        if stepped:
            learner.follow_schedule()
        due = meter.is_due() if due is None else due
        return update, self.monitor.read() if due else None

    def publish(self, report: Report | None) -> None:
        """Publishes what was read, and ends the run if that says so."""
        try:
            self.ended |= self.monitor.publish(report)
        finally:  # an event may fail, and the caller go on
            self.ended |= self.monitor.stopped

    def _next_epoch(self) -> bool:
        """Ends the epoch, and begins the next; false if there is none."""
        epoch = self.place.epoch
        if not self._had_windows and self.cursor.axes is None:
            raise ValueError("data: is empty. Give at least one chunk of one step or more.")
        if not self._had_windows:
            raise ValueError(
                "data: no window has a step with a loss. Give a longer stream, or a smaller k1, "
                "burn_in or context."
            )
        if epoch == self._epochs_ended:  # otherwise that was before the run was left, or saved
            if self.events.sequence_end:
                emit(self.events.sequence_end, SequenceEnd(self.place.end, None))
            emit(self.events.epoch_end, epoch)
            self._epochs_ended = epoch + 1
        if self.limits.epochs is not None and epoch + 1 >= self.limits.epochs:
            return False
        self.cursor.begin(epoch + 1)  # which may be interrupted: until then this epoch has ended
        self.place = Place(epoch + 1, 0, 0, self.windows.initial)
        self._had_windows = False
        emit(self.events.epoch_start, epoch + 1)
        return True

    # -- saving and resuming --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run as it was after the last update: tensors, numbers, strings, lists and dicts."""
        return {
            "windows": asdict(self.cursor.truncation),
            "index": self.index,
            "epochs_ended": self._epochs_ended,
            **(self.resume_point or self._current_point()).state_dict(),
            "learner": self.learner.state_dict(),
            "buffers": self.windows.segments.saved_buffers(),
            **self.monitor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises ValueError, before it writes anything, for a run of another model or with other
        options.
        """
        windows = asdict(self.cursor.truncation)
        if state["windows"] != windows:
            raise ValueError(
                f"checkpoint: made with {_describe(state['windows'])}, but this run has "
                f"{_describe(windows)}. Resume with the options that the run was started with."
            )
        learner = self.learner
        learner.check(state["learner"])
        buffers = self.windows.segments.saved_buffers()
        saved_buffers = state["buffers"]
        check_names("buffers", sorted(buffers), sorted(saved_buffers))
        check_like("buffers", "model", buffers, [saved_buffers[name] for name in buffers])
        tensors = [*tree_leaves(learner.params), *tree_leaves(self.windows.initial)]
        devices = (leaf.device for leaf in tensors if leaf is not None)
        device = next(devices, torch.device("cpu"))
        start = self.windows.segments.start(learner.params)
        self.resume_point = ResumePoint.from_state(state, self.windows.initial, start, device)
        self._move_to(self.resume_point)
        learner.load_state_dict(state["learner"])
        self.windows.segments.set_buffers(saved_buffers)
        self.monitor.load_state_dict(state, device)
        self.ended = self.monitor.stopped
        self.index = state["index"]
        self._epochs_ended = state["epochs_ended"]


def _describe(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
