"""What a ``TBPTTModule`` refuses or warns of, and in what words."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ftbptt.integrations.lightning import TBPTTModule
from ftbptt.training import Chunk

from ..training.streams import mean_cross_entropy, stream, zeros
from .lightning_models import (
    Tagger,
    assert_equal,
    fit,
    loader,
    model,
    trainer,
    with_scheduler,
)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"k1": 0}, ValueError, "k1: expected at least 1, found 0"),
        ({"k1": 4.0}, TypeError, "k1: expected a whole number, found 4.0"),
        ({"k1": 4, "time_dim": None}, TypeError, "time_dim: expected a whole number, found None"),
        ({"k1": 4, "k_eval": 0}, ValueError, "k_eval: expected at least 1, found 0"),
        ({"k1": 4, "context": 4}, ValueError, "context: 4 of the k2=4 steps"),
        ({"k1": 4, "carry": "yes"}, TypeError, "carry: expected True or False, found 'yes'"),
        ({"k1": 4, "backend": "jit"}, ValueError, "backend: expected one of auto, eager, compile"),
        ({"k1": 4, "recompute": 1}, TypeError, "recompute: expected True or False, found 1"),
    ],
)
def test_bad_options(options: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        TBPTTModule(**options)


X, Y = stream(10)


@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    [
        ((X, Y[:9]), ValueError, "y: has 9 steps on axis 0, but x has 10"),
        (({"a": X, "b": X[:9]}, Y), ValueError, r"x\['b'\]: has 9 steps on axis 0, but x\['a'\]"),
        ({"x": X, "y": Y}, TypeError, r"batch: expected \(x, y\).*found a dict"),
        ((X,), TypeError, r"batch: expected \(x, y\).*found a list of 1"),
        ((X[:0], Y[:0]), ValueError, "batch: has 0 steps. Leave empty sequences out"),
        ((X, Y.sum()), ValueError, "y: expected time on axis 0, found shape"),
        ((X, Y, "first"), TypeError, r"batch: expected \(x, y\), found three parts: the third may"),
        (
            (X, Y, "first", None),
            TypeError,
            "batch: reset: expected a tensor or an array, found str",
        ),
        (
            (X, Y, torch.zeros(9, dtype=torch.bool), None),
            ValueError,
            "reset: has 9 steps on axis 0, but x has 10",
        ),
    ],
)
def test_bad_batches(batch: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        fit(model(), [batch])


@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    [
        (
            (X, Y, X[:, 0, 0] > 0),
            TypeError,
            r"batch: expected \(x, y\), found three parts: the third",
        ),
        ((X, Y, None, None, 1), TypeError, r"batch: expected \(x, y\).*found a list of 5"),
        ((X[:0], Y), ValueError, "batch: has 0 steps"),
    ],
)
def test_bad_batches_to_predict_for(batch: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        trainer().predict(model(), loader([batch]))


def test_arrays_of_numpy() -> None:
    own, reset = model(), torch.zeros(10, dtype=torch.bool)
    of_arrays = copy.deepcopy(own)
    fit(own, [Chunk(X, Y, reset)])
    loaded = DataLoader(
        [(X, Y)], batch_size=None, collate_fn=lambda b: Chunk(*(p.numpy() for p in (*b, reset)))
    )
    trainer().fit(of_arrays, loaded)
    assert_equal([*own.parameters()], [*of_arrays.parameters()], 0)


def test_a_batch_without_a_loss() -> None:
    with pytest.raises(ValueError, match="batch: no window of its 3 steps has a loss"):
        fit(model(context=3), [stream(3)])


def test_carry_between_batches_of_different_rows() -> None:
    with pytest.raises(ValueError, match=r"carry: state\[0\] is \[2, 5\] after.*\[3, 5\]"):
        fit(model(carry=True), [stream(8), stream(8, rows=3)])


def test_what_a_user_may_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(TBPTTModule):
        def __init__(self) -> None:
            super().__init__(4, backend="eager")
            self.weight = nn.Parameter(torch.ones(3, 3))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    batch = torch.randn(2, 8, 3), torch.randn(2, 8, 3)
    own = Bare()
    with pytest.raises(TypeError, match=r"initial_state: forward\(x, None\) failed .*must define"):
        fit(own, [batch])
    own.forward = lambda x, state: (x @ own.weight, state + x.sum(1))
    with pytest.raises(TypeError, match=r"initial_state: forward\(x, None\) failed \(TypeError"):
        fit(own, [batch])
    own.initial_state = lambda x: x[:, 0] * 0
    with pytest.raises(NotImplementedError, match="loss: Bare must define"):
        fit(own, [batch])
    own.initial_state = lambda x: x[:, 0] @ own.weight
    with pytest.raises(ValueError, match="initial_state: has a gradient, which would be lost"):
        fit(own, [batch])
    own.initial_state = lambda x: 0.0
    with pytest.raises(TypeError, match="initial_state: expected a tensor, found float"):
        fit(own, [batch])
    own.initial_state = lambda x: torch.ones(2, 3)
    flags = torch.zeros(8, dtype=torch.bool)
    with pytest.raises(ValueError, match="initial_state: is not zero, but reset restarts"):
        fit(own, [Chunk(*batch, flags)])
    del own.initial_state
    own.forward = lambda x, state: (x, torch.ones(2, 3) if state is None else state)
    with pytest.raises(ValueError, match=r"initial_state: forward.* another state than zeros"):
        fit(own, [batch])


@pytest.mark.parametrize("validates_first", [False, True])
def test_a_start_that_should_be_trained(validates_first: bool) -> None:
    """Also of zeros, which is where a learned start often begins."""

    class Learned(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.zeros((), dtype=torch.double))

        def forward(self, x: Tensor, state: Any) -> Any:
            if state is None:
                state = tuple(leaf + self.start for leaf in zeros(x.shape[1]))
            return super().forward(x, state)

    with pytest.raises(ValueError, match=r"initial_state: forward.* with start, which would not"):
        fit(Learned(), [stream(8)], [stream(8)], num_sanity_val_steps=int(validates_first))


def test_a_layer_that_mixes_steps() -> None:
    class Smoothing(Tagger):
        def forward(self, x: Tensor, state: Any) -> Any:
            return super().forward(x - x.mean(0), state)

    with pytest.raises(ValueError, match="step: Smoothing gives other numbers for 4 steps at once"):
        fit(Smoothing(), [stream(8)])


def test_a_loss_that_reads_parameters() -> None:
    class Weighted(Tagger):
        def loss(self, out: Tensor, y: Tensor) -> Tensor:
            return mean_cross_entropy(out * self.step.readout.bias, y)

    with pytest.raises(
        ValueError, match=r"loss: uses an nn.Parameter of shape \[4\] that requires"
    ):
        fit(Weighted(), [stream(8)])


def test_what_a_trainer_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model()
    with pytest.raises(ValueError, match="devices: expected one device, found 2"):
        own._run.on_fit_start(SimpleNamespace(world_size=2), own)
    monkeypatch.setattr(own, "configure_optimizers", lambda: torch.optim.LBFGS(own.parameters()))
    with pytest.raises(TypeError, match="optimizer: LBFGS evaluates the loss many times"):
        fit(own, [stream(8)])
    monkeypatch.setattr(own, "configure_optimizers", lambda: [])
    with pytest.raises(ValueError, match="configure_optimizers: expected one optimizer, found 0"):
        fit(own, [stream(8)])
    two = [torch.optim.SGD(own.parameters(), lr=lr) for lr in (0.1, 0.2)]
    with pytest.raises(ValueError, match="configure_optimizers: expected one optimizer, found 2"):
        own._run.on_fit_start(SimpleNamespace(world_size=1, optimizers=two, callbacks=[]), own)
    monkeypatch.undo()
    monkeypatch.setattr(own, "configure_callbacks", lambda: [])
    with pytest.raises(RuntimeError, match="configure_callbacks: this module's own callback"):
        fit(own, [stream(8)])
    own = Tagger()
    own.norm = nn.BatchNorm1d(2).eval()
    with pytest.raises(ValueError, match="callbacks: StochasticWeightAveraging computes the stat"):
        fit(own, [stream(8)], callbacks=[StochasticWeightAveraging(0.1)])


def test_a_monitor_that_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    config = {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "monitor": "val_los",
    }
    monkeypatch.setattr(
        own, "configure_optimizers", lambda: {"optimizer": optimizer, "lr_scheduler": config}
    )
    with pytest.raises(ValueError, match=r"monitor: 'val_los' of the scheduler.*val_loss"):
        fit(own, [stream(8)], [stream(5)])
    config["strict"] = False
    fit(own, [stream(8)], [stream(5)])


class Warming(Tagger):
    """A recipe for warm-up."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


