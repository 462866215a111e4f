"""Options that Ignite's own trainer lacks: windows, carried states, resets, precision."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ftbptt.training import Chunk, train_stream

from .ignite_models import Plain, batches, model_of
from .ignite_runs import COMPLETED, assert_same, mse, trainer_of

pytestmark = pytest.mark.usefixtures("uncompiled")


def loop(
    model: Any, data: Any, hidden: Any, *, k1: int, k2: int, reset: Any = None, lr: float = 0.2
) -> list[float]:
    """TBPTT(k1, k2) with the state carried across batches, one step at a time."""
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
    expected = loop(other, data, zeros(), k1=k1, k2=k2, reset=reset if with_reset else None)
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
    """The other is ``tbtt_step``."""
    runs = []
    for options in ({"step": 4, "k1": 2}, {"step": 2, "k2": 4}, {"step": 9, "k1": 2, "k2": 4}):
        trainer, losses = trainer_of(model_of("LSTM")[0], backend="eager", **options)
        trainer.run(batches(2))
        runs.append(losses)
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]) == 10


def test_a_carried_state_starts_over_with_the_data() -> None:
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


def test_a_carried_state_starts_over_after_an_epoch_that_was_terminated() -> None:
    """Whose data starts over, without the event that tells of its end."""
    model, data, _ = model_of("LSTM")
    trainer, _ = trainer_of(model, state="carry", backend="eager")
    carried: list[bool] = []

    @trainer.on(Events.ITERATION_STARTED)
    def note(engine: Any) -> None:
        carried.append(engine.state.hidden is not None)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def stop(engine: Any) -> None:
        engine.terminate_epoch()

    trainer.run(data, max_epochs=2)
    assert carried == [False, True, False, True, True]


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
    # In each fourth chunk, before its event; the ninth alone at the end of the epoch.
    assert steps == [3, 7, 9, 12, 16, 18]


def test_accumulation_begins_anew_after_a_run_that_failed() -> None:
    found = []
    for fails in (False, True):
        model = model_of("LSTM")[0]
        trainer, losses = trainer_of(model, accumulate=4, backend="eager")
        trainer.interrupt_resume_enabled = False  # else Ignite leaves out the run after an error
        if fails:

            @trainer.on(COMPLETED)
            def fail(engine: Any, losses: list[float] = losses) -> None:
                if len(losses) == 2:
                    raise KeyError("once")

            with pytest.raises(KeyError):
                trainer.run(batches(3), max_epochs=1)
            trainer.state.epoch = trainer.state.iteration = 0
        trainer.run(batches(3), max_epochs=1)
        found.append(model)
    assert_same(found[1], found[0], 0)


def test_accumulation_with_a_loss_that_has_parameters() -> None:
    """The first chunk, which is also tried compiled, weighs no more than others: here by half."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()).double())

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return mse(out * self.scale, y)

    found = []
    for backend in ("eager", "auto"):
        model, loss = model_of("LSTM")[0], Scaled()
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.2)
        trainer, _ = trainer_of(
            model, loss=loss, optimizer=optimizer, k1=2, k2=4, accumulate=2, backend=backend
        )
        words = "the loss itself uses parameters"
        with nullcontext() if backend == "eager" else pytest.warns(RuntimeWarning, match=words):
            trainer.run(batches(1))
        found.append([*model.parameters(), *loss.parameters()])
    torch.testing.assert_close(*found)


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
    exact_trainer, expected = trainer_of(exact, clip_norm=1.0, backend="eager")
    exact_trainer.run(data, max_epochs=2)
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
