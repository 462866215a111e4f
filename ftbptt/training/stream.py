"""A run on a stream: how it begins, is left, goes on and ends, and when it is saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from torch import Tensor

from .._trees import tree_map
from ..distributed.ranks import RankFailed
from .cursor import Cursor
from .events import Events
from .learner import Learner
from .monitor import Monitor
from .nonfinite import Guard
from .rank_sync import RankSync
from .report import Meter, Report
from .segments import Segments
from .stores import Store
from .trainer import Limits, Trainer
from .update import Update
from .window_run import WindowRunner

Tree = Any


class Phase(Enum):
    """Where a run is in its life."""

    NEW = auto()
    RUNNING = auto()
    LEFT = auto()  # by an error, Ctrl-C or ``break``; the next update goes on
    ENDED = auto()


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
        together: RankSync | None,
    ) -> None:
        initial = state if state is None else tree_map(Tensor.detach, state)
        self._guard = guard = Guard(limits.on_nonfinite, learner)
        self._watch = Monitor(meter, events, guard, learner, limits.stop, progress)
        windows = WindowRunner(
            segments, learner, cursor.truncation, initial, guard, events, limits.micro_batches,
            together if limits.accumulate == 1 else None,
        )  # fmt: skip
        keeps_standing = store is not None or together is not None
        self._trainer = Trainer(windows, cursor, self._watch, limits, together, keeps_standing)
        self._learner, self._cursor, self._together = learner, cursor, together
        self._store, self._checkpoint_every = store, checkpoint_every
        self._phase = Phase.NEW
        self._has_begun = False
        self._saved = 0  # the index that the checkpoint has
        self.extra: dict[str, Any] = {}

    @property
    def index(self) -> int:
        """How many updates were made."""
        return self._trainer.index

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
        return self._trainer.behind

    @property
    def history(self) -> list[Report]:
        """What was reported so far; of a very long run every second one, or fewer of the oldest."""
        return self._watch.meter.history

    @property
    def seconds(self) -> float:
        """How long the run took so far, all its parts together.

        With a mesh: up to its last update, by the first rank's clock, and so the same on all.
        """
        return self._watch.meter.seconds if self._together is None else self._trainer.seconds

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Update]:
        """As a generator, which is closed where a loop is left: the checkpoint is written then."""
        try:
            while (update := next(self, None)) is not None:
                yield update
        except BaseException as error:
            if self._phase is not Phase.LEFT:
                self._leave(error)
            raise

    def __next__(self) -> Update:
        try:
            update = None if self._phase is Phase.ENDED else self._go_on()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, StopIteration):  # it would end the loop without a word
                raise RuntimeError("a function that the run called raised StopIteration") from error
            raise
        if update is None:
            raise StopIteration
        return update

    def _go_on(self) -> Update | None:
        """The next update; None where the run ends."""
        trainer, update = self._trainer, None
        if not trainer.ended:
            phase, self._phase = self._phase, Phase.RUNNING
            if phase is Phase.LEFT:
                self._join_again()
            if not self._has_begun:
                self._begin()
            elif phase is Phase.RUNNING and trainer.standing is None:
                self._save_when_due()
                trainer.stand()
        if not trainer.ended:  # as a rank can learn where they save
            update = trainer.next_update()
        if update is None:
            if self._together is not None:
                self._together.close(self.index)
            self.finish()
        return update

    def _begin(self) -> None:
        self._watch.begin(self._trainer.total_updates(), self.index)
        self._trainer.begin()
        self._has_begun = True
        if self._store is not None and self._store.replaces:
            # Else a restart would go on with the run that was there.
            with self._trainer.undisturbed():
                if not self._trainer.ends_on_a_rank():
                    self._store.offer(self.index, self.state_dict, last=False)

    def _join_again(self) -> None:
        """A run that was left goes on, on all ranks; an update that was not made begins anew."""
        if self._together is not None:
            self._together.left = False
        if self._has_begun:
            self._watch.draw(self._trainer.total_updates(), self.index)
            self._trainer.go_back()

    def _save_when_due(self) -> None:
        """Between two updates, when the caller is done with the last one."""
        is_due = self.index % self._checkpoint_every == 0 and self._saved != self.index
        if is_due and self._store is not None:
            self._trainer.tell(self._watch.read())
            with self._trainer.undisturbed():
                if not self._trainer.ends_on_a_rank():
                    self._save_new(last=False)

    def _leave(self, error: BaseException) -> None:
        """The run is left, by an error or Ctrl-C: all updates up to now are kept."""
        self._learner.forget()
        self._watch.close()
        with self._trainer.undisturbed():
            try:
                if self._together is not None:
                    left = isinstance(error, GeneratorExit)
                    words = "its loop over the run was left" if left else _sentence(error)
                    self._together.tell(words)
            except RankFailed as failed:
                _add_note(error, f"ftbptt: the other ranks could not be told: {failed}")
            try:
                self._save_new(last=True)
            except Exception as failed:
                _add_note(error, f"ftbptt: the checkpoint could not be written: {failed}")
            self._phase = Phase.LEFT

    def finish(self) -> None:
        """Ends the run: reads the last losses, and writes the checkpoint.

        For a caller of ``next`` who has enough; a loop that is left, or comes to its end, writes
        the checkpoint by itself.
        """
        self._trainer.tell(self._watch.read())
        self._trainer.ended = True
        self._watch.close()
        self._cursor.close()
        with self._trainer.undisturbed():
            if self._together is not None:
                self._together.tell("its run was finished")
            self._save_new(last=True)
            self._phase = Phase.ENDED

    # -- stopping and going on ------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the run as it was after the last update.

        It is written by itself every ``checkpoint_every`` updates, at the end, where a loop over
        the run is left, on an error and on Ctrl-C. With a mesh, all ranks have to call it. Raises
        RuntimeError for a run without ``checkpoint=``.
        """
        if self._store is None:
            raise RuntimeError("this run has no checkpoint: train_stream(..., checkpoint='run.pt')")
        if not self._has_begun and self._trainer.standing is None:
            self._begin()
        with self._trainer.undisturbed():
            together = self._together
            if together is not None and not together.left and self._trainer.ends_on_a_rank():
                return  # all of them save where it ends
            if self._store.offer(self.index, self.state_dict, last=True):
                self._saved = self.index

    def _save_new(self, *, last: bool) -> None:
        """Writes the checkpoint if it has not got the last update, and that is worth keeping."""
        parted = self._together is not None and self._phase in (Phase.LEFT, Phase.ENDED)
        if self._store is None or parted:  # the ranks do nothing together any more
            return
        worth = self._saved != self.index and self._trainer.is_whole and not self._guard.lost
        index = self.index if worth and self._watch.meter.unread_is_finite() else None
        if self._store.offer(index, self.state_dict, last=last):
            self._saved = self.index

    def state_dict(self) -> dict[str, Any]:
        """The run as it was after the last update: tensors, numbers, strings, lists and dicts."""
        return {
            "format": 1,
            "seconds": self.seconds,
            **self._trainer.state_dict(),
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
        self._trainer.load_state_dict(state)
        self._trainer.seconds = state.get("seconds", 0.0)
        self._saved = self.index
        self.extra = state["extra"]


def _add_note(error: BaseException, words: str) -> None:
    """Says it with the error; where a loop is left by ``break``, nobody would see that."""
    if isinstance(error, GeneratorExit):
        warnings.warn(words, RuntimeWarning, stacklevel=2)
    else:
        error.add_note(words)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
