"""The trainer for Ignite beside Ignite's own: same seeds, same calls, same numbers."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.contrib.engines import tbptt as theirs
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, ProgressBar
from ignite.metrics import Average, MeanSquaredError, RunningAverage
from torch import Tensor, nn

from ftbptt import TrainSegment, backends
from ftbptt.integrations.ignite import Tbptt_Events, create_supervised_tbptt_trainer
from ftbptt.training import Chunk, train_stream

from .ignite_models import MODELS, Counting, Plain, batches, model_of

STARTED, COMPLETED = Tbptt_Events.TIME_ITERATION_STARTED, Tbptt_Events.TIME_ITERATION_COMPLETED
mse = nn.MSELoss()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What would be compiled runs operation by operation, but for a test that wants the kernels."""
    if "kernels" not in request.fixturenames:
        monkeypatch.setitem(backends._BY_NAME, "fused", backends.EAGER)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each chunk that ran as a segment."""
    found: list[int] = []
    call = TrainSegment.__call__

    def counting(self: TrainSegment, params: Any, state: Any, x: Any, y: Any, **rest: Any) -> Any:
        found.append(len(x))
        return call(self, params, state, x, y, **rest)

    monkeypatch.setattr(TrainSegment, "__call__", counting)
    return found


def trainer_of(
    model: Any,
    make: Callable[..., Engine] = create_supervised_tbptt_trainer,
    step: int = 4,
    loss: Any = mse,
    optimizer: Any = None,
    **options: Any,
) -> tuple[Engine, list[float]]:
    """A trainer, and the loss of each chunk that it will run."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    trainer = make(model, optimizer, loss, step, **options)
    losses: list[float] = []
    trainer.add_event_handler(COMPLETED, lambda: losses.append(trainer.state.output))
    return trainer, losses


def assert_same(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def check(
    model: nn.Module, data: Any, tolerance: float, *, dim: int = 0, **options: Any
) -> nn.Module:
    """Trains it and a copy beside Ignite's trainer: losses, means and parameters are the same."""
    other = copy.deepcopy(model)
    theirs_ = trainer_of(other, theirs.create_supervised_tbptt_trainer, dim=dim)
    ours = trainer_of(model, dim=dim, loss_mean="chunks", **options)
    means: list[list[float]] = []
    for trainer, _ in (theirs_, ours):
        own: list[float] = []
        means.append(own)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda e, own=own: own.append(e.state.output)
        )
        torch.manual_seed(1)
        random.seed(1)
        trainer.run(data, max_epochs=2)
    assert len(ours[1]) == len(theirs_[1]) > 0
    assert ours[1] == pytest.approx(theirs_[1], rel=0, abs=tolerance)
    assert means[1] == pytest.approx(means[0], rel=0, abs=tolerance)
    assert all(type(loss) is float for loss in ours[1])
    assert_same(model, other, tolerance)
    return other


# -- a drop-in ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_as_written_it_is_bit_for_bit_ignite(name: str) -> None:
    model, data, dim = model_of(name)
    check(model, data, 0.0, dim=dim, backend="eager")


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n].compiles])
def test_compiled_it_is_ignite(name: str, ran: list[int]) -> None:
    model, data, dim = model_of(name)
    check(model, data, 1e-10, dim=dim)
    chunks = 2 * len(data) * 3
    assert len(ran) >= chunks - 6  # the first of each kind runs both ways
    assert set(ran) == {2, 4} if dim == 0 else {2}  # rows, with time on axis 1


@pytest.mark.parametrize("name", [n for n in MODELS if not MODELS[n].compiles])
def test_what_cannot_be_compiled_is_ignite_bit_for_bit_and_says_so_once(name: str) -> None:
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
def test_compiled_by_kernels_it_is_ignite(name: str, kernels: None, ran: list[int]) -> None:
    model, data, dim = model_of(name)
    check(model, data, 1e-10, dim=dim)
    assert ran


