"""Updates, one after another: windows gathered, ranks joined, the optimizer's step, the epochs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from torch.nn.utils import get_total_norm

from .._interrupt import uninterrupted
from .._trees import tree_leaves
from .cursor import Cursor, Place
from .events import SequenceEnd, emit
from .monitor import Monitor
from .rank_sync import RankSync
from .report import Report
from .resume_point import ResumePoint
from .update import Update
from .window_run import WindowRunner
from .window_stats import WindowStats

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


class Trainer:
    """Makes the updates of a run, alone or with other ranks, and knows where the run stands.

    ``keeps_standing``: an update that is left undone is begun anew, with all of its windows. That
    costs as much as a small window: for a run that is saved, and for ranks, which have not all run
    the same ones.
    """

    def __init__(
        self,
        windows: WindowRunner,
        cursor: Cursor,
        watch: Monitor,
        limits: Limits,
        together: RankSync | None,
        keeps_standing: bool,
    ) -> None:
        self.windows, self.cursor, self.watch = windows, cursor, watch
        self.learner, self.guard, self.events = windows.learner, windows.guard, windows.events
        self.limits, self.together, self.keeps_standing = limits, together, keeps_standing
        self.place = Place(0, 0, 0, windows.initial)  # after the last window
        self.behind = windows.initial  # the state after the last window's last step
        # Where the run stood before the work on the next update began; None between two updates.
        self.standing: ResumePoint | None = None
        self.index = 0  # how many updates were made
        self.ended = False  # no update comes any more
        self.is_whole = True  # the parameters are all of the same update
        self.seconds = 0.0  # up to the last update, by the first rank's clock
        self._had_windows = False  # in this epoch, on any rank
        self._told_epochs = 0  # how many have ended, as the caller knows

    def begin(self) -> None:
        """The first epoch, or where a run that is resumed stood."""
        if self.standing is None:
            self.cursor.begin(0)
            emit(self.events.epoch_start, 0)
        else:
            self.standing.go_back(self.cursor, self.windows.segments)
        self.stand()

    def stand(self) -> None:
        """Here the next update begins: what is left undone is saved, and done again, from here."""
        if self.keeps_standing:
            self.standing = self._where()

    def go_back(self) -> None:
        """An update that was not made begins anew."""
        if self.standing is not None and self.is_whole:
            self._stand_at(self.standing)
            self.standing.go_back(self.cursor, self.windows.segments)

    def _stand_at(self, standing: ResumePoint) -> None:
        self.place, self.behind = standing.place, standing.behind
        self._had_windows = standing.had_windows

    def undisturbed(self) -> AbstractContextManager[object]:
        """Where something can be lost, Ctrl-C must not leave it half done."""
        return uninterrupted() if self.keeps_standing else _AS_IT_IS

    def ends_on_a_rank(self) -> bool:
        """Whether the run has ended, on whatever rank; before they save all come to this."""
        if self.together is not None:
            self.ended |= self.together.check(self.index, self.ended)
        return self.ended

    def total_updates(self) -> int | None:
        """How many the run will make, if that is known."""
        limits, steps = self.limits, self.cursor.source.total
        if steps is None or limits.epochs is None:
            return limits.updates
        windows = self.cursor.truncation.updates(steps)
        updates = limits.epochs * -(-windows // limits.accumulate)
        return updates if limits.updates is None else min(updates, limits.updates)

    # -- one update -----------------------------------------------------------------------------

    def next_update(self) -> Update | None:
        """The next update; None where the run ends."""
        while self.limits.updates is None or self.index < self.limits.updates:
            measured, more = self._gather()
            if self.together is None:
                update = None if measured is None or self.ended else self._update(measured)
            else:
                # With Ctrl-C all ranks stop before the update, or all after it.
                with self.undisturbed():
                    update, more = self._update_of_all(measured, more, self.together)
            self._had_windows |= more
            if update is not None or self.ended:
                return update
            if not more and not self._next_epoch():
                return None
        return None

    def _gather(self) -> tuple[WindowStats | None, bool]:
        """The windows of an update, fewer at the end of an epoch; whether there were any.

        One that does not count is made up for by the next, but not where others would wait.
        """
        self.learner.begin_update()
        windows: list[WindowStats] = []
        wanted, more = self.limits.accumulate, False
        while wanted:
            span = self.cursor.take(self.place)
            if span is None:
                break
            more = True
            ran = self.windows.run(span, self.place, self.index)
            if ran is None:
                self.ended = True
                return None, True
            measured, self.behind, self.place = ran
            if measured is not None:
                windows.append(measured)
            if measured is not None or self.together is not None:
                wanted -= 1
            self.cursor.prefetch(self.place, of_next_update=not wanted)
        if len(windows) == 1:
            return windows[0], True
        return WindowStats.joined(windows) if windows else None, more

    def _update_of_all(
        self, measured: WindowStats | None, more: bool, together: RankSync
    ) -> tuple[Update | None, bool]:
        """What was made of the windows of all ranks, and whether any of them had one."""
        meter = self.watch.meter
        joined = together.update(
            measured, more, self.index, meter.is_due(), self.ended, meter.seconds
        )
        self.ended |= bool(joined.stopping)
        self.seconds = joined.seconds
        if joined.measured is None or self.ended:
            return None, joined.more
        return self._update(joined.measured, joined.due), joined.more

    def _update(self, measured: WindowStats, due: bool | None = None) -> Update | None:
        """The optimizer's step; None if it was not made.

        ``due``: whether losses are to be read then, if that is not for this process to say.
        """
        learner = self.learner
        grads, norm = learner.ready()
        clips = learner.clip_norm is not None and learner.scaler is None
        if clips and norm is not None and not self.guard.is_sound(norm):
            self.ended |= self.guard.stops(
                f"the gradient's norm is {float(norm)} in update {self.index}",
                "The run stops before that update; the parameters are those before it.",
            )
            return None
        try:
            if self.events.before_update:
                emit(self.events.before_update, grads)
        except BaseException:
            if learner.is_sharded:  # the other ranks make this update, and need our part
                self.is_whole = False
                learner.step(grads)
            raise
        if norm is None and learner.changes_gradients:
            norm = get_total_norm(grads)
        place, meter = self.place, self.watch.meter
        with self.undisturbed():
            self.is_whole = False
            stepped = learner.step(grads)
            self.is_whole, self.standing = True, None
            self.index += 1
            is_due = meter.add(measured)
            update = Update(
                self.index - 1, place.epoch, place.end, measured.loss, measured.weight,
                learner.params, self.behind, meter.tokens_per_second, grads, norm,
            )  # fmt: skip
            self.watch.last = update
            if stepped:
                learner.follow_schedule()
            report = self.watch.read() if (is_due if due is None else due) else None
        if report is not None:
            self.tell(report)
        if self.events.after_update:
            emit(self.events.after_update, update)
        return update

    def tell(self, report: Report | None) -> None:
        """Says what was read, and ends the run if that is to end it."""
        self.watch.tell(report)
        self.ended |= self.watch.ended

    def _next_epoch(self) -> bool:
        """Ends the epoch; whether there is another one."""
        epoch = self.place.epoch
        if not self._had_windows:
            raise ValueError(
                "data: no window has a step with a loss. Give a longer stream, or a smaller k1, "
                "burn_in or context."
            )
        if epoch == self._told_epochs:  # else it ended before the run was left, or saved
            if self.events.sequence_end:
                emit(self.events.sequence_end, SequenceEnd(self.place.end, None))
            emit(self.events.epoch_end, epoch)
            self._told_epochs = epoch + 1
        if self.limits.epochs is not None and epoch + 1 >= self.limits.epochs:
            return False
        self.place = Place(epoch + 1, 0, 0, self.windows.initial)
        self._had_windows = False
        self.cursor.begin(epoch + 1)
        emit(self.events.epoch_start, epoch + 1)
        return True

    # -- stopping and going on ------------------------------------------------------------------

    def _where(self) -> ResumePoint:
        return ResumePoint.of(
            self.place, self.behind, self._had_windows, self.cursor, self.windows.segments
        )

    def state_dict(self) -> dict[str, Any]:
        """The run as it was after the last update: tensors, numbers, strings, lists and dicts."""
        return {
            "windows": asdict(self.cursor.truncation),
            "index": self.index,
            "told_epochs": self._told_epochs,
            **(self.standing or self._where()).state_dict(),
            "learner": self.learner.state_dict(),
            **self.watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave. Raises ValueError, with nothing written."""
        windows = asdict(self.cursor.truncation)
        if state["windows"] != windows:
            raise ValueError(
                f"checkpoint: made with {_words(state['windows'])}, but this run has "
                f"{_words(windows)}. Resume with the options that the run was started with."
            )
        learner = self.learner
        learner.check(state["learner"])
        device = tree_leaves(learner.params)[0].device
        start = self.windows.segments.start(learner.params)
        self.standing = ResumePoint.from_state(state, self.windows.initial, start, device)
        self._stand_at(self.standing)
        learner.load_state_dict(state["learner"])
        self.watch.load_state_dict(state, device)
        self.ended = self.watch.ended
        self.index = state["index"]
        self._told_epochs = state.get("told_epochs", self.place.epoch)


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
