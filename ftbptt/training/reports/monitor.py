"""What is read of a run while it goes on: reports, the progress bar, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..updates.learner import Learner
from ..updates.nonfinite import Guard, in_words, nonfinite_parameter
from ..updates.update import Update
from .events import Events, emit
from .report import Meter, ProgressBar, Report


class Monitor:
    """Reads losses now and then, for the progress bar, events, schedulers and ``stop``.

    ``stopped``: ``stop`` has ended the run.
    """

    def __init__(
        self,
        meter: Meter,
        events: Events,
        guard: Guard,
        learner: Learner,
        stop: Callable[[float], bool] | None,
        progress: bool,
    ) -> None:
        self.meter, self._events, self._guard, self._learner = meter, events, guard, learner
        self._stop, self._progress = stop, progress
        self._bar: ProgressBar | None = None
        self.unreported: Update | None = None  # the last update, until it is reported
        self.stopped = False

    def begin(self, total: int | None, index: int) -> None:
        """Starts the clock and the bar, at update ``index`` of ``total``."""
        self.meter.start()
        self.draw(total, index)

    def draw(self, total: int | None, index: int) -> None:
        """Draws the bar, if there is to be one."""
        if self._progress and self._bar is None:
            self._bar = ProgressBar(total, index)

    def read(self) -> Report | None:
        """Reads the losses since the last report, if any step had one. Waits for the device.

        The scheduler and ``stop`` see the mean loss here; :meth:`publish` does the rest.
        """
        if self.unreported is None:
            return None
        watches_models = self._learner.stopped_models.flags is not None
        report = self.meter.report(self.unreported, of_finite=watches_models)
        if report is None:
            return None
        self.unreported = None
        if math.isfinite(report.loss):
            self._learner.after_report(report.loss)
            if self._stop is not None and self._stop(report.loss):
                self.stopped = True
        return report

    def publish(self, report: Report | None) -> bool:
        """Shows the report, calls the events, and reacts if its loss is not finite.

        Returns whether the run is to end, for that reason or by ``stop``.
        """
        if report is None:
            return self.stopped
        if self._bar is not None:
            self._bar.show(report)
        emit(self._events.report, report)
        ends, new = self.stopped, self._learner.stopped_models.new
        if new is not None:
            ends |= self._guard.stops(
                f"up to update {report.index} the loss or the gradient is {in_words(new, new)}",
                "The run stops: no model is left. Each stays as it was before that.",
            )
        elif not math.isfinite(report.loss):
            cause = nonfinite_parameter(self._learner.params) or "its parameters are finite"
            ends |= self._guard.stops(
                f"the mean loss up to update {report.index} is {report.loss}, first that of update "
                f"{self.meter.first_nonfinite}: {cause}",
                "The run stops; updates with such a loss have been made. on_nonfinite='skip' looks "
                "at each loss before its update.",
            )
        return ends

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def state_dict(self) -> dict[str, Any]:
        stop: Any = self._stop
        return {
            "meter": self.meter.state_dict(),
            "stop": stop.state_dict() if hasattr(stop, "state_dict") else None,
            "stopped": self.stopped,
        }

    def load_state_dict(self, state: dict[str, Any], device: Any) -> None:
        """Restores what :meth:`state_dict` returned. A run that ``stop`` had ended stays ended."""
        stop: Any = self._stop
        self.meter.load_state_dict(state["meter"], device)
        if state["stop"] is not None and hasattr(stop, "load_state_dict"):
            stop.load_state_dict(state["stop"])
        if stop is not None:
            self.stopped = bool(getattr(stop, "reached", state["stopped"]))
