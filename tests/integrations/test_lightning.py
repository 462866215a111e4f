"""``TBPTTModule`` against plain loops of autograd, in float64."""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ftbptt.integrations.lightning import TBPTTModule
from ftbptt.training import Chunk

from ..training.streams import cross_entropy, mean_cross_entropy, stream, tagger, zeros
from .lightning_models import (
    Batchwise,
    ClassesFirst,
    Classifier,
    Masked,
    Tagger,
    assert_equal,
    by_hand,
    fit,
    loader,
    model,
    trainer,
    whole_loss,
)

# -- the loops ----------------------------------------------------------------------------------

CASES = {
    "k1 = k2": {"k1": 4},
    "overlapping": {"k1": 2, "k2": 7},
    "gaps": {"k1": 5, "k2": 2},
    "burn-in": {"k1": 4, "burn_in": 3},
    "each loss once": {"k1": 2, "k2": 6, "context": 4},
    "all": {"k1": 2, "k2": 5, "burn_in": 4, "context": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_windows(name: str) -> None:
    batches = [stream(22, seed=1), stream(9, seed=2)]
    own = model(**CASES[name])
    run = fit(own, batches, max_epochs=2)
    module, losses = by_hand(batches * 2, **CASES[name])
    assert_equal(list(own.parameters()), list(module.parameters()))
    assert run.global_step == len(losses)


@pytest.mark.parametrize("name", ["k1 = k2", "overlapping", "each loss once"])
def test_carry_across_batches(name: str) -> None:
    """Each epoch begins anew; within it the state goes on."""
    batches = [stream(8, seed=1), stream(11, seed=2), stream(5, seed=3)]
    own = model(**CASES[name], carry=True)
    fit(own, batches)
    module, _ = by_hand(batches, carry=True, **CASES[name])
    assert_equal(list(own.parameters()), list(module.parameters()))
    without, _ = by_hand(batches, **CASES[name])
    with pytest.raises(AssertionError):
        assert_equal(list(own.parameters()), list(without.parameters()))

    own = model(**CASES[name], carry=True)
    fit(own, batches[:1], max_epochs=2)
    module, _ = by_hand(batches[:1] * 2, **CASES[name])
    assert_equal(list(own.parameters()), list(module.parameters()))


@pytest.mark.parametrize("options", [{"k1": 5, "k2": 2}, {"k1": 4, "context": 3}])
def test_the_carried_state_is_behind_the_last_step(options: Any) -> None:
    """Also where the last steps of a batch are in no window with a loss."""
    batches = [stream(11, seed=1), stream(11, seed=2)]
    own = model(**options, carry=True, lr=0.0)
    fit(own, batches)
    module, state, whole = tagger(), zeros(), []
    for x, _ in batches:
        for x_t in x:
            out, state = module(x_t, state)
            whole.append(out)
    _, first = own.outs[len(own.outs) // 2]  # of the second batch
    start = 11 if options["k1"] == 4 else 11 + 3
    assert_equal(first, torch.stack(whole[start : start + len(first)]))


@pytest.mark.parametrize("time_dim", [1, -1])
def test_any_time_axis(time_dim: int) -> None:
    """``[B, T, D]`` with ``[B, T]``; and ``[B, D, T]`` with ``[B, T]``, as cross entropy has it."""
    x, y = stream(22)
    if time_dim == 1:
        own, batch = model(Batchwise, 1, k1=3, k2=5), (x.transpose(0, 1), y.T)
    else:
        own, batch = model(ClassesFirst, -1, k1=3, k2=5), (x.permute(1, 2, 0), y.T)
    fit(own, [batch])
    module, _ = by_hand([(x, y)], k1=3, k2=5)
    assert_equal(list(own.parameters()), list(module.parameters()))


def test_resets_and_masks() -> None:
    """As ``[B, T]`` beside data ``[B, T, D]``; the loss is the mean over valid steps."""
    x, y = stream(8)
    generator = torch.Generator().manual_seed(3)
    reset, mask = (torch.rand(8, 2, generator=generator) < p for p in (0.2, 0.6))
    own = model(Masked, 1)
    fit(own, [(x.transpose(0, 1), y.T, reset.T, mask.T)])
    module, state = tagger(), zeros()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for start in (0, 4):
        losses, state = [], tuple(leaf.detach() for leaf in state)
        for t in range(start, start + 4):
            state = tuple(leaf * ~reset[t].unsqueeze(1) for leaf in state)
            out, after = module(x[t], state)
            keep = mask[t].unsqueeze(1)
            state = tuple(torch.where(keep, a, b) for a, b in zip(after, state, strict=True))
            losses.append(cross_entropy(out[None], y[t : t + 1])[0])
        optimizer.zero_grad()
        (torch.stack(losses) * mask[start : start + 4]).sum().div(
            mask[start : start + 4].sum()
        ).backward()
        optimizer.step()
    assert_equal(list(own.parameters()), list(module.parameters()))


def test_kernels(kernels: None) -> None:
    own = Tagger(time_dim=0, backend="fused").renew(k1=3, k2=5)
    fit(own, [stream(22)])
    module, _ = by_hand([stream(22)], k1=3, k2=5)
    assert_equal(list(own.parameters()), list(module.parameters()))
    assert own._batches.train_segment.trace_count <= 1


# -- validation, test, prediction ---------------------------------------------------------------


def test_evaluation_in_chunks_is_the_whole_loss() -> None:
    batches = [stream(22, seed=1), stream(5, rows=3, seed=2)]
    own = model(k_eval=4)
    run = trainer()
    expected = whole_loss(batches, own.step)
    (found,) = run.validate(own, loader(batches), verbose=False)
    assert found == {"val_loss": pytest.approx(expected, abs=1e-7)}  # Lightning adds in float32
    (found,) = run.test(own, loader(batches), verbose=False)
    assert found == {"test_loss": pytest.approx(expected, abs=1e-7)}
    outs = run.predict(own, loader([(x,) for x, _ in batches] + [batches[0][0]]))
    together = torch.cat([out for stage, out in own.outs[:6]])
    assert_equal(outs[0], together)
    assert_equal(outs[2], outs[0], 0)
    own.renew(k_eval=256)
    (found,) = trainer(precision="64-true").validate(own, loader(batches), verbose=False)
    assert found == {"val_loss": pytest.approx(expected, abs=1e-14)}


def test_prediction_for_a_dict() -> None:
    class OfDicts(Classifier):
        def forward(self, x: Any, state: Any) -> tuple[Tensor, Any]:
            return super().forward(x["x"], state)

    own, x = OfDicts(), torch.randn(2, 9, 3, dtype=torch.float64)
    (out,) = trainer().predict(own, loader([{"x": x}]))
    (expected,) = trainer().predict(Classifier(), loader([(x,)]))
    assert_equal(out, expected, 0)


def test_zeros_of_a_layer_that_was_replaced() -> None:
    own, x = Classifier(), torch.randn(2, 9, 3, dtype=torch.float64)
    run = trainer()
    run.predict(own, loader([x]))
    own.lstm = nn.LSTM(3, 5, 2, batch_first=True).double()
    own.readout = nn.Linear(5, 3).double()
    (out,) = run.predict(own, loader([x]))
    assert_equal(out, own(x, None)[0], 1e-12)


def test_evaluation_by_valid_steps() -> None:
    x, y = stream(22)
    mask = torch.rand(22, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    own = model(Masked, k_eval=4)
    (found,) = trainer().validate(own, loader([(x, y, None, mask)]), verbose=False)
    total, state = 0.0, zeros()
    for t in range(22):
        out, after = own.step(x[t], state)
        keep = mask[t].unsqueeze(1)
        state = tuple(torch.where(keep, a, b) for a, b in zip(after, state, strict=True))
        total += float((cross_entropy(out[None], y[t : t + 1])[0] * mask[t]).sum().detach())
    assert found["val_loss"] == pytest.approx(total / int(mask.sum()), abs=1e-7)


def test_evaluation_carries_too() -> None:
    """Pieces of one sequence are one sequence; each loader and each run begins anew."""
    x, y = stream(22)
    own = model(carry=True)
    pieces = [(x[:9], y[:9]), (x[9:], y[9:])]
    run = trainer()
    for _ in range(2):
        found = run.validate(own, [loader(pieces), loader(pieces)], verbose=False)
        for i in range(2):
            loss = found[i][f"val_loss/dataloader_idx_{i}"]
            assert loss == pytest.approx(whole_loss([(x, y)], own.step), abs=1e-7)
    outs = run.predict(own, loader([(x[:9],), (x[9:],)]))
    assert_equal(torch.cat(outs), run.predict(own, loader([x]))[0])


def test_validation_leaves_the_carried_state_alone() -> None:
    batches = [stream(8, seed=1), stream(11, seed=2)]
    own = model(carry=True)
    fit(own, batches, [stream(9, seed=5)], val_check_interval=1)
    module, _ = by_hand(batches, carry=True)
    assert_equal(list(own.parameters()), list(module.parameters()))


# -- the module itself --------------------------------------------------------------------------


def test_layers_of_torch_start_from_none() -> None:
    own = Classifier()
    module = copy.deepcopy(own)
    x, y = torch.randn(2, 13, 3).double(), torch.randint(3, (2, 13))
    fit(own, [(x, y)])
    optimizer, state = torch.optim.SGD(module.parameters(), lr=0.5), None
    for start in range(0, 13, 5):
        out, state = module(x[:, start : start + 5], state)
        loss = module.loss(out, y[:, start : start + 5])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(leaf.detach() for leaf in state)
    assert_equal(list(own.parameters()), list(module.parameters()))


def test_copies_train_on_their_own() -> None:
    own = Classifier()
    x, y = torch.randn(2, 13, 3).double(), torch.randint(3, (2, 13))
    other = copy.deepcopy(own)
    fit(own, [(x, y)])
    before = [p.detach().clone() for p in own.parameters()]
    fit(other, [(x, y)])
    assert_equal([*other.parameters()], before, 0)
    fit(copy.deepcopy(own), [(x, y)])  # what is compiled is not copied
    assert_equal([*own.parameters()], before, 0)


def test_a_second_fit_compiles_nothing() -> None:
    own = model()
    for _ in range(2):
        fit(own.renew(), [stream(8)], gradient_clip_val=1.0)
        made = own._batches
        traced = made.train_segment.trace_count
    assert own._batches is made
    assert made.train_segment.trace_count == traced
    again = trainer(accumulate_grad_batches=2)
    for _ in range(2):  # the same Trainer, which has the callback already
        again.fit(own.renew(), loader([stream(8)]))
        again.fit_loop.epoch_progress.reset()


def test_nothing_imports_lightning_unasked() -> None:
    code = "import sys, ftbptt, ftbptt.training; print('lightning' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# -- bad input ----------------------------------------------------------------------------------


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
        own._run.on_fit_start(SimpleNamespace(world_size=1, optimizers=two), own)
    monkeypatch.undo()
    monkeypatch.setattr(own, "configure_callbacks", lambda: [])
    with pytest.raises(RuntimeError, match="configure_callbacks: this module's own callback"):
        fit(own, [stream(8)])


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
