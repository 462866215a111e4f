"""What a person sees of a run while it goes on, and what a run does about what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .events import Events, emit
from .learner import Learner
from .nonfinite import Guard, nonfinite_parameter
from .report import Meter, ProgressBar, Report
from .update import Update


class Monitor:
    """Reads losses now and then: a bar, the caller's events, schedulers and ``stop`` learn them.

    ``ended``: the run is to end, by what was read.
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
        self.last: Update | None = None  # not reported yet
        self._stopped = False  # by ``stop``
        self.ended = False

    def begin(self, total: int | None, index: int) -> None:
        """The clock starts, at update ``index`` of so many."""
        self.meter.start()
        self.draw(total, index)

    def draw(self, total: int | None, index: int) -> None:
        """The bar, if there is to be one."""
        if self._progress and self._bar is None:
            self._bar = ProgressBar(total, index)

    def read(self) -> Report | None:
        """The losses since the last time, which waits for the device; None if there are none."""
        update, self.last = self.last, None
        if update is None:
            return None
        report = self.meter.report(update, self._learner.learning_rate)
        if math.isfinite(report.loss):
            self._learner.after_report(report.loss)
            if self._stop is not None and self._stop(report.loss):
                self._stopped = self.ended = True
        return report

    def tell(self, report: Report | None) -> None:
        """Says what was read."""
        if report is None:
            return
        if self._bar is not None:
            self._bar.show(report)
        emit(self._events.report, report)
        if not math.isfinite(report.loss):
            words = nonfinite_parameter(self._learner.params) or "its parameters are finite"
            self.ended |= self._guard.stops(
                f"the mean loss up to update {report.index} is {report.loss}, first that of update "
                f"{self.meter.first_nonfinite}: {words}",
                "The run stops; updates with such a loss have been made. on_nonfinite='skip' looks "
                "at each loss before its update.",
            )

    def close(self) -> None:
        """Nothing is drawn any more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def state_dict(self) -> dict[str, Any]:
        stop: Any = self._stop
        return {
            "meter": self.meter.state_dict(),
            "stop": stop.state_dict() if hasattr(stop, "state_dict") else None,
            "stopped": self._stopped,
        }

    def load_state_dict(self, state: dict[str, Any], device: Any) -> None:
        """Goes on from what :meth:`state_dict` gave; a run that ``stop`` had ended has ended."""
        stop: Any = self._stop
        self.meter.load_state_dict(state["meter"], device)
        if state["stop"] is not None and hasattr(stop, "load_state_dict"):
            stop.load_state_dict(state["stop"])
        if stop is not None:
            self.ended = bool(getattr(stop, "reached", state["stopped"]))
