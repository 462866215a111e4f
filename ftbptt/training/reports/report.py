"""Reports of a run: numbers read from the device now and then, a progress bar, a plot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..._checks import kind_of
from ..updates.ensembles import for_each_model
from ..updates.update import Update
from ..updates.window_stats import WindowStats

_MAX_PENDING = 1024  # losses kept one by one: a long interval must not fill the memory
_MAX_REPORTS = 8192  # then every second one is dropped: checkpoints contain them all


@dataclass(frozen=True)
class Report:
    """Numbers of a run, read from the device after update ``index``.

    ``index``, ``epoch``, ``position``
        as in :class:`Update`
    ``loss``
        the mean over all valid steps since the last report (of an ensemble: and over the models
        that go on)
    ``grad_norm``
        the norm of the gradient in update ``index``, before clipping (of an ensemble: the mean)
    ``learning_rate``
        that of update ``index``, of the optimizer's first group; None if that has none, or for a
        functional optimizer
    ``steps_per_second``, ``tokens_per_second``
        steps of the stream, and steps of all rows, per second since the last report
    ``seconds``
        how long the run has taken, including the time before it was resumed

    >>> report = Report(
    ...     index=7, epoch=0, position=800, loss=0.25, grad_norm=1.5, learning_rate=0.01,
    ...     steps_per_second=100.0, tokens_per_second=3200.0, seconds=9.0,
    ... )
    >>> print(f"{report.position} steps, loss {report.loss}")
    800 steps, loss 0.25
    """

    index: int
    epoch: int
    position: int
    loss: float
    grad_norm: float
    learning_rate: float | None
    steps_per_second: float
    tokens_per_second: float
    seconds: float


class Meter:
    """Collects losses on the device until a report reads them, and measures the time.

    The losses since the last report are pending in a list, of at most ``_MAX_PENDING``; a full list
    is folded into a weighted sum on the device.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.history: list[Report] = []
        self._seconds_before = 0.0  # that the run had taken when it was resumed
        self._unreported_seconds = 0.0  # of them, since the last report
        # Times: of the start, the last report, the next report, and the last update.
        self._began = self._since = self._next = self._now = time.perf_counter()
        self._losses: list[Tensor] = []  # pending
        self._weights: list[Any] = []
        self._sum = self._weight = torch.zeros(())  # of the folded losses, and of their weights
        self._folded = 0  # how many those are
        self._bad = torch.tensor(math.inf)  # the first of them that is not finite; inf if none
        self._steps = 0
        self._tokens = 0
        self.first_nonfinite: int | None = None  # the index of an update in the last report

    def start(self) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()
        self._since = self._began - self._unreported_seconds
        self._next = self._began + self.interval

    @property
    def seconds(self) -> float:
        """How long the run has taken, including the time before it was resumed."""
        return self._seconds_before + time.perf_counter() - self._began

    def add(self, stats: WindowStats) -> None:
        """Adds an update."""
        self._losses.append(stats.loss)
        self._weights.append(stats.weight)
        if len(self._losses) == _MAX_PENDING:
            self._fold()
        self._steps += stats.steps
        self._tokens += stats.tokens
        self._now = time.perf_counter()

    def is_due(self) -> bool:
        """Whether a report is due."""
        return time.perf_counter() >= self._next

    @property
    def tokens_per_second(self) -> float:
        """The speed from the last report to the last update."""
        return self._tokens / max(self._now - self._since, 1e-9)

    def report(self, update: Update, *, of_finite: bool = False) -> Report | None:
        """Reads the losses since the last report; None without a valid step. Waits for a GPU.

        ``of_finite``: those of the models for which they are finite, unless there is none.
        """
        self._fold()
        losses, norms = self._sum / self._weight, update.grad_norm
        known = losses.isfinite() if of_finite else self._weight.broadcast_to(losses.shape) > 0
        if losses.dim() and known.any():
            losses = losses[known]
            norms = norms[known] if norms.shape == known.shape else norms
        loss = float(losses.mean())
        if math.isnan(loss) and not self._weight.any():  # 0 / 0: else the weight is not read
            self._next = time.perf_counter() + self.interval
            return None
        grad_norm, learning_rate = float(norms.mean()), update.learning_rate
        learning_rate = None if learning_rate is None else float(learning_rate)
        bad = float(self._bad) if not math.isfinite(loss) else math.inf
        first_index = update.index - self._folded + 1
        self.first_nonfinite = None if bad == math.inf else first_index + int(bad)
        self._folded, self._bad = 0, torch.tensor(math.inf)
        now = time.perf_counter()
        elapsed = max(now - self._since, 1e-9)
        report = Report(
            update.index, update.epoch, update.position, loss, grad_norm, learning_rate,
            self._steps / elapsed, self._tokens / elapsed, self.seconds,
        )  # fmt: skip
        self.history.append(report)
        if len(self.history) > _MAX_REPORTS:
            del self.history[:-1:2]
        self._sum = self._weight = torch.zeros(())
        self._steps = self._tokens = 0
        self._since, self._next = now, now + self.interval
        return report

    def _fold(self) -> None:
        """Adds the pending losses to the weighted sum, without reading them."""
        if not self._losses:
            return
        losses = torch.stack(self._losses).double()
        weights = _column(self._weights, losses.device)
        self._weight = self._weight.to(losses.device) + weights.sum(0)
        bad = ~losses.isfinite().reshape(len(losses), -1).all(1)
        first = torch.where(bad.any(), self._folded + bad.double().argmax(), math.inf)
        self._bad = torch.minimum(self._bad.to(losses.device), first)
        self._folded += len(losses)
        weights = for_each_model(weights, losses)
        self._sum = self._sum.to(losses.device) + (losses * weights).sum(0)
        self._losses.clear()
        self._weights.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "history": [astuple(report) for report in self.history],
            "unreported_seconds": time.perf_counter() - self._since,
            "pending": [list(self._losses), list(self._weights), self._steps, self._tokens],
            "folded": [self._sum, self._weight, self._bad, self._folded],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._seconds_before = state["seconds"]
        self._unreported_seconds = state["unreported_seconds"]
        self.history[:] = [Report(*values) for values in state["history"]]
        losses, self._weights, self._steps, self._tokens = state["pending"]
        self._losses = [loss.to(device) for loss in losses]
        self._sum, self._weight, self._bad, self._folded = state["folded"]

    def unread_is_finite(self) -> bool:
        """Whether the losses since the last report are finite. Waits for the device."""
        pending = torch.stack(self._losses) if self._losses else torch.zeros(())
        return bool(self._sum.isfinite().all() & pending.isfinite().all())


