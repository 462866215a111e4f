"""A run on a stream: how it begins, is left, continues and ends, and when it is saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from enum import Enum, auto
from traceback import extract_stack
from typing import Any

from .._trees import Tree
from .._warnings import warn
from ..distributed.ranks import RankFailed
from .checkpoints.stores import Store
from .reports.report import Report
from .trainer import Trainer
from .updates.update import Update


class Phase(Enum):
    """Where a run is in its life.

    ========  =====================================  =============================================
    phase     the run                                next phase
    ========  =====================================  =============================================
    NEW       has made no update in this process     RUNNING by ``next``; ENDED by ``finish``
    RUNNING   makes updates                          LEFT by an error, Ctrl-C or ``break``;
                                                     ENDED by ``finish``, or without more updates
    LEFT      has told the other ranks, and saved    RUNNING by ``next``, which rewinds to the
                                                     update in progress; ENDED by ``finish``
    ENDED     has read the last losses, and saved    none: ``next`` raises StopIteration
    ========  =====================================  =============================================
    """

    NEW = auto()
    RUNNING = auto()
    LEFT = auto()
    ENDED = auto()


class Stream(Iterator[Update]):
    """Updates on a stream, one for each ``next``; made by :func:`train_stream`.

    ``extra`` is a dict for the caller's own data, which is saved in checkpoints.

    >>> import ftbptt, torch
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager"
    ... )
    >>> params = dict(cell.named_parameters())
    >>> run = ftbptt.training.train_stream(
    ...     segment, params, None, (torch.randn(100, 2, 3), None),
    ...     torch.optim.Adam(params.values()), k1=25, interval=0, progress=False,
    ... )
    >>> next(run)
    Update(index=0, epoch=0, position=25)
    >>> run.finish()
    >>> run
    Stream(updates=1, epoch=0, position=25)
    >>> len(run.history), run.state.shape
    (1, torch.Size([2, 5]))
    """

    def __init__(self, trainer: Trainer, store: Store | None, checkpoint_every: int) -> None:
        self._trainer, self._store, self._checkpoint_every = trainer, store, checkpoint_every
        self._learner, self._cursor, self._guard = trainer.learner, trainer.cursor, trainer.guard
        self._monitor, self._rank_sync = trainer.monitor, trainer.rank_sync
        self._phase = Phase.NEW
        self._has_begun = False  # the clock runs, and the data is being read
        self._saved = 0  # the number of updates that the checkpoint has
        self.extra: dict[str, Any] = {}

    @property
    def index(self) -> int:
        """The number of updates that were made."""
        return self._trainer.index

    @property
    def params(self) -> Tree:
        """The parameters after the last update."""
        return self._learner.params

    @property
    def optimizer(self) -> Any:
        """The ``optimizer`` of :func:`train_stream`."""
        return self._learner.optimizer

    @property
    def ema_params(self) -> Tree:
        """The moving average of the parameters; None without ``ema_decay``."""
        return self._learner.ema_params

    @property
    def state(self) -> Tree:
        """The state after the last step that was trained on, detached."""
        return self._trainer.state_after

    @property
    def history(self) -> list[Report]:
        """The reports so far. Of a very long run the older ones are thinned out."""
        return self._monitor.meter.history

    @property
    def seconds(self) -> float:
        """How long the run has taken, including the time before it was resumed.

        With a mesh, up to its last update by the first rank's clock, so it is the same on all.
        """
        return self._monitor.meter.seconds if self._rank_sync is None else self._trainer.seconds

    def __repr__(self) -> str:
        place = self._trainer.place
        return f"Stream(updates={self.index}, epoch={place.epoch}, position={place.end})"

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Update]:
        """A generator: it is closed when a loop is left, and the checkpoint is written then."""
        try:
            while (update := next(self, None)) is not None:
                yield update
        except BaseException as error:
            if self._phase is Phase.RUNNING:
                self._leave(error)
            raise

    def __next__(self) -> Update:
        try:
            update = None if self._phase is Phase.ENDED else self._next_update()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, StopIteration):  # it would silently end the loop
                raise RuntimeError("a function that the run called raised StopIteration") from error
            raise
        if update is None:
            raise StopIteration
        return update

    def _next_update(self) -> Update | None:
        """The next update; None if the run ends."""
        trainer = self._trainer
        if not trainer.ended:
            self._run()
        # The run may have ended by now: a rank learns that from the others where all save.
        update = None if trainer.ended else trainer.next_update()
        if update is None:
            if self._rank_sync is not None:
                self._rank_sync.close(self.index)
            self.finish()
        return update

    def _run(self) -> None:
        """Enters the phase RUNNING, and prepares the next update."""
        previous, self._phase = self._phase, Phase.RUNNING
        if previous is Phase.LEFT:
            self._return()
        if not self._has_begun:
            self._begin()
        elif self._trainer.resume_point is None:
            if previous is Phase.RUNNING:  # otherwise it was saved, and not all ranks may be here
                self._save_when_due()
            self._trainer.set_resume_point()

    def _begin(self) -> None:
        if self._store is not None:
            self._store.begin()
        self._monitor.begin(self._trainer.total_updates(), self.index)
        self._trainer.begin()
        self._has_begun = True
        self._guard.begin()
        if self._store is not None and self._store.replaces:
            # Otherwise a restart would resume the old run.
            with self._trainer.uninterrupted():
                if not self._trainer.ends_on_a_rank(when_due=True):
                    self._store.offer(self.index, self.state_dict, last=False)

    def _begin_to_be_saved(self) -> None:
        """Begins a new run: its data may draw an order from the random numbers of this moment."""
        if not self._has_begun and self._trainer.resume_point is None:
            self._begin()

    def _return(self) -> None:
        """A run that was left continues, on all ranks. It goes back to the update in progress."""
        if self._rank_sync is not None:
            self._rank_sync.has_left = False
        if self._has_begun:
            self._monitor.draw(self._trainer.total_updates(), self.index)
            self._trainer.rewind()

    def _save_when_due(self) -> None:
        """Saves between two updates, when the caller is done with the last one."""
        is_due = self.index % self._checkpoint_every == 0 and self._saved != self.index
        if is_due and self._store is not None:
            self._trainer.publish(self._monitor.read())
            with self._trainer.uninterrupted():
                if not self._trainer.ends_on_a_rank(when_due=True):
                    self._save_if_new(last=False)

    def _leave(self, error: BaseException) -> None:
        """The run is left by an error, Ctrl-C or ``break``: saves all updates so far."""
        self._learner.forget()
        self._monitor.close()
        with self._trainer.uninterrupted():
            try:
                if self._rank_sync is not None:
                    self._rank_sync.leave(_reason(error))
            except RankFailed as failure:
                _add_note(error, f"ftbptt: the other ranks could not be told: {failure}")
            try:
                self._save_if_new(last=True)
            except Exception as failure:
                _add_note(error, f"ftbptt: the checkpoint could not be written: {failure}")
            self._phase = Phase.LEFT

    def finish(self) -> None:
        """Ends the run: reads the last losses, and writes the checkpoint.

        Call it after ``next``. A loop over the run does this at its end, and writes the checkpoint
        where it is left.
        """
        self._trainer.publish(self._monitor.read())
        self._trainer.ended = True
        self._monitor.close()
        self._cursor.close()
        with self._trainer.uninterrupted():
            if self._rank_sync is not None:
                self._rank_sync.leave("its run was finished")
            self._save_if_new(last=True)
            self._phase = Phase.ENDED

    # -- saving and resuming --------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the run after the last update.

        The run also saves itself: every ``checkpoint_every`` updates, at the end, where a loop over
        it is left, on an error and on Ctrl-C. With a mesh, all ranks must call this. Raises
        RuntimeError for a run without ``checkpoint=``, and as :meth:`state_dict`.
        """
        if self._store is None:
            raise RuntimeError("this run has no checkpoint: train_stream(..., checkpoint='run.pt')")
        self._begin_to_be_saved()
        with self._trainer.uninterrupted():
            meets_others = self._rank_sync is not None and not self._rank_sync.has_left
            if meets_others and self._trainer.ends_on_a_rank(when_due=False):
                return  # all ranks save when it ends
            if self._store.offer(self._unless_spoiled(), self.state_dict, last=True):
                self._saved = self.index

    def _save_if_new(self, *, last: bool) -> None:
        """Saves the run, if the checkpoint lacks the last update and that is worth saving."""
        # Once a run with ranks is left, they make no more collectives.
        has_parted = self._rank_sync is not None and self._phase in (Phase.LEFT, Phase.ENDED)
        if self._store is None or has_parted:
            return
        is_new = (
            self._saved != self.index
            and self._trainer.is_consistent
            and not self._guard.lost
            # In an ensemble, models that are not finite have stopped, as they were before that.
            and (
                self._learner.stopped_models.flags is not None
                or self._monitor.meter.unread_is_finite()
            )
        )
        index = self._unless_spoiled() if is_new else None
        if self._store.offer(index, self.state_dict, last=last):
            self._saved = self.index

    def _unless_spoiled(self) -> int | None:
        """The number of updates; None, with a warning, if parameters have become NaN or infinite.

        A gradient may be NaN under a finite loss. The good checkpoint stays.
        """
        if problem := self._guard.spoiled():
            warn(f"ftbptt: no checkpoint is written: {problem}.", RuntimeWarning)
            return None
        return self.index

    def state_dict(self) -> dict[str, Any]:
        """The run after the last update: tensors, numbers, strings, lists and dicts.

        The tensors are the run's own, which the next update changes: copy what is to be kept. Of a
        sharded optimizer it is a collective: call it on all ranks. Raises RuntimeError while the
        optimizer's step is made, and after one that failed: the parameters are of no update then.
        """
        if not self._trainer.is_consistent:
            raise RuntimeError(
                f"state_dict: the optimizer's step of update {self.index} was not made to its end, "
                "so the parameters are neither those before it nor those after it. Save the run "
                "between two updates, or resume it from its last checkpoint."
            )
        self._begin_to_be_saved()
        return {
            "format": 1,
            "seconds": self.seconds,
            **self._trainer.state_dict(),
            "extra": self.extra,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, of which it keeps nothing.

        Call it before the first ``next``; to go back in a run, load into a new one. Writes the
        parameters, the module's buffers and the optimizer's tensors in place. A run that ``stop``
        had ended stays ended. Raises RuntimeError for a run that has begun; ValueError, before it
        writes anything, for the state of another model or of a run with other options.
        """
        if self._has_begun:
            raise RuntimeError(
                "load_state_dict: this run has begun. Call train_stream again, and load into the "
                "run that it returns."
            )
        self._restore(copy.deepcopy(state))

    def resume(self, state: dict[str, Any]) -> None:
        """As :meth:`load_state_dict`, of what the run's checkpoint holds. Keeps its tensors."""
        self._restore(state)
        self._saved = self.index

    def _restore(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.get("format") != 1:
            raise ValueError("checkpoint: it does not hold a run of train_stream.")
        self._trainer.load_state_dict(state)
        self._trainer.seconds = state["seconds"]
        self.extra = state["extra"]


def _reason(error: BaseException) -> str:
    """Why the run was left, for other ranks."""
    if not isinstance(error, GeneratorExit):
        return f"{type(error).__name__}: {error}"
    # A generator that is closed does not see the error, but who closes it stands where it was left.
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ else None
    place = extract_stack(frame, limit=1)[0]
    return (
        f"its loop over the run was left in line {place.lineno} of {place.filename}: {place.line}"
    )


def _add_note(error: BaseException, message: str) -> None:
    """Adds a note to the error; warns instead for ``break``, whose GeneratorExit nobody sees."""
    if isinstance(error, GeneratorExit):
        warn(message, RuntimeWarning)
    else:
        error.add_note(message)
