"""Changes that compiled chunks of the trainer for Ignite detect: hooks, attributes, noise."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from ignite.contrib.engines import tbptt as theirs
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ftbptt.integrations.ignite import create_supervised_tbptt_trainer

from .ignite_models import Plain, batches, model_of
from .ignite_runs import assert_same, check, mse, trainer_of

pytestmark = pytest.mark.usefixtures("uncompiled")


def test_an_attribute_that_a_handler_changes_takes_effect(ran: list[int]) -> None:
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


def test_an_attribute_that_keeps_changing_stops_compiling() -> None:
    model = model_of("LSTM")[0]
    trainer, _ = trainer_of(model)

    def change(engine: Engine) -> None:
        model.iteration = engine.state.iteration

    trainer.add_event_handler(Events.ITERATION_STARTED, change)
    with pytest.warns(RuntimeWarning, match="'iteration' of Plain is changed again and again"):
        trainer.run(batches(20))


def test_a_constant_of_the_loss_that_is_written_in_place_takes_effect(ran: list[int]) -> None:
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


def test_inputs_computed_from_parameters_train_them() -> None:
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


def test_a_global_of_the_loss_that_changes_takes_effect(ran: list[int]) -> None:
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


def test_a_penalty_on_the_parameters_in_the_loss_is_detected() -> None:
    """However small: it is found in autograd's graph, not by comparing numbers."""
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


def test_a_difference_in_the_gradient_alone_is_detected() -> None:
    """A convolution over time with weights of zero has the loss and state of its steps."""
    model, data, _ = model_of("convolution")
    trainer, _ = trainer_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.warns(
        RuntimeWarning, match=r"gradient of conv.weight differs.*several steps at once"
    ):
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


def test_a_cache_built_by_the_first_call_is_no_side_effect(ran: list[int]) -> None:
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
    """With a loss that is all padding, any model would pass the comparison."""
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
    """Its first chunks run eagerly: compiled from zeros, they would give it no gradient."""
    model, data, _ = model_of("learned start")
    assert isinstance(model, nn.Module)
    with pytest.warns(RuntimeWarning, match="gradient of start differs by 100 %"):
        check(model, data, 1e-10)
    assert model.start.abs().sum() > 0
    assert ran


def test_a_first_chunk_that_differs_from_zeros_warns_once(ran: list[int]) -> None:
    """Only chunks without a hidden state run as written, with a warning that says why."""

    def run(first_state: float) -> list[str]:
        model, data, _ = model_of("LSTM")
        start = torch.full((1, 3, 5), first_state).double()
        call = model.rnn.forward
        model.rnn.forward = lambda x, hidden: call(x, (start, start) if hidden is None else hidden)
        trainer, _ = trainer_of(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.run(data, max_epochs=3)
        return [str(w.message) for w in caught if w.category is RuntimeWarning]

    assert run(0.0) == []
    (message,) = run(0.5)
    assert "Plain runs chunks without a hidden state as written, not compiled" in message
    assert re.search(r"the state differs by \d+(\.\d+)? %", message)
    assert len(ran) > 20


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
    # The comparisons drew no random numbers: the first chunk's noise is Ignite's.
    torch.manual_seed(5)
    again, other = trainer_of(first)[0], copy.deepcopy(first)
    outputs = []
    for run in (again, trainer_of(other, theirs.create_supervised_tbptt_trainer)[0]):
        torch.manual_seed(5)
        run.run([(x[:4], y[:4]) for x, y in batches(1)])
        outputs.append((run.state.output, torch.rand(1).item()))
    assert outputs[0] == outputs[1]
