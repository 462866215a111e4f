"""Losses that are not finite: what is saved, and what a run goes on from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt.training import Events, load_checkpoint
from ftbptt.training.checkpoints.file import previous
from ftbptt.training.updates.nonfinite import Guard

from .nonfinite_runs import (
    MODES,
    THEN,
    bad_stream,
    noted,
    params_of,
    started,
)
from .resuming import assert_same
from .streams import Tagger, stream, tagger


def test_a_run_that_stopped_is_resumed(tmp_path: Path) -> None:
    """From the update before, with data that is right this time."""
    file = tmp_path / "run.pt"
    updates = started(bad_stream(19, 3, 9, 1), checkpoint=file)
    assert noted(updates)[0] == [4, 8]
    assert load_checkpoint(file)["index"] == 2
    resumed = started(stream(19, 3), tagger(3), checkpoint=file, resume=True)
    assert [update.position for update in resumed] == [12, 16, 19]
    once = started(stream(19, 3))
    list(once)
    assert_same(resumed.params, once.params)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_are_not_finite_are_not_saved(mode: str, tmp_path: Path) -> None:
    """The optimizer broke them, with a loss and gradients that were finite."""
    file = tmp_path / "run.pt"

    def broken(grads: list[Tensor]) -> None:
        if updates.index == 3:
            grads[0][0] = float("inf")

    updates = started(
        stream(24), checkpoint=file, checkpoint_every=2, on_nonfinite=mode,
        events=Events(before_update=broken),
    )  # fmt: skip
    made, said = noted(updates)
    assert made == [4, 8, 12, 16]
    said.sort()
    assert "no checkpoint is written: params['cell.weight_ih'] is not finite already" in said[0]
    assert "the loss of update 4 is nan" in said[1]
    assert "params['cell.weight_ih'] is not finite already" in said[1]
    assert load_checkpoint(file)["index"] == 2
    assert not previous(file).exists()


@pytest.mark.parametrize("left", [False, True])
def test_a_gradient_that_is_not_finite_under_a_loss_that_is(left: bool, tmp_path: Path) -> None:
    """The last update, or the last before a ``break``, has spoiled the parameters: no save."""

    def loss(out: Tensor, y: Tensor) -> Tensor:  # the slope of the root is infinite at 0, times 0
        is_seven = (y == 7).unsqueeze(2)
        return torch.where(is_seven, out * 0, torch.ones_like(out)).sqrt().mean()

    file, (x, y) = tmp_path / "run.pt", stream(16)
    y[14:] = 7
    updates = started((x, y), loss=loss, checkpoint=file, checkpoint_every=3)
    with pytest.warns(RuntimeWarning, match="no checkpoint is written: params"):  # noqa: PT031
        for update in updates:
            if left and update.index == 3:
                break
    assert updates.index == 4
    assert load_checkpoint(file)["index"] == 3


def test_parameters_that_were_not_finite_from_the_start_are_saved(tmp_path: Path) -> None:
    """Such as the logarithm of a transition that cannot occur."""
    module = tagger()
    with torch.no_grad():
        module.readout.bias[2] = float("-inf")
    x, y = stream(8)
    y[y == 2] = 1
    list(started((x, y), module, checkpoint=tmp_path / "run.pt"))
    assert load_checkpoint(tmp_path / "run.pt")["index"] == 2


class Forbidding(Tagger):
    """One of the hidden units has the weight exp(-inf) = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weights = nn.Parameter(torch.tensor([0, 0.5, -torch.inf, 0, 1]).double())

    def forward(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, c = self.cell(x_t, state)
        return self.readout(h * self.log_weights.softmax(0)), (h, c)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_is_meant_to_be_infinite(mode: str, tmp_path: Path) -> None:
    """It is not to blame for a window that is not finite: skipping goes on, and all are saved."""
    torch.manual_seed(0)
    file, module = tmp_path / "run.pt", Forbidding()
    updates = started(bad_stream(19, 3, 9, 1), module, on_nonfinite=mode, checkpoint=file)
    made, (said,) = noted(updates)
    assert said.endswith(THEN[mode])
    assert made == ([4, 8, 16, 19] if mode == "skip" else [4, 8])
    assert load_checkpoint(file)["index"] == len(made)
    assert module.log_weights[2] == -torch.inf
    assert module.log_weights.isinf().sum() == 1


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("name", ["log_weights", "readout.bias"])
@pytest.mark.parametrize("at", [2, 3])
def test_beside_it_others_become_nan(mode: str, name: str, at: int, tmp_path: Path) -> None:
    """The infinite value itself, another of its leaf, or another leaf: that cannot be meant."""
    torch.manual_seed(0)
    file, module = tmp_path / "run.pt", Forbidding()

    def broken(update: Any) -> None:
        if update.index == 1:
            with torch.no_grad():
                params_of(module)[name][at] = float("nan")

    updates = started(
        stream(22), module, on_nonfinite=mode, epochs=None, checkpoint=file, checkpoint_every=1,
        events=Events(after_update=broken),
    )  # fmt: skip
    made, said = noted(updates)
    assert made == [4, 8]
    assert any(f"no checkpoint is written: params['{name}'] is not fi" in own for own in said)
    assert any("the loss of update 2 is nan" in own and "The run stops" in own for own in said)
    assert load_checkpoint(file)["index"] == 1


def test_save_keeps_a_good_checkpoint(tmp_path: Path) -> None:
    """Asked for by the caller, who does not know yet that the parameters are spoiled."""
    file = tmp_path / "run.pt"

    def broken(grads: list[Tensor]) -> None:
        if updates.index == 2:
            grads[0][0] = float("nan")

    updates = started(stream(17), checkpoint=file, events=Events(before_update=broken))
    next(updates)
    next(updates)
    updates.save()
    next(updates)
    with pytest.warns(RuntimeWarning, match=r"no checkpoint is written: params\['cell.weight_ih'"):
        updates.save()
    assert load_checkpoint(file)["index"] == 2
    assert not previous(file).exists()


@pytest.mark.parametrize("mode", ["stop", "raise"])
@pytest.mark.parametrize("interval", [0, 1e6])
def test_noticed_only_when_losses_are_read(
    mode: str, interval: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the parameters are spoiled by then, but not the checkpoint."""
    monkeypatch.setattr(Guard, "reads_now", lambda self, value: False)
    file = tmp_path / "run.pt"
    updates = started(
        bad_stream(40, 2, 17, 1), checkpoint=file, checkpoint_every=3, on_nonfinite=mode,
        interval=interval,
    )  # fmt: skip
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            list(updates)
        except FloatingPointError as error:
            said.append(str(error))
    (said,) = said + [str(warning.message) for warning in caught]
    last = 4 if interval == 0 else 5  # the next checkpoint is due
    words = f"the mean loss up to update {last} is nan, first that of update 4: params['cell.weight"
    assert words in said
    if mode == "stop":
        assert "The run stops; updates with such a loss have been made. on_nonfinite='skip'" in said
    assert load_checkpoint(file)["index"] == 3
    assert all(p.isfinite().all() for p in load_checkpoint(file)["learner"]["params"])


def test_ctrl_c_before_losses_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "reads_now", lambda self, value: False)
    file = tmp_path / "run.pt"
    updates = started(
        bad_stream(40, 2, 17, 1), checkpoint=file, checkpoint_every=3, interval=1e6
    )  # fmt: skip
    for _ in range(5):
        next(updates)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for _ in updates:
            raise KeyboardInterrupt
    assert load_checkpoint(file)["index"] == 3
