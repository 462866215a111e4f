"""The trainer for Ignite against Ignite's own: same seeds, same calls, same results."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.contrib.engines import tbptt as theirs
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, ProgressBar
from ignite.metrics import Average, MeanSquaredError, RunningAverage
from torch import Tensor, nn

from ftbptt.integrations.ignite import create_supervised_tbptt_trainer

from .ignite_models import MODELS, Counting, Plain, batches, model_of
from .ignite_runs import COMPLETED, STARTED, assert_same, check, trainer_of

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.mark.parametrize("name", MODELS)
def test_eager_is_bit_for_bit_ignite(name: str) -> None:
    model, data, dim = model_of(name)
    check(model, data, 0.0, dim=dim, backend="eager")


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n].compiles])
def test_compiled_is_ignite(name: str, ran: list[int]) -> None:
    model, data, dim = model_of(name)
    reason = MODELS[name].without_state
    with pytest.warns(RuntimeWarning, match=reason) if reason else nullcontext():
        check(model, data, 1e-10, dim=dim)
    chunks = 2 * len(data) * 3
    assert len(ran) >= chunks - 6  # the first chunk of each kind runs both eagerly and compiled
    assert set(ran) == {2, 4} if dim == 0 else {2}  # rows, with time on axis 1


@pytest.mark.parametrize("name", [n for n in MODELS if not MODELS[n].compiles])
def test_a_model_that_cannot_be_compiled_is_bit_for_bit_ignite_with_one_warning(name: str) -> None:
    model, data, dim = model_of(name)
    reason = MODELS[name].reason
    assert reason
    with pytest.warns(RuntimeWarning, match=f"runs as it is written.*{reason}") as caught:
        other = check(model, data, 0.0, dim=dim)
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    for (key, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), key
    if isinstance(model, Counting):
        assert model.calls == other.calls > 0


@pytest.mark.parametrize("name", ["LSTM", "batch first"])
def test_kernels_are_ignite(name: str, kernels: None, ran: list[int]) -> None:
    model, data, dim = model_of(name)
    check(model, data, 1e-10, dim=dim)
    assert ran


def test_events_fire_at_the_same_moments() -> None:
    def events_of(make: Any) -> list[Any]:
        model, data, _ = model_of("LSTM")
        trainer, _ = trainer_of(model, make, **extra)
        seen: list[Any] = []
        for event in (STARTED, COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED):

            def note(engine: Engine, event: Any = event) -> None:
                p = next(model.parameters())
                grad = None if p.grad is None else p.grad.sum().item()
                seen.append((event.name, engine.state.output, p.sum().item(), grad, model.training))
                model.eval()

            trainer.add_event_handler(event, note)
        trainer.run(data, max_epochs=2)
        return seen

    extra: dict[str, Any] = {}
    expected = events_of(theirs.create_supervised_tbptt_trainer)
    assert [e[0] for e in expected[:8]] == [
        "ITERATION_STARTED", *["TIME_ITERATION_STARTED", "TIME_ITERATION_COMPLETED"] * 3,
        "ITERATION_COMPLETED",
    ]  # fmt: skip
    extra = {"backend": "eager", "loss_mean": "chunks"}
    assert events_of(create_supervised_tbptt_trainer) == expected


def test_handlers_may_use_the_events_of_ignite() -> None:
    trainer, losses = trainer_of(model_of("LSTM")[0], backend="eager")
    seen: list[float] = []
    trainer.on(theirs.Tbptt_Events.TIME_ITERATION_COMPLETED)(
        lambda: seen.append(trainer.state.output)
    )
    trainer.run(model_of("LSTM")[1])
    assert seen == losses


def test_the_model_is_called_without_a_state_and_then_with_a_leaf() -> None:
    calls: list[Any] = []

    class Spy(Plain):
        def forward(self, *args: Any) -> Any:
            calls.append(args)
            return super().forward(*args)

    model = Spy().double()
    trainer, _ = trainer_of(model, backend="eager")
    trainer.run(batches(1))
    assert [len(args) for args in calls] == [1, 2, 2]
    assert [len(args[0]) for args in calls] == [4, 4, 2]
    for _, hidden in calls[1:]:
        assert all(leaf.is_leaf and not leaf.requires_grad for leaf in hidden)


def test_prepare_batch_sees_each_chunk() -> None:
    seen: list[Any] = []

    def prepare(batch: Any, device: Any, non_blocking: bool) -> Any:
        x, y = batch
        seen.append((tuple(x.shape), device, non_blocking))
        return x.double(), y.double()

    model = Plain().double()
    data = [(x.float(), y.float()) for x, y in batches(1)]
    trainer, _ = trainer_of(model, device="cpu", non_blocking=True, prepare_batch=prepare)
    trainer.run(data)
    assert seen == [((n, 3, 3), "cpu", True) for n in (4, 4, 2)]


def test_a_parameter_that_the_loss_does_not_reach_keeps_no_gradient(ran: list[int]) -> None:
    class Spare(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: Tensor, hidden: Any = None) -> Any:
            out, hidden = super().forward(x, hidden)
            return out * self.frozen, hidden

    model = Spare().double()
    check(model, batches(3), 1e-10)
    assert ran
    assert model.spare.grad is model.frozen.grad is None
    assert model.rnn.weight_hh_l0.grad is not None


def test_parameters_without_an_optimizer_gather_gradients_as_in_ignite(ran: list[int]) -> None:
    models = []
    for make, extra in (
        (theirs.create_supervised_tbptt_trainer, {}), (create_supervised_tbptt_trainer, {}),
    ):  # fmt: skip
        model = model_of("LSTM")[0]
        optimizer = torch.optim.SGD(model.readout.parameters(), lr=0.1)
        trainer, _ = trainer_of(model, make, optimizer=optimizer, **extra)
        trainer.run(batches(3))
        models.append(model)
    assert ran
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)


# -- Ignite's handlers ----------------------------------------------------------------------------


def test_metrics_progress_bar_and_early_stopping(capsys: pytest.CaptureFixture[str]) -> None:
    model, data, _ = model_of("LSTM")
    trainer, losses = trainer_of(model)
    Average().attach(trainer, "mean")
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running")
    ProgressBar().attach(trainer, ["running"])

    def evaluate(_: Engine, batch: Any) -> Any:
        with torch.no_grad():
            return model(batch[0])[0], batch[1]

    evaluator = Engine(evaluate)
    MeanSquaredError().attach(evaluator, "mse")
    stop = EarlyStopping(2, lambda engine: 0.0, trainer)
    evaluator.add_event_handler(Events.COMPLETED, stop)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(data))
    trainer.run(data, max_epochs=9)
    assert trainer.state.epoch == 3
    assert evaluator.state.metrics["mse"] > 0
    assert trainer.state.metrics["mean"] == pytest.approx(
        sum(losses[-9:][i] * (4, 4, 2)[i % 3] for i in range(9)) / 30
    )
    assert "running=" in capsys.readouterr().err


def test_a_checkpoint_of_the_trainer_resumes_within_an_epoch(tmp_path: Path) -> None:
    model, data, _ = model_of("LSTM")

    def begin(model: nn.Module) -> tuple[Engine, list[float], dict[str, Any]]:
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        trainer, losses = trainer_of(model, optimizer=optimizer, state="carry")
        return trainer, losses, {"trainer": trainer, "model": model, "optimizer": optimizer}

    trainer, losses, to_save = begin(copy.deepcopy(model))
    saver = Checkpoint(to_save, DiskSaver(tmp_path, require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, saver)
    trainer.run(data, max_epochs=3)
    for iteration in (4, 6):  # in the second epoch, and at its end
        file = next(tmp_path.glob(f"*_{iteration}.pt"))
        fresh = model_of("LSTM")[0]
        resumed, resumed_losses, to_load = begin(fresh)
        Checkpoint.load_objects(to_load, torch.load(file, weights_only=True))
        done = iteration % 3

        def skip(engine: Engine, left: list[int] = [done]) -> None:  # noqa: B006
            while left[0]:
                next(engine._dataloader_iter)  # type: ignore[arg-type]
                left[0] -= 1

        resumed.add_event_handler(Events.GET_BATCH_STARTED, skip)
        resumed.run(data, max_epochs=3)
        assert resumed_losses == pytest.approx(losses[iteration * 3 :], rel=0, abs=1e-10)
        assert_same(fresh, to_save["model"], 1e-10)


# -- bad input ------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a step of 0": ({"step": 0}, ValueError, "tbtt_step: expected at least 1, found 0"),
    "a step that is no number": ({"step": 2.5}, TypeError, "tbtt_step: expected a whole number"),
    "gaps": ({"k1": 4, "k2": 2}, ValueError, "k2: an update every k1=4 .*train_stream"),
    "k1": ({"k1": 0}, ValueError, "k1: expected at least 1, found 0"),
    "accumulate": ({"accumulate": 0}, ValueError, "accumulate: expected at least 1"),
    "state": ({"state": "zeros"}, ValueError, 'state: expected a tree of tensors, "carry"'),
    "a leaf of state": (
        {"state": (1.0,)},
        TypeError,
        r"state\[0\]: expected a tensor, found float",
    ),
    "clip": ({"clip_norm": 0.0}, ValueError, "clip_norm: expected a number above 0"),
    "mean": ({"loss_mean": "all"}, ValueError, "loss_mean: expected one of steps, chunks"),
    "backend": ({"backend": "gpu"}, ValueError, "backend: expected one of auto"),
    "loss": ({"loss": 3}, TypeError, r"loss_fn: expected a function loss_fn\(out, y\), found int"),
    "a class as loss": (
        {"loss": nn.MSELoss}, TypeError, r"loss_fn: .* the class MSELoss\. .* as MSELoss\(\."
    ),
    "reset": (
        {"reset": torch.ones(3)}, TypeError, r"reset: expected a function reset\(batch\), found Ten"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments(name: str) -> None:
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        trainer_of(Plain(), **options)


BAD_RUNS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "no tensors": ({}, [([1.0], [2.0])], TypeError, "batch: expected tensors .* list for x"),
    "three parts": (
        {}, [(torch.ones(8, 3, 3), torch.ones(8, 3, 2), torch.ones(8))], TypeError,
        r"batch: expected \(x, y\), found a tuple of 3. Further parts are for reset=",
    ),
    "dim": ({"dim": 5}, batches(1), ValueError, r"dim: x of shape .* has no axis 5"),
    "lengths": (
        {"k2": 8}, [(torch.ones(8, 3, 3), torch.ones(6, 3, 2))], ValueError,
        "batch: x has 8 steps on axis 0, but y has 6",
    ),
    "reset's type": (
        {"reset": lambda batch: torch.ones(10)}, batches(1), TypeError,
        "reset: expected it to return a bool tensor",
    ),
    "reset's shape": (
        {"reset": lambda batch: torch.ones(9).bool()}, batches(1), ValueError,
        r"reset: expected it to return shape \[10\] or \[10, 3\] .* found \[9\]",
    ),
    "a model that fused cannot run": (
        {"model": "norm over time", "backend": "fused"}, batches(2), RuntimeError,
        "backend: 'fused' cannot run NormOverTime.*several steps at once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RUNS)
def test_invalid_batches(name: str) -> None:
    options, data, kind, message = BAD_RUNS[name]
    options = dict(options)
    model = model_of(options.pop("model", "LSTM"))[0]
    trainer, _ = trainer_of(model, **{"backend": "eager", **options})
    with pytest.raises(kind, match=message):
        trainer.run(data)


def test_the_package_does_not_import_ignite() -> None:
    code = (
        "import sys, ftbptt, ftbptt.training, ftbptt.integrations; print('ignite' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
