"""The driver: windows of a stream through ``train_segment`` into an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from .._interrupt import uninterrupted
from .._trees import tree_leaves, tree_map
from ..distributed.ranks import RankFailed
from .cursor import Cursor, Place
from .events import Events, SequenceEnd, emit
from .measured import Measured
from .nonfinite import Guard
from .optimizing import Learner
from .report import Meter, Report
from .segments import Segments
from .standing import Standing
from .stores import Store
from .together import Together
from .update import Update
from .watch import Watch
from .window_run import WindowRunner

Tree = Any
_AS_IT_IS = nullcontext()


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
        store: Store | None,
        checkpoint_every: int,
        progress: bool,
        together: Together | None,
    ) -> None:
        self._together = together
        self._cursor, self._learner = cursor, learner
        self._events, self._limits = events, limits
        self._store, self._checkpoint_every = store, checkpoint_every
        self._initial = state if state is None else tree_map(Tensor.detach, state)
        self._guard = guard = Guard(limits.on_nonfinite, learner)
        self._watch = Watch(meter, events, guard, learner, limits.stop, progress)
        self._windows = WindowRunner(
            segments, learner, cursor.truncation, self._initial, guard, events,
            limits.micro_batches, together if limits.accumulate == 1 else None,
        )  # fmt: skip
        self._place = Place(0, 0, 0, self._initial)  # after the last window
        self._behind = self._initial  # the state after the last window's last step
        # Where the run stood before the work on the next update began; None between two updates.
        self._stand: Standing | None = None
        # Whether an update that is left undone is begun anew, with all of its windows. That costs
        # as much as a small window: for a run that is saved, and for ranks, which have not all run
        # the same ones.
        self._goes_back = store is not None or together is not None
        self._whole = True  # the parameters are all of the same update
        self._had_windows = False  # in this epoch, on any rank
        self._saved = 0  # the index that the checkpoint has
        self._begun = self._finished = False
        self._left = False  # by an error
        self._seconds_of_all = 0.0
        self._parted = False  # from the other ranks: nothing is done together any more
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
        """The state after the last step that was trained on, detached."""
        return self._behind

    @property
    def history(self) -> list[Report]:
        """What was reported so far; of a very long run every second one, or fewer of the oldest."""
        return self._watch.meter.history

    @property
    def seconds(self) -> float:
        """How long the run took so far, all its parts together.

        With a mesh: up to its last update, by the first rank's clock, and so the same on all.
        """
        return self._watch.meter.seconds if self._together is None else self._seconds_of_all

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Update]:
        """As a generator, which is closed where a loop is left: the checkpoint is written then."""
        try:
            while (update := next(self, None)) is not None:
                yield update
        except BaseException as error:
            if not self._left:
                self._leave(error)
            raise

    def __next__(self) -> Update:
        go_on = self._left and self._begun and not self._finished
        self._left = False
        try:
            if go_on:
                self._join_again()
            if self._finished:
                update = None
            else:
                if not self._begun:
                    self._begin()
                elif self._goes_back and self._stand is None:
                    self._go_on()
                update = None if self._finished else self._next_update()
            if update is None:
                if self._together is not None:
                    self._together.close(self.index)
                self.finish()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, StopIteration):  # it would end the loop without a word
                raise RuntimeError("a function that the run called raised StopIteration") from error
            raise
        if update is None:
            raise StopIteration
        return update

    def _begin(self) -> None:
        self._watch.begin(self._total_updates(), self.index)
        if self._stand is None:
            self._cursor.begin(0)
            emit(self._events.epoch_start, 0)
        else:
            self._stand.go_back(self._cursor, self._windows.segments)
        self._begun = True
        if self._goes_back:
            self._take_stand()
            if self._store is not None and self._store.replaces:
                # Else a restart would go on with the run that was there.
                with self._undisturbed():
                    if not self._ends_on_a_rank():
                        self._store.offer(self.index, self.state_dict, last=False)

    def _join_again(self) -> None:
        """A run that was left goes on, on all ranks; an update that was not made begins anew."""
        self._watch.draw(self._total_updates(), self.index)
        if self._together is not None:
            self._parted = self._together.left = False
        if self._stand is not None and self._whole:
            self._place, self._behind = self._stand.place, self._stand.behind
            self._stand.go_back(self._cursor, self._windows.segments)

    def _go_on(self) -> None:
        """What is kept between two updates, when the caller is done with the last one."""
        is_due = self.index % self._checkpoint_every == 0 and self._saved != self.index
        if is_due and self._store is not None:
            self._tell(self._watch.read())
            with self._undisturbed():
                if not self._ends_on_a_rank():
                    self._save_new(self._store, last=False)
        self._take_stand()

    def _ends_on_a_rank(self) -> bool:
        """Whether the run has ended, on whatever rank; before they save all come to this."""
        if self._together is not None:
            self._finished |= self._together.check(self.index, self._finished)
        return self._finished

    def _take_stand(self) -> None:
        """Here the next update begins: what is left undone is saved, and done again, from here."""
        self._stand = self._standing()

    def _standing(self) -> Standing:
        return Standing.of(self._place, self._behind, self._cursor, self._windows.segments)

    def _leave(self, error: BaseException) -> None:
        """The run is left, by an error or Ctrl-C: all updates up to now are kept."""
        self._left = True
        self._learner.forget()
        self._watch.close()
        with self._undisturbed():
            try:
                if self._together is not None:
                    left = isinstance(error, GeneratorExit)
                    words = "its loop over the run was left" if left else _sentence(error)
                    self._together.tell(words)
            except RankFailed as failed:
                _add_note(error, f"ftbptt: the other ranks could not be told: {failed}")
            try:
                self._save_new(self._store, last=True)
            except Exception as failed:
                _add_note(error, f"ftbptt: the checkpoint could not be written: {failed}")
            self._parted = self._together is not None

    def _undisturbed(self) -> AbstractContextManager[object]:
        """Where something can be lost, Ctrl-C must not leave it half done."""
        return uninterrupted() if self._goes_back else _AS_IT_IS

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
            measured, more = self._gather()
            if self._together is None:
                update = None if measured is None or self._finished else self._update(measured)
            else:
                # With Ctrl-C all ranks stop before the update, or all after it.
                with self._undisturbed():
                    update, more = self._update_of_all(measured, more, self._together)
            self._had_windows |= more
            if update is not None or self._finished:
                return update
            if not more and not self._next_epoch():
                return None
        return None

    def _update_of_all(
        self, measured: Measured | None, more: bool, together: Together
    ) -> tuple[Update | None, bool]:
        """What was made of the windows of all ranks, and whether any of them had one."""
        joined = together.update(
            measured, more, self.index, self._watch.meter.is_due(), self._finished,
            self._watch.meter.seconds,
        )  # fmt: skip
        self._finished |= bool(joined.stopping)
        self._seconds_of_all = joined.seconds
        if joined.measured is None or self._finished:
            return None, joined.more
        return self._update(joined.measured, joined.due), joined.more

    def _gather(self) -> tuple[Measured | None, bool]:
        """The windows of an update, fewer at the end of an epoch; whether there were any.

        One that does not count is made up for by the next, but not where others would wait.
        """
        self._learner.begin_update()
        windows: list[Measured] = []
        wanted, more = self._limits.accumulate, False
        while wanted:
            span = self._cursor.take(self._place)
            if span is None:
                break
            more = True
            ran = self._windows.run(span, self._place, self.index)
            if ran is None:
                self._finished = True
                return None, True
            measured, self._behind, self._place = ran
            if measured is not None:
                windows.append(measured)
            if measured is not None or self._together is not None:
                wanted -= 1
            self._cursor.prefetch(self._place, of_next_update=not wanted)
        if len(windows) == 1:
            return windows[0], True
        return Measured.joined(windows) if windows else None, more

    def _next_epoch(self) -> bool:
        """Ends the epoch; whether there is another one."""
        epoch = self._place.epoch
        if not self._had_windows:
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
        self._had_windows = False
        self._cursor.begin(epoch + 1)
        emit(self._events.epoch_start, epoch + 1)
        return True

    def _update(self, measured: Measured, due: bool | None = None) -> Update | None:
        """The optimizer's step; None if it was not made.

        ``due``: whether losses are to be read then, if that is not for this process to say.
        """
        grads, norm = self._learner.ready()
        clips = self._learner.clip_norm is not None and self._learner.scaler is None
        if clips and norm is not None and not self._guard.is_sound(norm):
            self._finished |= self._guard.stops(
                f"the gradient's norm is {float(norm)} in update {self.index}",
                "The run stops before that update; the parameters are those before it.",
            )
            return None
        try:
            if self._events.before_update:
                emit(self._events.before_update, grads)
        except BaseException:
            if self._learner.is_sharded:  # the other ranks make this update, and need our part
                self._whole = False
                self._learner.step(grads)
            raise
        if norm is None and self._learner.changes_gradients:
            norm = get_total_norm(grads)
        place = self._place
        with self._undisturbed():
            self._whole = False
            stepped = self._learner.step(grads)
            self._whole, self._stand = True, None
            self.index += 1
            is_due = self._watch.meter.add(measured)
            update = Update(
                self.index - 1, place.epoch, place.end, measured.loss, measured.weight,
                self._learner.params, self._behind, self._watch.meter.tokens_per_second, grads,
                norm,
            )  # fmt: skip
            self._watch.last = update
            if stepped:
                self._learner.follow_schedule()
            report = self._watch.read() if (is_due if due is None else due) else None
        if report is not None:
            self._tell(report)
        if self._events.after_update:
            emit(self._events.after_update, update)
        return update

    def _tell(self, report: Report | None) -> None:
        self._watch.tell(report)
        self._finished |= self._watch.ended

    def finish(self) -> None:
        """Ends the run: reads the last losses, and writes the checkpoint.

        For a caller of ``next`` who has enough; a loop that is left, or comes to its end, writes
        the checkpoint by itself.
        """
        self._tell(self._watch.read())
        self._finished = True
        self._watch.close()
        self._cursor.close()
        with self._undisturbed():
            if self._together is not None:
                self._together.tell("its run was finished")
            self._save_new(self._store, last=True)
            self._parted = self._together is not None

    # -- stopping and going on ------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the run as it was after the last update.

        It is written by itself every ``checkpoint_every`` updates, at the end, where a loop over
        the run is left, on an error and on Ctrl-C. With a mesh, all ranks have to call it. Raises
        RuntimeError for a run without ``checkpoint=``.
        """
        if self._store is None:
            raise RuntimeError("this run has no checkpoint: train_stream(..., checkpoint='run.pt')")
        if not self._begun and self._stand is None:
            self._begin()
        with self._undisturbed():
            if self._together is not None and not self._together.left and self._ends_on_a_rank():
                return  # all of them save where it ends
            if self._store.offer(self.index, self.state_dict, last=True):
                self._saved = self.index

    def _save_new(self, store: Store | None, *, last: bool) -> None:
        """Writes the checkpoint if it has not got the last update, and that is worth keeping."""
        if store is None or self._parted:
            return
        worth = self._saved != self.index and self._whole and not self._guard.lost
        index = self.index if worth and self._watch.meter.unread_is_finite() else None
        if store.offer(index, self.state_dict, last=last):
            self._saved = self.index

    def state_dict(self) -> dict[str, Any]:
        """The run as it was after the last update: tensors, numbers, strings, lists and dicts."""
        return {
            "format": 1,
            "windows": asdict(self._cursor.truncation),
            "index": self.index,
            "seconds": self.seconds,
            **(self._stand or self._standing()).state_dict(),
            "learner": self._learner.state_dict(),
            **self._watch.state_dict(),
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
        learner.check(state["learner"])
        device = tree_leaves(learner.params)[0].device
        start = self._windows.segments.start(learner.params)
        self._stand = stand = Standing.from_state(state, self._initial, start, device)
        self._place, self._behind = stand.place, stand.behind
        learner.load_state_dict(state["learner"])
        self._watch.load_state_dict(state, device)
        self._finished = self._watch.ended
        self.index = self._saved = state["index"]
        self.extra = state["extra"]
        self._had_windows = stand.place.index > 0
        self._seconds_of_all = state.get("seconds", 0.0)


def _add_note(error: BaseException, words: str) -> None:
    """Says it with the error; where a loop is left by ``break``, nobody would see that."""
    if isinstance(error, GeneratorExit):
        warnings.warn(words, RuntimeWarning, stacklevel=2)
    else:
        error.add_note(words)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
