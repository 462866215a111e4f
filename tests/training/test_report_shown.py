"""What is seen of a run: a bar, a writer of scalars, a picture."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from ftbptt.training import (
    Events,
    Report,
    Update,
    plot_history,
    write_scalars,
)
from ftbptt.training.reports.report import ProgressBar

from .reported_runs import train
from .streams import stream

# -- the bar ------------------------------------------------------------------------------------


def last_line(drawn: str) -> str:
    return drawn.replace("\n", "\r").rstrip("\r ").split("\r")[-1]


def test_bar(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(progress=True, interval=0, epochs=2)
    for own in run:
        if own.index == 8:
            line = last_line(capsys.readouterr().err)
            assert re.search(r" 75%\|.*\| 9/12 \[\d\d:\d\d<\d\d:\d\d, ", line), line
            loss, norm = run.history[-1].loss, run.history[-1].grad_norm
            assert f"loss {loss:.4g}, gradient {norm:.3g}, " in line
            assert re.search(r"[\d,]+ steps/s\]$", line), line
    assert "100%|" in last_line(capsys.readouterr().err)


def test_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter of the updates took 30 seconds, so 90 are left."""
    bar = ProgressBar(40, 0)
    bar._bar.start_t -= 30
    capsys.readouterr()
    bar.show(Report(9, 0, 40, 1.25, 0.5, None, 12345.6, 2e4, 30.0))
    bar.close()
    drawn = capsys.readouterr().err
    assert " 10/40 [00:30<01:30, " in drawn
    assert "loss 1.25, gradient 0.5, 12,346 steps/s]" in drawn


def test_time_left_after_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    """Updates before this part of the run took none of its time."""
    bar = ProgressBar(40, 20)
    bar._bar.start_t -= 30
    bar.show(Report(29, 0, 40, 1.25, 0.5, None, 12345.6, 2e4, 30.0))
    bar.close()
    assert " 30/40 [00:30<00:30, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "6/6 ["),
        ({"updates": 5, "epochs": None}, "5/5 ["),
        ({"updates": 50}, "6/6 ["),
        ({"accumulate": 4, "epochs": 2}, "4/4 ["),
        ({"k1": 4, "k2": 2, "context": 1}, "5/5 ["),
    ],
)
def test_the_bar_ends_full(
    options: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    list(train(progress=True, interval=3600, **options))
    line = last_line(capsys.readouterr().err)
    assert "100%|" in line
    assert shown in line


def test_a_bar_of_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = stream(22)
    list(train([(x[:9], y[:9]), (x[9:], y[9:])], progress=True, interval=0))
    line = last_line(capsys.readouterr().err)
    assert "6update [" in line
    assert "loss " in line


def test_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    list(train(interval=0))
    assert capsys.readouterr() == ("", "")


def test_an_error_leaves_a_closed_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(own: Update) -> None:
        raise ArithmeticError("mine")

    run = train(progress=True, interval=0, events=Events(after_update=fail))
    with pytest.raises(ArithmeticError, match="mine"):
        next(run)
    assert run._monitor._bar is None
    assert capsys.readouterr().err.endswith("\n")


# -- writers and pictures -----------------------------------------------------------------------


class Writer:
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self) -> None:
        self.written: dict[str, list[tuple[float, int]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert isinstance(scalar_value, float)
        assert isinstance(global_step, int)
        self.written.setdefault(tag, []).append((scalar_value, global_step))


class Functional:
    """An optimizer that has no learning rate to speak of."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        return {name: p.detach() - grads[name] for name, p in params.items()}, state


@pytest.mark.parametrize("optimizer", [None, Functional()])
def test_a_writer_of_scalars(optimizer: Any) -> None:
    writer = Writer()
    run = train(
        optimizer=optimizer, interval=0, events=Events(report=write_scalars(writer, "run 1/"))
    )
    list(run)
    names = ["loss", "grad_norm", "steps_per_second", "tokens_per_second"]
    names += [] if optimizer else ["learning_rate"]
    assert list(writer.written) == [f"run 1/{name}" for name in names]
    for name in names:
        expected = [(getattr(report, name), report.index) for report in run.history]
        assert writer.written[f"run 1/{name}"] == expected
    assert len(run.history) == 6


@pytest.mark.parametrize("writer", [3, Writer])
def test_what_is_no_writer(writer: Any) -> None:
    with pytest.raises(TypeError, match="writer: expected a SummaryWriter, or an object with"):
        write_scalars(writer)


def reports(count: int, rate: float | None = 0.1, norm: float = 0.5) -> list[Report]:
    return [
        Report(10 * i, 0, i, 1 / (i + 1), norm, rate, 100.0, 200.0, float(i)) for i in range(count)
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    saved, save = [], Figure.savefig

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.mark.parametrize("rate", [0.1, None])
def test_plot(rate: float | None, figures: list[Figure], tmp_path: Path) -> None:
    """Three panels, or two where there is no learning rate; the folder is made."""
    path = tmp_path / "plots" / "run.png"
    history = reports(7, rate)
    plot_history(history, path)
    panels = 2 if rate is None else 3
    picture = imread(path)
    assert picture.shape[:2] == (288 * panels, 960)
    assert picture[..., :3].std() > 0.01
    (figure,) = figures
    names = ["loss", "grad_norm", "learning_rate"][:panels]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss",
        "gradient norm",
        "learning rate",
    ][:panels]
    for axes, name in zip(figure.axes, names, strict=True):
        updates, values = axes.lines[0].get_data()
        assert list(updates) == [report.index + 1 for report in history]
        assert list(values) == [getattr(report, name) for report in history]
    assert figure.axes[1].get_yscale() == "log"


def test_plot_of_one_report_and_of_none(figures: list[Figure], tmp_path: Path) -> None:
    plot_history(reports(1, norm=0.0), str(tmp_path / "run.png"))
    assert figures[0].axes[0].lines[0].get_marker() == "o"
    assert figures[0].axes[1].get_yscale() == "linear"
    with pytest.raises(ValueError, match="history: expected at least one report, found none"):
        plot_history([], tmp_path / "none.png")
    with pytest.raises(TypeError, match=r"such as run\.history, found Stream\."):
        plot_history(train(interval=0), tmp_path / "none.png")  # type: ignore[arg-type]
    assert not (tmp_path / "none.png").exists()


def test_plot_of_a_run(tmp_path: Path) -> None:
    run = train(interval=0)
    list(run)
    plot_history(run.history, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_run_that_broke(tmp_path: Path) -> None:
    """Numbers that are not finite are left out of the picture, without a warning."""
    broken = [*reports(3), Report(40, 0, 4, math.nan, math.inf, 0.1, 1.0, 1.0, 9.0)]
    plot_history(broken, tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()
