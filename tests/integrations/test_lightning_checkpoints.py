"""Checkpoints of Lightning's Trainer: a ``TBPTTModule`` goes on where it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
)

from ..training.streams import honest_updates, stream, tagger
from .lightning_models import (
    Structured,
    Tagger,
    assert_equal,
    fit,
    loader,
    model,
    structured,
    trainer,
)


class Resumable:
    """A loader that goes on where it was."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.at = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Momentum(Tagger):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Save(Callback):
    """Writes a checkpoint after the batch that ends with an update."""

    def __init__(self, path: Path, update: int) -> None:
        self.path, self.update = path, update

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.update:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("saved", [1, 3, 4, 6])
def test_resuming_is_exact(saved: int, tmp_path: Path) -> None:
    """Behind any batch, the carried state included; 4 batches of 2 updates in an epoch."""
    batches, path = [stream(8, seed=seed) for seed in range(4)], tmp_path / "run.ckpt"
    own = model(Momentum, carry=True)
    whole = trainer(max_epochs=3, callbacks=[Save(path, 2 * saved)])
    whole.fit(own, Resumable(batches))
    expected = copy.deepcopy(own.step)
    own = model(Momentum, carry=True)
    resumed = trainer(max_epochs=3)
    resumed.fit(own, Resumable(batches), ckpt_path=path)
    assert resumed.global_step == whole.global_step == 24
    assert_equal(list(own.step.parameters()), list(expected.parameters()), 0)


def test_resumed_within_an_epoch_whose_data_begins_anew(tmp_path: Path) -> None:
    """The state carried behind its second batch is not that of its first."""
    batches, path = [stream(8, seed=seed) for seed in range(4)], tmp_path / "run.ckpt"
    trainer(max_epochs=1, callbacks=[Save(path, 4)]).fit(
        model(Momentum, carry=True), loader(batches)
    )
    own = model(Momentum, carry=True)
    states = []
    start = own._run.carried
    own._run.carried = lambda *of: states.append(start(*of)) or states[-1]  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="the carried state starts over too. A loader with"):
        trainer(max_epochs=1).fit(own, loader(batches), ckpt_path=path)
    assert not any(leaf.any() for leaf in states[0])
    assert all(leaf.any() for leaf in states[1])


def test_model_checkpoint(tmp_path: Path) -> None:
    """The best by a loss, and one every so many updates where a batch ends with them."""
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="{val_loss:.6f}")
    often = ModelCheckpoint(tmp_path / "often", every_n_train_steps=4, save_top_k=-1)
    own = model()
    with pytest.warns(UserWarning, match="The checkpoint will contain the model state AFTER"):
        run = fit(own, [stream(8)] * 3, [stream(9, seed=5)], max_epochs=2,
                  enable_checkpointing=True, callbacks=[best, often])  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "often").iterdir()) == [
        "epoch=0-step=4.ckpt", "epoch=1-step=12.ckpt", "epoch=1-step=8.ckpt",
    ]  # fmt: skip
    saved = torch.load(best.best_model_path, weights_only=True)
    own.load_state_dict(saved["state_dict"])
    (found,) = run.validate(own, loader([stream(9, seed=5)]), verbose=False)
    assert found["val_loss"] == pytest.approx(float(best.best_model_score), abs=1e-6)


def test_structured_states_are_in_checkpoints(tmp_path: Path) -> None:
    batches = [stream(8, seed=seed) for seed in range(3)]
    own = Structured()
    whole = trainer()
    whole.fit(own, Resumable(structured(batches)))
    expected = [p.detach().clone() for p in own.parameters()]
    path = tmp_path / "run.ckpt"

    own = Structured()
    trainer(callbacks=[Save(path, 4)]).fit(own, Resumable(structured(batches)))
    own = Structured()
    trainer().fit(own, Resumable(structured(batches)), ckpt_path=path)
    assert_equal([*own.parameters()], expected, 0)
    loaded = Structured.load_from_checkpoint(path)
    assert sorted(loaded.state_dict()) == sorted(own.state_dict())


def test_structured_states_and_data() -> None:
    batches = [stream(8, seed=1), stream(10, seed=2)]
    own = Structured()
    fit(own, structured(batches))
    module = tagger()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    state = torch.ones(2, 5).double(), torch.zeros(2, 5).double()
    for x, y in batches:
        behind = []
        honest_updates(module, state, x, y, optimizer, k1=4, k2=4,
                       on_update=lambda _, s, behind=behind: behind.append(s))  # fmt: skip
        state = behind[-1]
    assert_equal(list(own.parameters()), list(module.parameters()))