def test_hooks_that_are_not_called_are_told() -> None:
    with pytest.warns(RuntimeWarning, match=r"Warming\.optimizer_step is not called: .* scheduler"):
        fit(model(Warming), [stream(8)])


class Averaging(Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        raise AssertionError


def test_hooks_of_callbacks_that_are_not_called_are_told() -> None:
    with pytest.warns(RuntimeWarning, match=r"Averaging\.on_before_zero_grad is not called: gr"):
        fit(model(), [stream(8)], callbacks=[Averaging()])


class Autograd(Tagger):
    """As a module without windows would be."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss(self(x, None)[0], y)


class Skipping(Tagger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


def test_a_training_step_that_makes_no_updates() -> None:
    with pytest.raises(
        RuntimeError, match=r"training_step: that of Autograd makes no updates\. Le"
    ):
        fit(model(Autograd), [stream(8)])
    assert fit(model(Skipping), [stream(8), stream(8)]).global_step == 2


class Plain(lightning.LightningModule):
    """Without windows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_a_trainer_takes_another_module_after() -> None:
    run, plain = fit(model(), [stream(8)]), Plain()
    before = plain.layer.weight.detach().clone()
    run.fit_loop.max_epochs = 2
    run.fit(plain, loader([stream(8)]))
    assert not torch.equal(plain.layer.weight, before)


class SkippingLast(Tagger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Leaving(Tagger):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 1 else None


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("kind", [SkippingLast, Leaving, Tagger])
def test_a_last_batch_that_is_skipped_ends_the_epoch(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the step, with all that come after it, or since the data has None in its place.

    Schedulers, and windows that wait.
    """
    own = model(kind)
    monkeypatch.setattr(own, "configure_optimizers", lambda: with_scheduler(own, interval="epoch"))
    last = None if kind is Tagger else stream(8)
    run = fit(own, [stream(12), last], max_epochs=2, accumulate_grad_batches=2)
    assert run.global_step == 4  # of two windows, and of one
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(own.lr * 0.5**2)


class Logging(Tagger):
    def loss(self, out: Any, y: Any) -> Any:
        value = super().loss(out, y)
        self.log("value", value)
        return value


def test_a_log_in_the_loss() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)loss .* only once.* use self\.log in on_chunk"):
        fit(model(Logging), [stream(8)])


class OutOnly(Tagger):
    def forward(self, x: Any, state: Any) -> Any:
        return super().forward(x, state)[0]


def test_a_forward_that_returns_no_state() -> None:
    with pytest.raises(
        TypeError, match=r"forward: expected \(out, state\), found a Tensor\. Return"
    ):
        fit(model(OutOnly), [stream(8)])


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda out, state: {"out": out, "state": state}, "a dict"),
        (lambda out, state: (out, out, state), "a tuple of 3"),
        (lambda out, state: None, "a NoneType"),
    ],
)
def test_a_forward_that_returns_no_pair(result: Any, found: str) -> None:
    class Returning(Tagger):
        def forward(self, x: Any, state: Any) -> Any:
            return result(*super().forward(x, state))

    words = rf"forward: expected \(out, state\), found {found}\. Return the output and the state"
    own = model(Returning)
    with pytest.raises(TypeError, match=words):
        fit(own, [stream(8)])
    own.initial_state = lambda x: zeros(x.shape[1])
    with pytest.raises(TypeError, match=words):
        fit(own, [stream(8)])


@pytest.mark.parametrize(("name", "of"), [("state", "state"), ("out", "output")])
def test_a_forward_that_returns_no_tensors(name: str, of: str) -> None:
    class Returning(Tagger):
        def forward(self, x: Any, state: Any) -> Any:
            out, (h, c) = super().forward(x, state)
            return (out, {"h": h, "c": None}) if name == "state" else ({"h": h, "c": None}, (h, c))

    own = model(Returning)
    words = rf"forward: expected tensors in the {of} that it returns, found a None.* {name}\['c'\]"
    with pytest.raises(TypeError, match=words):
        fit(own, [stream(8)])


def test_data_in_another_dtype_than_the_module() -> None:
    x, y = stream(8)
    words = r"forward\(x, None\) failed \(.* there is no state to start from\. x is torch.{}, but "
    words += r"the module is torch.float64: cast one of them, such as x\.to\(torch\.float64\) in ch"
    for other in (x.float(), x.long()):
        with pytest.raises(TypeError, match=words.format(str(other.dtype).split(".")[1])):
            fit(model(), [(other, y)])

    class OfDicts(Tagger):
        def forward(self, x: Any, state: Any) -> Any:
            return super().forward(x["numbers"] + x["token"].unsqueeze(-1), state)

    own = model(OfDicts)
    with pytest.raises(TypeError, match=r"x\['numbers'\] is torch\.float32, but the module is"):
        fit(own, [({"token": y, "numbers": x.float()}, y)])