def _column(weights: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers or tensors [], as one tensor [N] of float64; [N, M] if one is of M models."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        return torch.tensor(weights, dtype=torch.float64, device=device)
    tensors = [torch.as_tensor(weight, device=device).double() for weight in weights]
    return torch.stack(torch.broadcast_tensors(*tensors))


class ProgressBar:
    """A bar with loss, gradient norm, speed and time left, redrawn at each report."""

    def __init__(self, total: int | None, index: int) -> None:
        self._bar = tqdm(total=total, initial=index, unit="update", dynamic_ncols=True)

    def show(self, report: Report) -> None:
        self._bar.n = report.index + 1
        self._bar.set_postfix_str(
            f"loss {report.loss:.4g}, gradient {report.grad_norm:.3g}, "
            f"{report.steps_per_second:,.0f} steps/s"
        )

    def close(self) -> None:
        self._bar.close()


def write_scalars(writer: Any, prefix: str = "train/") -> Callable[[Report], None]:
    """write_scalars : a TensorBoard writer -> a function for ``Events(report=...)``

    ``writer`` is a ``torch.utils.tensorboard.SummaryWriter``, or any object with its method
    ``add_scalar(tag, value, global_step)``. Tags begin with ``prefix``.

    Raises TypeError for an object without that method, and for a class.

    >>> class Writer:
    ...     def add_scalar(self, tag, value, step):
    ...         print(tag, value, step)
    >>> write = write_scalars(Writer())
    >>> write(Report(7, 0, 800, 0.25, 1.5, 0.01, 100.0, 3200.0, 9.0))
    train/loss 0.25 7
    train/grad_norm 1.5 7
    train/steps_per_second 100.0 7
    train/tokens_per_second 3200.0 7
    train/learning_rate 0.01 7
    """

    if isinstance(writer, type) or not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            "writer: expected a SummaryWriter, or an object with add_scalar(tag, value, step), "
            f"found {kind_of(writer)}."
        )

    def write(report: Report) -> None:
        names = ["loss", "grad_norm", "steps_per_second", "tokens_per_second"]
        if report.learning_rate is not None:
            names.append("learning_rate")
        for name in names:
            writer.add_scalar(prefix + name, getattr(report, name), report.index)

    return write


def plot_history(history: Sequence[Report], path: str | Path) -> None:
    """plot_history : the reports of a run, file name -> None

    Plots loss, gradient norm and, if there is one, learning rate over the updates, as a PNG. Makes
    the file's folder. Needs matplotlib.

    Raises TypeError for anything but a list of reports, ValueError for an empty one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = Report(7, 0, 800, 0.25, 1.5, 0.01, 100.0, 3200.0, 9.0)
    ...     plot_history([report], f"{folder}/loss.png")
    ...     Path(folder, "loss.png").exists()
    True
    """
    if not isinstance(history, Sequence):
        raise TypeError(
            "history: expected a list of reports, such as run.history, found "
            f"{type(history).__name__}."
        )
    if not history:
        raise ValueError("history: expected at least one report, found none.")
    from matplotlib.figure import Figure

    panels = [("loss", "loss"), ("gradient norm", "grad_norm")]
    if any(report.learning_rate is not None for report in history):
        panels.append(("learning rate", "learning_rate"))
    figure = Figure(figsize=(8, 2.4 * len(panels)), layout="constrained")
    updates = [report.index + 1 for report in history]
    for row, (title, name) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, row + 1)
        marker = "o" if len(history) == 1 else ""
        axes.plot(updates, [getattr(report, name) for report in history], marker=marker)
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        if name == "grad_norm" and all(report.grad_norm > 0 for report in history):
            axes.set_yscale("log")
        if row == len(panels) - 1:
            axes.set_xlabel("update")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
