"""Checkpoints that a run is not resumed from, or not written to."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment
from ftbptt.training import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    train_stream,
)
from ftbptt.training.checkpoints.file import previous

from .resuming import Pieces, Run, assert_same, segment, whole
from .streams import Tagger, mean_cross_entropy, stream, zeros


def test_a_run_that_replaces_another_is_the_one_that_is_resumed(tmp_path: Path) -> None:
    """Also if it is killed before its first checkpoint is due."""
    file = tmp_path / "run.pt"
    Run("plain", 3, file).go()
    killed = Run("plain", 0, file, resume=False)
    next(killed.updates)  # and no more: it writes nothing itself from here on
    assert load_checkpoint(file)["index"] == 0
    assert load_checkpoint(previous(file))["index"] == 6
    assert_same(Run("plain", 7, file, resume=True).go().seen, whole("plain")[0])


def test_a_file_that_would_be_replaced(tmp_path: Path) -> None:
    Run("plain", 0, tmp_path / "run.pt").go()
    with pytest.raises(FileExistsError, match=r"run.pt already exists. Pass resume=True to contin"):
        Run("plain", 0, tmp_path / "run.pt")
    Run("plain", 0, tmp_path / "run.pt", resume=False).go(1)
    with pytest.raises(ValueError, match=r"is a folder\. Give the name of a file"):
        Run("plain", 0, tmp_path)
    assert tmp_path.is_dir()


def test_two_runs_that_are_given_one_file(tmp_path: Path) -> None:
    """Neither knows of the other when it is made."""
    first, second = (Run("plain", 0, tmp_path / "run.pt") for _ in range(2))
    first.go()
    saved = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(FileExistsError, match=r"run.pt was written by another run since train_str"):
        second.go()
    assert (tmp_path / "run.pt").read_bytes() == saved


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It is said at once, not when the first checkpoint is due; the next try is told the same."""
    (tmp_path / "file").touch()
    for _ in range(2):
        with pytest.raises(OSError, match=r"checkpoint: no file can be written in .*file \(.*Give"):
            Run("plain", 0, tmp_path / "file" / "run.pt")
    link = tmp_path / "link"  # which could be written, but what it leads to could not
    link.symlink_to(tmp_path / "file" / "run.pt")
    with pytest.raises(OSError, match=r"checkpoint: no file can be written in .*file \(.*Give"):
        Run("plain", 0, link)
    link.unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"checkpoint: .*pipe is no regular file. Give the name"):
        Run("plain", 0, tmp_path / "pipe", resume=False)
    with pytest.raises(OSError, match=r"checkpoint: .*pipe is no regular file. Give the name"):
        save_checkpoint(tmp_path / "pipe", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def _other_groups(params: dict[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params.values())[:3], lr=0.3, momentum=0.9)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "k1": ("plain", {"k1": 5}, r"checkpoint: made with k1=4, k2=4.*but this run has k1=5, k2=5"),
    "fresh": ("plain", {"fresh": True}, "fresh=False, but this run has .*fresh=True"),
    "optimizer": (
        "plain", {"optimizer": lambda params: torch.optim.Adam(params.values())},
        "optimizer: this run has Adam, but the checkpoint was made with SGD",
    ),
    "groups": (
        "plain", {"optimizer": _other_groups},
        r"optimizer: its groups have \[3\] tensors, but the checkpoint's \[6\]",
    ),
    "no scheduler": (
        "scheduled", {"scheduler": None},
        "scheduler: this run has none, but the checkpoint was made with OneCycleLR",
    ),
    "a scheduler": (
        "plain", {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
        "scheduler: this run has StepLR, but the checkpoint was made with none",
    ),
    "no average": (
        "clipped, averaged", {"ema_decay": None},
        "ema: this run has none, but the checkpoint was made with moving average",
    ),
    "a scaler": (
        "plain", {"scaler": lambda: torch.amp.GradScaler("cpu")},
        "scaler: this run has GradScaler, but the checkpoint was made with none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_run_is_refused(case: str, tmp_path: Path) -> None:
    """And nothing of the caller's is changed by it."""
    name, options, words = REFUSED[case]
    Run(name, 0, tmp_path / "run.pt").go(2)
    torch.manual_seed(7)
    before = dict(Tagger().named_parameters())
    made: list[Run] = []

    class Kept(Run):
        def __init__(self, *args: Any, **more: Any) -> None:
            made.append(self)
            super().__init__(*args, **more)

    with pytest.raises(ValueError, match=words):
        Kept(name, 7, tmp_path / "run.pt", resume=True, **options)
    assert_same(made[0].params, before)
    assert not made[0].optimizer.state
    assert load_checkpoint(tmp_path / "run.pt")["index"] == 2


def test_another_model_or_state_is_refused(tmp_path: Path) -> None:
    Run("plain", 0, tmp_path / "run.pt").go(2)

    def resumed(module: Tagger, state: Any, data: Any = None) -> None:
        train_segment = make_train_segment(module, mean_cross_entropy, backend="eager")
        params = dict(module.named_parameters())
        before = {name: p.detach().clone() for name, p in params.items()}
        sgd = torch.optim.SGD(params.values(), lr=0.3, momentum=0.9)
        try:
            train_stream(
                train_segment, params, state, data or stream(22), sgd, k1=4, progress=False,
                checkpoint=tmp_path / "run.pt", resume=True,
            )  # fmt: skip
        finally:
            assert_same(params, before)
            assert sgd.param_groups[0]["lr"] == 0.3

    words = r"params\['cell.weight_ih'\]: is torch.float64 \[24, 3\], but in the checkpoint"
    with pytest.raises(ValueError, match=words):
        resumed(Tagger(hidden=6), zeros(hidden=6))
    with pytest.raises(
        ValueError, match=r"is torch.float32 \[20, 3\].*it belongs to a different model"
    ):
        resumed(Tagger().float(), zeros())
    more = Tagger()
    more.scale = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="params: has 7 leaves, but the checkpoint has 6"):
        resumed(more, zeros())
    words = r"state: its tensors are \[\[3, 5\], \[3, 5\]\], but in the checkpoint \[\[2, 5\]"
    with pytest.raises(ValueError, match=words):
        resumed(Tagger(), zeros(rows=3), stream(22, rows=3))


def test_a_functional_optimizer_of_another_state_is_refused(tmp_path: Path) -> None:
    class Plain:
        def init(self, params: Any) -> Any:
            return ()

        def update(self, grads: Any, state: Any, params: Any) -> Any:
            return {name: p.detach() - grads[name] for name, p in params.items()}, state

    Run("functional", 0, tmp_path / "run.pt").go(2)
    Plain.__name__ = "FunctionalAdam"
    with pytest.raises(ValueError, match="optimizer's state: has 0 leaves, but the checkpoint has"):
        Run("functional", 7, tmp_path / "run.pt", resume=True, optimizer=lambda params: Plain())


def test_less_data_than_before_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    Run("dropout, list", 0, file).go(4)
    train_segment, run = segment("dropout"), Run("dropout, list", 7)
    updates = train_stream(
        train_segment, run.params, None, [Pieces(noise=False)[0]], run.optimizer, k1=4,
        progress=False, checkpoint=file, resume=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="made after 4 chunks, but there are only 1"):
        next(updates)
    assert load_checkpoint(file)["index"] == 4


def test_a_file_of_something_else(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run.pt", [torch.ones(3)])
    with pytest.raises(ValueError, match="does not hold a run of train_stream"):
        Run("plain", 0, tmp_path / "run.pt", resume=True)
    torch.save({"model": torch.ones(3)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights.pt: .* or not written by train_"):
        Run("plain", 0, tmp_path / "weights.pt", resume=True)


def test_other_rows_than_before_are_told(tmp_path: Path) -> None:
    """Of a state that began as None, the shape is not known before the data is there."""
    Run("dropout", 0, tmp_path / "run.pt").go(2)
    other = Run("dropout", 7, tmp_path / "run.pt", resume=True, data=stream(22, rows=3))
    with pytest.raises(Exception, match=r".") as caught:
        other.go()
    assert "the state comes from a checkpoint" in "".join(caught.value.__notes__)