def test_the_events_come_at_the_same_moments() -> None:
    def told(make: Any) -> list[Any]:
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
    expected = told(theirs.create_supervised_tbptt_trainer)
    assert [e[0] for e in expected[:8]] == [
        "ITERATION_STARTED", *["TIME_ITERATION_STARTED", "TIME_ITERATION_COMPLETED"] * 3,
        "ITERATION_COMPLETED",
    ]  # fmt: skip
    extra = {"backend": "eager", "loss_mean": "chunks"}
    assert told(create_supervised_tbptt_trainer) == expected


def test_handlers_may_be_attached_by_the_events_of_ignite() -> None:
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


# -- what compiled chunks must notice -------------------------------------------------------------


def test_an_attribute_that_a_handler_changes_counts(ran: list[int]) -> None:
    class Scaled(Plain):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.scale = {"out": 1.0}

        def forward(self, x: Tensor, hidden: Any = None) -> Any:
            out, hidden = super().forward(x, hidden)
            return out * self.scale["out"], hidden

    models = []
    for make in (theirs.create_supervised_tbptt_trainer, create_supervised_tbptt_trainer):
        torch.manual_seed(0)
        model = Scaled().double()
        trainer, _ = trainer_of(model, make)

        def change(engine: Engine, model: Scaled = model) -> None:
            model.scale["out"] = float(engine.state.epoch)

        trainer.add_event_handler(Events.EPOCH_STARTED, change)
        trainer.run(batches(3), max_epochs=3)
        models.append(model)
    assert_same(models[1], models[0], 1e-10)
    assert len(ran) > 10


def test_an_attribute_that_changes_all_the_time_is_not_compiled_for_each() -> None:
    model = model_of("LSTM")[0]
    trainer, _ = trainer_of(model)

    def change(engine: Engine) -> None:
        model.iteration = engine.state.iteration

    trainer.add_event_handler(Events.ITERATION_STARTED, change)
    with pytest.warns(RuntimeWarning, match="'iteration' of Plain is changed again and again"):
        trainer.run(batches(20))


def test_a_constant_of_the_loss_that_is_written_in_place_counts(ran: list[int]) -> None:
    models = []
    for make in (theirs.create_supervised_tbptt_trainer, create_supervised_tbptt_trainer):
        model = model_of("LSTM")[0]
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 0.5]).double())

        def loss(out: Tensor, y: Tensor, criterion: nn.Module = criterion) -> Tensor:
            return criterion(out.flatten(0, 1), (y[..., 0] > 0).long().flatten())

        def change(engine: Engine, weight: Tensor = criterion.weight) -> None:
            weight[0] = float(engine.state.epoch)

        trainer, _ = trainer_of(model, make, loss=loss)
        trainer.add_event_handler(Events.EPOCH_STARTED, change)
        trainer.run(batches(3), max_epochs=3)
        models.append(model)
    assert_same(models[1], models[0], 1e-10)
    assert len(ran) > 10


