"""The driver: windows of a stream through ``train_segment`` into an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .._compat import tree_leaves, tree_map
from .checkpoint import as_plain, from_plain, save_checkpoint
from .cursor import Cursor, Place
from .events import Events, SequenceEnd, emit
from .interrupt import uninterrupted
from .measured import Measured
from .nonfinite import Guard, nonfinite_parameter
from .optimizing import Learner
from .report import Meter, ProgressBar, Report
from .segments import Segments
from .together import Together
from .update import Update
from .window_run import WindowRunner

Tree = Any


@dataclass(frozen=True)
class Limits:
    """How far a run goes, and what it is made of."""

    epochs: int | None
    updates: int | None
    accumulate: int  # windows
    micro_batches: int
    on_nonfinite: str
    stop: Callable[[float], bool] | None


class Stream(Iterator[Update]):
    """Updates on a stream, one for each ``next``; made by :func:`train_stream`.

    ``extra`` is a dict of the caller's own, kept in checkpoints.
    """

    def __init__(
        self,
        segments: Segments,
        state: Tree,
        cursor: Cursor,
        learner: Learner,
        meter: Meter,
        events: Events,
        limits: Limits,
        checkpoint: Path | None,
        checkpoint_every: int,
        progress: bool,
        together: Together | None,
    ) -> None:
        self._together = together
        self._cursor, self._learner = cursor, learner
        self._meter, self._events, self._limits = meter, events, limits
        self._checkpoint, self._checkpoint_every = checkpoint, checkpoint_every
        self._initial = state if state is None else tree_map(Tensor.detach, state)
        self._guard = Guard(limits.on_nonfinite, learner)
        self._windows = WindowRunner(
            segments, learner, cursor.truncation, self._initial, self._guard, events,
            limits.micro_batches,
        )  # fmt: skip
        self._place = Place(0, 0, 0, self._initial)  # behind the last window
        self._behind = self._initial  # the state behind the last window's last step
        # Where the run stood before the work on the next update began; None between two updates.
        self._stand: dict[str, Any] | None = None
        self._whole = True  # the parameters are all of the same update
        self._saved = 0  # the index that the checkpoint has
        self._last: Update | None = None  # not reported yet
        self._begun = self._finished = False
        self._stopped = False  # by the caller's ``stop``
        self._left = False  # by an error
        self._bar: ProgressBar | None = None
        self._progress = progress
        self.index = 0  # how many updates were made
        self.extra: dict[str, Any] = {}

    @property
    def params(self) -> Tree:
        """The parameters after the last update."""
        return self._learner.params

    @property
    def optimizer(self) -> Any:
        """What the run was given as such."""
        return self._learner.optimizer

    @property
    def ema_params(self) -> Tree:
        """The moving average of the parameters; None without ``ema_decay``."""
        return self._learner.ema_params

    @property
    def state(self) -> Tree:
        """The state behind the last step that was trained on, detached."""
        return self._behind

    @property
    def history(self) -> list[Report]:
        """What was reported so far."""
        return self._meter.history

    @property
    def seconds(self) -> float:
        """How long the run took so far, all its parts together."""
        return self._meter.seconds

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Update]:
        """As a generator, which is closed where a loop is left: the checkpoint is written then."""
        try:
            while (update := next(self, None)) is not None:
                yield update
        except BaseException as error:
            if not self._left:
                if self._together is not None:
                    self._together.tell(error, self._learner)
                self._save_new()
            raise

    def __next__(self) -> Update:
        self._left = False
        try:
            if self._finished:
                update = None
            else:
                self._go_on() if self._begun else self._begin()
                update = None if self._finished else self._next_update()
            if update is None:
                if self._together is not None:
                    self._together.close(self._learner)
                self.finish()
        except BaseException as error:
            self._leave(error)
            raise
        if update is None:
            raise StopIteration
        return update

    def _begin(self) -> None:
        self._meter.start()
        if self._stand is None:
            self._cursor.begin(0)
            emit(self._events.epoch_start, 0)
        else:
            self._cursor.load_state_dict(self._stand["cursor"], self._place)
        if self._progress:
            self._bar = ProgressBar(self._total_updates(), self.index)
        self._begun = True

    def _go_on(self) -> None:
        """What is to be done between two updates, when the caller is done with the last one."""
        if self._checkpoint is None:
            return
        if self.index % self._checkpoint_every == 0 and self._saved != self.index:
            self._report()
            self._save_new()
        self._stand = self._standing()

    def _leave(self, error: BaseException) -> None:
        """An error goes to the caller, or Ctrl-C: all updates up to now are kept."""
        self._left = True
        self._learner.forget()
        if self._together is not None:
            self._together.tell(error, self._learner)
        self._close_bar()
        try:
            self._save_new()
        except Exception as failed:
            error.add_note(f"ftbptt: the checkpoint could not be written either: {failed}")

    def _total_updates(self) -> int | None:
        limits, steps = self._limits, self._cursor.source.total
        if steps is None or limits.epochs is None:
            return limits.updates
        windows = self._cursor.truncation.updates(steps)
        updates = limits.epochs * -(-windows // limits.accumulate)
        return updates if limits.updates is None else min(updates, limits.updates)

    def _next_update(self) -> Update | None:
        """The next update; None where the run ends."""
        while self._limits.updates is None or self.index < self._limits.updates:
            measured, due = self._gather(), None
            if self._together is not None:
                measured, due, stops = self._together.update(
                    self._learner, measured, self.index, self._meter.is_due(), self._finished
                )
                self._finished |= stops
            if self._finished:
                return None
            if measured is None:
                if not self._next_epoch():
                    return None
                continue
            update = self._update(measured, due)
            if update is not None or self._finished:
                return update
        return None

    def _gather(self) -> Measured | None:
        """The windows of an update, fewer at the end of an epoch; None if there are none."""
        windows: list[Measured] = []
        while len(windows) < self._limits.accumulate:
            span = self._cursor.take(self._place)
            if span is None:
                break
            ran = self._windows.run(span, self._place, self.index)
            if ran is None:
                self._finished = True
                return None
            self._behind, self._place = ran.behind, ran.place
            self._cursor.prefetch(ran.place)
            if ran.measured is not None:
                windows.append(ran.measured)
        if len(windows) == 1:
            return windows[0]
        return Measured.joined(windows) if windows else None

    def _next_epoch(self) -> bool:
        """Ends the epoch; whether there is another one."""
        epoch = self._place.epoch
        if self._place.index == 0 and self._together is None:
            raise ValueError(
                "data: no window has a step with a loss. Give a longer stream, or a smaller k1, "
                "burn_in or context."
            )
        if self._events.sequence_end:
            emit(self._events.sequence_end, SequenceEnd(self._place.end, None))
        emit(self._events.epoch_end, epoch)
        if self._limits.epochs is not None and epoch + 1 >= self._limits.epochs:
            return False
        self._place = Place(epoch + 1, 0, 0, self._initial)
        self._cursor.begin(epoch + 1)
        emit(self._events.epoch_start, epoch + 1)
        return True

    def _update(self, measured: Measured, due: bool | None) -> Update | None:
        """The optimizer's step; None if it was not made.

        ``due``: whether losses are to be read then, if that is not for this process to say.
        """
        grads, norm = self._learner.ready()
        if norm is not None and self._learner.scaler is None and not self._guard.is_sound(norm):
            self._finished |= self._guard.stops(
                f"the gradient's norm is {float(norm)} in update {self.index}",
                "The run stops before that update; the parameters are those before it.",
            )
            return None
        if self._events.before_update:
            emit(self._events.before_update, grads)
        place = self._place
        # In a run that is saved, Ctrl-C must not leave some parameters updated and others not.
        with uninterrupted() if self._checkpoint is not None else nullcontext():
            self._whole = False
            self._learner.step(grads)
            self._whole, self._stand = True, None
            self.index += 1
            self._meter.add(measured)
            due = self._meter.is_due() if due is None else due
            update = self._last = Update(
                self.index - 1, place.epoch, place.end, measured.loss, measured.weight,
                self._learner.params, self._behind, self._meter.tokens_per_second, grads, norm,
            )  # fmt: skip
            report = self._read(update) if due else None
        if report is not None:
            self._tell(report)
        if self._events.after_update:
            emit(self._events.after_update, update)
        return update

    # -- what is seen of it ---------------------------------------------------------------------

    def _report(self) -> None:
        """Reads the losses since the last time, which waits for the device."""
        if self._last is not None:
            self._tell(self._read(self._last))

    def _read(self, update: Update) -> Report:
        self._last = None
        report = self._meter.report(update, self._learner.learning_rate)
        if math.isfinite(report.loss):
            self._learner.after_report(report.loss)
            if self._limits.stop is not None and self._limits.stop(report.loss):
                self._stopped = self._finished = True
        return report

    def _tell(self, report: Report) -> None:
        if self._bar is not None:
            self._bar.show(report)
        emit(self._events.report, report)
        if not math.isfinite(report.loss):
            words = nonfinite_parameter(self._learner.params) or "its parameters are finite"
            self._finished |= self._guard.stops(
                f"the mean loss up to update {report.index} is {report.loss}, first that of update "
                f"{self._meter.first_nonfinite}: {words}",
                "The run stops; updates with such a loss have been made. on_nonfinite='skip' looks "
                "at each loss before its update.",
            )

    def finish(self) -> None:
        """Ends the run: reads the last losses, and writes the checkpoint.

        For a caller of ``next`` who has enough; a loop that is left, or comes to its end, writes
        the checkpoint by itself.
        """
        self._finished = True
        self._report()
        self._close_bar()
        self._save_new()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # -- stopping and going on ------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the run as it was after the last update.

        It is written by itself every ``checkpoint_every`` updates, at the end, where a loop over
        the run is left, on an error and on Ctrl-C. Raises RuntimeError for a run without
        ``checkpoint=``.
        """
        if self._checkpoint is None:
            raise RuntimeError("this run has no checkpoint: train_stream(..., checkpoint='run.pt')")
        save_checkpoint(self._checkpoint, self.state_dict())
        self._saved = self.index

    def _save_new(self) -> None:
        """Writes the checkpoint if it has not got the last update, and that is worth keeping."""
        if self._checkpoint is None or self._saved == self.index:
            return
        if not self._whole or self._guard.lost:
            return
        if self._meter.unread_is_finite():
            self.save()

    def _standing(self) -> dict[str, Any]:
        place = self._place
        return {
            "place": [place.epoch, place.index, place.position, place.end],
            "state": as_plain(place.state),
            "behind": as_plain(self._behind),
            "cursor": self._cursor.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """The run as it was after the last update: tensors, numbers, strings, lists and dicts."""
        stop: Any = self._limits.stop
        return {
            "format": 1,
            "windows": asdict(self._cursor.truncation),
            "index": self.index,
            **(self._standing() if self._stand is None else self._stand),
            "learner": self._learner.state_dict(),
            "meter": self._meter.state_dict(),
            "stop": stop.state_dict() if hasattr(stop, "state_dict") else None,
            "stopped": self._stopped,
            "extra": self.extra,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave, before the first update of this run.

        Parameters and the optimizer's tensors are written in place. A run that ``stop`` had ended
        has ended. Raises ValueError, with nothing written, for a run of another model or with other
        options.
        """
        if not isinstance(state, dict) or state.get("format") != 1:
            raise ValueError("checkpoint: it holds something else than a run of train_stream.")
        windows = asdict(self._cursor.truncation)
        if state["windows"] != windows:
            raise ValueError(
                f"checkpoint: made with {_words(state['windows'])}, but this run has "
                f"{_words(windows)}. Resume with the options that the run was started with."
            )
        learner = self._learner
        stop: Any = self._limits.stop
        learner.check(state["learner"])
        device = tree_leaves(learner.params)[0].device
        epoch, index, position, end = state["place"]
        carried = from_plain(state["state"], self._initial, device)
        self._behind = from_plain(state["behind"], self._initial, device)
        self._place = Place(epoch, index, position, carried, end)
        learner.load_state_dict(state["learner"])
        self._meter.load_state_dict(state["meter"], device)
        if state["stop"] is not None and hasattr(stop, "load_state_dict"):
            stop.load_state_dict(state["stop"])
        if stop is not None:
            self._finished = bool(getattr(stop, "reached", state["stopped"]))
        self.index = self._saved = state["index"]
        self.extra = state["extra"]
        self._stand = {name: state[name] for name in ("place", "state", "behind", "cursor")}


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
