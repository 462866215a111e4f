"""Options of ``train_stream`` that cannot be meant, and what is said of them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftbptt.training import EarlyStop, train_stream

from .stream_runs import FunctionalMomentum, Segments, assert_equal, run, sgd
from .streams import stream, zeros


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"epochs": 0}, ValueError, "epochs: expected at least 1, found 0"),
        ({"epochs": 1.5}, TypeError, "epochs: expected a whole number, found 1.5"),
        ({"updates": "3"}, TypeError, "updates: expected a whole number, found '3'"),
        ({"accumulate": 0}, ValueError, "accumulate: expected at least 1, found 0"),
        ({"micro_batches": 1.5}, TypeError, "micro_batches: expected a whole number, found 1.5"),
        ({"time_dim": -1}, ValueError, "time_dim: expected 0 or 1, or None for the step's own, "),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every: expected at least 1, found 0"),
        ({"clip_value": "1"}, TypeError, "clip_value: expected a number, found '1'"),
        ({"events": {}}, TypeError, r"events: expected ftbptt.training.Events\(...\), found {}"),
        ({"autocast": "bf16"}, TypeError, "autocast: expected a dtype such as torch.bfloat16"),
        (
            {"autocast": torch.int64},
            ValueError,
            "autocast: expected torch.bfloat16 or torch.float1",
        ),
        ({"scaler": True}, TypeError, "scaler: expected a torch.amp.GradScaler, found True"),
        (
            {"scheduler": lambda index: 0.1},
            TypeError,
            "scheduler: expected one of torch.optim.lr_scheduler, or an object with step, found <",
        ),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, TypeError, "scheduler: expected one of"),
        ({"stop": 3}, TypeError, r"stop: expected a function stop\(loss\), found int"),
        ({"stop": EarlyStop}, TypeError, r"stop: .* the class EarlyStop\. .* as EarlyStop\(\.\.\."),
        ({"prepare": 3}, TypeError, r"prepare: expected a function prepare\(x, y\), found int"),
        ({"device": "gpu"}, ValueError, "device: expected a name such as 'cuda', found 'gpu'"),
        ({"device": 1.5}, TypeError, "device: expected a name such as 'cuda', found 1.5"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm: expected a number above 0, found 0.0"),
        ({"ema_decay": 1.0}, ValueError, "ema_decay: expected a number from 0 to below 1"),
        ({"on_nonfinite": "warn"}, ValueError, "on_nonfinite: expected one of stop, skip, raise"),
        ({"reduce_dtype": "bf16"}, TypeError, "reduce_dtype: expected a dtype such as torch.bfl"),
        ({"reduce_dtype": torch.int32}, ValueError, "reduce_dtype: expected a floating dtype"),
        ({"reduce_dtype": torch.float16}, ValueError, "reduce_dtype: sums over the steps of all"),
        ({"fresh": "no"}, TypeError, "fresh: expected True or False, found 'no'"),
        ({"interval": "1"}, TypeError, "interval: expected a number, found '1'"),
        ({"ema_decay": "1"}, TypeError, "ema_decay: expected a number, found '1'"),
        ({"checkpoint": 5}, TypeError, "checkpoint: expected the name of a file, found 5"),
        ({"resume": "no"}, TypeError, "resume: expected True or False, found 'no'"),
        ({"resume": True}, ValueError, "resume: give the file to resume from"),
        (
            {"optimizer": torch.optim.LBFGS([torch.zeros(1)])},
            TypeError,
            "optimizer: LBFGS evaluates the loss many times in a step, but a window of a stream is",
        ),
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer: expected a torch.optim.Optimizer"),
        (
            {"optimizer": [None]},
            TypeError,
            r"found list. Several are one as ChainedOptimizer\(\*optim",
        ),
        (
            {"optimizer": FunctionalMomentum},
            TypeError,
            r"optimizer: expected .* an object with .* found the class FunctionalMomentum itself\.",
        ),
        ({"k1": 30, "k2": 30, "context": 25}, ValueError, "data: no window has a step with a loss"),
    ],
)
def test_bad_options(
    options: dict[str, Any], kind: type[Exception], words: str, segment: Segments
) -> None:
    with pytest.raises(kind, match=words):
        run(segment(), stream(20), **options)


def test_a_scheduler_that_cannot_be_saved(segment: Segments, tmp_path: Path) -> None:
    """It is said at once, not when the first checkpoint is due."""

    class Schedule:
        calls = 0

        def step(self) -> None:
            self.calls += 1

    schedule = Schedule()
    run(segment(), stream(8), scheduler=schedule)
    assert schedule.calls == 2
    with pytest.raises(
        TypeError, match=r"with step, state_dict, load_state_dict, found <.*Schedul"
    ):
        run(segment(), stream(8), scheduler=schedule, checkpoint=tmp_path / "run.pt")
    assert schedule.calls == 2


def test_a_scheduler_of_another_optimizer(segment: Segments) -> None:
    own = segment()
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ValueError, match="scheduler: it changes the learning rate of another"):
        run(own, stream(8), scheduler=scheduler)


def test_numbers_of_numpy(segment: Segments) -> None:
    _, plain = run(segment(), stream(20), k1=5, epochs=2)
    updates, found = run(segment(), stream(20), k1=np.int64(5), epochs=np.int64(2))
    assert len(updates) == 8
    assert_equal(found, plain)


def test_workers_end_with_the_run(segment: Segments) -> None:
    """Whoever keeps the run, for its history, does not keep them."""
    train_segment, params = segment()
    pieces, others = [stream(4, seed=seed) for seed in range(3)], multiprocessing.active_children()
    loader = torch.utils.data.DataLoader(pieces, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    updates = train_stream(
        train_segment, params, zeros(), loader, sgd(params), k1=4, progress=False
    )
    assert sum(1 for _ in updates) == 3
    assert set(multiprocessing.active_children()) <= set(others)


def test_parameters_that_are_no_tree_of_tensors(segment: Segments) -> None:
    train_segment, params = segment()
    words = (
        r"params: expected a tensor, found generator. The parameters of a module are "
        r"dict\(module.named_parameters\(\)\)\."
    )
    with pytest.raises(TypeError, match=words):
        train_stream(
            train_segment, (p for p in params.values()), zeros(), stream(9), sgd(params), k1=4
        )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (np.zeros(3), r"state: expected a tensor, found ndarray\. None is the state that the step"),
        ((torch.zeros(3, 7), None), r"state\[1\]: expected a tensor, found NoneType\."),
    ],
)
def test_a_state_that_is_no_tree_of_tensors(state: Any, words: str, segment: Segments) -> None:
    train_segment, params = segment()
    with pytest.raises(TypeError, match=words):
        train_stream(train_segment, params, state, stream(9), sgd(params), k1=4)


def test_a_vmapped_segment_does_not_know_where_time_is(segment: Segments) -> None:
    train_segment, params = segment()
    with pytest.raises(ValueError, match="time_dim: train_segment is under vmap, which adds an ax"):
        train_stream(torch.func.vmap(train_segment), params, None, stream(9), sgd(params), k1=4)


def test_a_leaf_that_is_no_tensor_in_a_functional_optimizer(segment: Segments) -> None:
    train_segment, params = segment()
    words = r"params\['n'\]: expected a tensor, found int\. The parameters of a module are"
    with pytest.raises(TypeError, match=words):
        train_stream(
            train_segment, params | {"n": 3}, zeros(), stream(9), FunctionalMomentum(), k1=4
        )


@pytest.mark.parametrize("functional", [False, True])
def test_a_complex_gradient_has_no_largest_value(functional: bool, segment: Segments) -> None:
    """Also if only one of the parameters is complex."""
    train_segment, params = segment()
    params = params | {"z": torch.zeros(3, dtype=torch.complex128, requires_grad=True)}
    optimizer = FunctionalMomentum() if functional else sgd(params)
    words = r"clip_value: a complex gradient has no largest value\. Clip by clip_norm instead\."
    with pytest.raises(ValueError, match=words):
        train_stream(train_segment, params, zeros(), stream(9), optimizer, k1=4, clip_value=0.1)


def test_no_data(segment: Segments) -> None:
    with pytest.raises(ValueError, match=r"data: is empty. Give at least one chunk of one step or"):
        run(segment(), [])


def test_an_optimizer_of_other_tensors(segment: Segments) -> None:
    train_segment, params = segment()
    copies = [p.detach().clone().requires_grad_() for p in params.values()]
    with pytest.raises(
        ValueError, match=r"optimizer: its tensor 0 of group 0.*is not one of the tensors"
    ):
        run((train_segment, params), stream(8), optimizer=torch.optim.SGD(copies, lr=0.1))


def test_no_train_segment() -> None:
    with pytest.raises(TypeError, match="train_segment: expected what make_train_segment returns"):
        train_stream({}, {}, None, stream(8), FunctionalMomentum(), k1=4)
    module: Any = torch.nn.GRUCell(3, 5)
    with pytest.raises(TypeError, match=r"found GRUCell\. Make a segment of it: make_tr"):
        train_stream(module, {}, None, stream(8), FunctionalMomentum(), k1=4)