def test_inputs_that_are_computed_from_parameters_train_them() -> None:
    models = []
    for make in (theirs.create_supervised_tbptt_trainer, create_supervised_tbptt_trainer):
        model = model_of("LSTM")[0]
        encoder = nn.Linear(3, 3).double()

        def prepare(batch: Any, encoder: Any = encoder, **_: Any) -> Any:
            return encoder(batch[0]), batch[1]

        parameters = [*model.parameters(), *encoder.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        trainer, _ = trainer_of(model, make, optimizer=optimizer, prepare_batch=prepare)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.run(batches(2))
        models.append(encoder)
    assert "x requires a gradient" in str(caught[-1].message)
    assert_same(models[1], models[0], 0.0)


RATE = {"l2": 0.0}


def test_a_global_of_the_loss_that_changes_counts(ran: list[int]) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(out, y) + RATE["l2"] * out.square().mean()

    models = []
    for make in (theirs.create_supervised_tbptt_trainer, create_supervised_tbptt_trainer):
        model = model_of("LSTM")[0]
        trainer, _ = trainer_of(model, make, loss=loss)
        trainer.add_event_handler(
            Events.EPOCH_STARTED, lambda e: RATE.update(l2=0.1 * e.state.epoch)
        )
        trainer.run(batches(3), max_epochs=3)
        models.append(model)
    assert_same(models[1], models[0], 1e-10)
    assert len(ran) > 10


def test_a_penalty_on_the_parameters_in_the_loss_is_seen() -> None:
    """However small it is: it is found in autograd's graph, not in the numbers."""
    models = []
    for make in (theirs.create_supervised_tbptt_trainer, create_supervised_tbptt_trainer):
        model = model_of("LSTM")[0]

        def loss(out: Tensor, y: Tensor, model: Any = model) -> Tensor:
            return mse(out, y) + 1e-14 * sum(p.square().sum() for p in model.parameters())

        trainer, _ = trainer_of(model, make, loss=loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.run(batches(2))
        models.append(model)
    assert "the loss itself uses parameters" in str(caught[-1].message)
    assert_same(models[1], models[0], 0.0)


def test_what_shows_in_the_gradient_alone_is_seen() -> None:
    """A convolution over time whose weights are zero: loss and state are those of its steps."""
    model, data, _ = model_of("convolution")
    trainer, _ = trainer_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.warns(RuntimeWarning, match=r"gradient of conv.weight.*several steps at once"):
        trainer.run(data)


@pytest.mark.parametrize("where", ["module", "parameter", "gradient"])
def test_a_hook_is_called_at_each_chunk(where: str) -> None:
    model, calls = model_of("LSTM")[0], []
    trainer, losses = trainer_of(model)
    trainer.run(batches(2))

    def hook(*args: Any) -> None:
        calls.append(None)

    if where == "module":
        model.readout.register_full_backward_hook(hook)
    elif where == "parameter":
        model.readout.weight.register_post_accumulate_grad_hook(hook)
    else:
        model.readout.weight.register_hook(hook)
    losses.clear()
    with pytest.warns(RuntimeWarning, match="a hook is registered on its .*readout"):
        trainer.run(batches(2))
    assert len(calls) == len(losses) == 6


def test_a_cache_that_the_first_call_builds_is_no_side_effect(ran: list[int]) -> None:
    class Lazy(Plain):
        scale: Tensor | None = None

        def forward(self, x: Tensor, hidden: Any = None) -> Any:
            if self.scale is None:
                self.scale = torch.full((2,), 0.5).double()
            out, hidden = super().forward(x, hidden)
            return out * self.scale, hidden

    check(Lazy().double(), batches(4), 1e-10)
    assert len(ran) > 10


def test_a_chunk_without_a_gradient_decides_nothing() -> None:
    """A loss that is all padding at first would let any model pass."""
    data = batches(3)
    data[0] = (data[0][0], torch.full_like(data[0][1], float("nan")))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        valid = y == y
        return torch.where(valid, out - torch.where(valid, y, out), 0.0 * out).square().mean()

    model, _, _ = model_of("norm over time")
    trainer, _ = trainer_of(model, loss=loss)
    trainer.run(data[:1])
    with pytest.warns(RuntimeWarning, match="several steps at once"):
        trainer.run(data)


def test_a_learned_first_state_that_is_zero_now_gets_its_gradient(ran: list[int]) -> None:
    """Its first chunks run as written: from zeros, they would give no gradient."""
    model, data, _ = model_of("learned start")
    assert isinstance(model, nn.Module)
    check(model, data, 1e-10)
    assert model.start.abs().sum() > 0
    assert ran


def test_noise_that_steps_do_not_share_is_compiled(ran: list[int]) -> None:
    class Dropped(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor, hidden: Any = None) -> Any:
            out, hidden = super().forward(self.dropout(x), hidden)
            return out, hidden

    model = Dropped().double()
    trainer, _ = trainer_of(model)
    first = copy.deepcopy(model)
    trainer.run(batches(8))
    assert len(ran) > 20
    # What was tried out has drawn nothing: the first chunk's noise is Ignite's.
    torch.manual_seed(5)
    again, other = trainer_of(first)[0], copy.deepcopy(first)
    outputs = []
    for run in (again, trainer_of(other, theirs.create_supervised_tbptt_trainer)[0]):
        torch.manual_seed(5)
        run.run([(x[:4], y[:4]) for x, y in batches(1)])
        outputs.append((run.state.output, torch.rand(1).item()))
    assert outputs[0] == outputs[1]


# -- what it has beyond Ignite's ------------------------------------------------------------------


def loop(
    model: Any, data: Any, hidden: Any, *, k1: int, k2: int, reset: Any = None, lr: float = 0.2
) -> list[float]:
    """TBPTT(k1, k2) with the state carried across batches, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for x, y in data:
        states = {0: hidden}
        for end in range(k1, len(x) + k1, k1):
            start, end = max(0, end - k2), min(end, len(x))
            hidden, outs = states[start], []
            for t in range(start, end):
                states[t] = tuple(leaf.detach() for leaf in hidden)
                if reset is not None:
                    keep = ~reset[t].reshape(1, -1, 1)
                    hidden = tuple(leaf * keep for leaf in hidden)
                out, hidden = model(x[t : t + 1], hidden)
                outs.append(out)
            states[end] = tuple(leaf.detach() for leaf in hidden)
            hidden = states[end]
            optimizer.zero_grad()
            loss = mse(torch.cat(outs), y[start:end])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def zeros() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 3, 5).double(), torch.zeros(1, 3, 5).double()


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("k1, k2", [(4, 4), (2, 5), (3, 4), (1, 3)])
@pytest.mark.parametrize("with_reset", [False, True])
def test_windows_state_and_resets(
    backend: str, k1: int, k2: int, with_reset: bool, ran: list[int]
) -> None:
    model, data, _ = model_of("LSTM")
    other = copy.deepcopy(model)
    reset = torch.rand(10, 3, generator=torch.Generator().manual_seed(2)) < 0.2
    trainer, losses = trainer_of(
        model, step=k1, k2=k2, state=zeros(), backend=backend,
        reset=(lambda batch: reset) if with_reset else None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
    )  # fmt: skip
    trainer.run(data)
    given = reset if with_reset else None
    expected = loop(other, data, zeros(), k1=k1, k2=k2, reset=given)
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)
    assert_same(model, other, 1e-10)
    assert bool(ran) == (backend == "auto")


def test_it_is_train_stream_with_the_same_options() -> None:
    from ftbptt import as_step, make_train_segment

    model, data, _ = model_of("LSTM")
    other = copy.deepcopy(model)
    reset = torch.zeros(10, dtype=torch.bool)
    reset[6] = True
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    trainer, _ = trainer_of(
        model, optimizer=optimizer, state=zeros(), reset=lambda batch: reset, clip_norm=0.1,
        clip_value=0.05, accumulate=3,
    )  # fmt: skip
    trainer.run(data)
    segment = make_train_segment(as_step(other, sequence=True), mse, backend="eager")
    params = dict(other.named_parameters())
    adam = torch.optim.Adam(params.values(), 0.01)
    state: Any = zeros()
    for x, y in data:  # 10 steps in chunks of 4, 4 and 2 make one update
        run = train_stream(
            segment, params, state, Chunk(x, y, reset), adam, k1=4, accumulate=3, clip_norm=0.1,
            clip_value=0.05, progress=False,
        )  # fmt: skip
        state = list(run)[-1].state
    assert_same(model, other, 1e-10)
    torch.testing.assert_close(trainer.state.hidden, state)


def test_k1_or_k2_alone() -> None:
    """``tbtt_step`` stands for the other."""
    found = []
    for options in ({"step": 4, "k1": 2}, {"step": 2, "k2": 4}, {"step": 9, "k1": 2, "k2": 4}):
        trainer, losses = trainer_of(model_of("LSTM")[0], backend="eager", **options)
        trainer.run(batches(2))
        found.append(losses)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 10


def test_a_state_that_is_carried_begins_anew_with_the_data() -> None:
    model, data, _ = model_of("LSTM")
    trainer, _ = trainer_of(model, state="carry", backend="eager")
    seen: list[Any] = []
    call = model.forward

    def forward(*args: Any) -> Any:
        seen.append(len(args))
        return call(*args)

    model.forward = forward  # type: ignore[method-assign]
    trainer.run(data, max_epochs=2)
    assert seen == ([1] + [2] * 8) * 2
    assert trainer.state.hidden[0].shape == (1, 3, 5)
    seen.clear()
    trainer.run(data, max_epochs=4, epoch_length=3)
    assert seen == ([1] + [2] * 8) * 2


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_the_loss_of_an_iteration_is_weighted_by_steps(backend: str) -> None:
    for mean in ("steps", "chunks"):
        trainer, losses = trainer_of(model_of("LSTM")[0], loss_mean=mean, backend=backend)
        trainer.run(batches(1))
        weights = [4, 4, 2] if mean == "steps" else [1, 1, 1]
        expected = sum(a * b for a, b in zip(losses, weights, strict=True)) / sum(weights)
        assert trainer.state.output == pytest.approx(expected, rel=1e-12)


def test_accumulation_goes_across_batches_and_ends_with_the_epoch() -> None:
    model = model_of("LSTM")[0]
    steps: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer, losses = trainer_of(model, optimizer=optimizer, accumulate=4)
    optimizer.register_step_post_hook(lambda *_: steps.append(len(losses)))
    trainer.run(batches(3), max_epochs=2)
    # In the fourth chunk, before its event; what is left after nine at the end of the epoch.
    assert steps == [3, 7, 9, 12, 16, 18]


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_automatic_mixed_precision(backend: str, ran: list[int]) -> None:
    torch.manual_seed(0)
    model = Plain()
    data = [(x.float(), y.float()) for x, y in batches(4)]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        assert out.dtype == torch.bfloat16
        return mse(out.float(), y)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer, losses = trainer_of(
        model, loss=loss, autocast=torch.bfloat16, scaler=scaler, clip_norm=1.0, backend=backend
    )
    exact = copy.deepcopy(model)
    trainer.run(data, max_epochs=2)
    assert bool(ran) == (backend == "auto")
    own, expected = trainer_of(exact, clip_norm=1.0, backend="eager")
    own.run(data, max_epochs=2)
    assert losses == pytest.approx(expected, rel=0.05)
    assert_same(model, exact, 0.02)


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_scaler_alone_changes_nothing(backend: str) -> None:
    model, data, _ = model_of("LSTM")
    other = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    trainer_of(model, scaler=scaler, backend=backend)[0].run(data)
    trainer_of(other, backend="eager")[0].run(data)
    assert_same(model, other, 1e-10)


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


def test_a_checkpoint_of_the_trainer_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
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
        resumed, found, to_load = begin(fresh)
        Checkpoint.load_objects(to_load, torch.load(file, weights_only=True))
        done = iteration % 3

        def skip(engine: Engine, left: list[int] = [done]) -> None:  # noqa: B006
            while left[0]:
                next(engine._dataloader_iter)  # type: ignore[arg-type]
                left[0] -= 1

        resumed.add_event_handler(Events.GET_BATCH_STARTED, skip)
        resumed.run(data, max_epochs=3)
        assert found == pytest.approx(losses[iteration * 3 :], rel=0, abs=1e-10)
        assert_same(fresh, to_save["model"], 1e-10)


# -- what cannot be meant -------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a step of 0": ({"step": 0}, ValueError, "tbtt_step: expected at least 1, found 0"),
    "a step that is no number": ({"step": 2.5}, TypeError, "tbtt_step: expected a number of steps"),
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
    "loss": ({"loss": 3}, TypeError, "loss_fn: expected a function, found int"),
    "reset": ({"reset": torch.ones(3)}, TypeError, "reset: expected a function, found Tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_cannot_be_meant(name: str) -> None:
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        trainer_of(Plain(), **options)


BAD_RUNS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "no tensors": ({}, [([1.0], [2.0])], TypeError, "batch: expected tensors .* list for x"),
    "dim": ({"dim": 5}, batches(1), ValueError, "dim: 5 is no axis of x"),
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
    "what fused cannot run": (
        {"model": "norm over time", "backend": "fused"}, batches(2), RuntimeError,
        "backend: 'fused' cannot run NormOverTime.*several steps at once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RUNS)
def test_batches_that_cannot_be_meant(name: str) -> None:
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
