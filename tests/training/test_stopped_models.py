"""A model of an ensemble whose loss is not finite stops as it is; the others go on without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from ftbptt import make_train_segment
from ftbptt.training import Chunk, Stream, load_checkpoint, train_stream
from ftbptt.training.updates.nonfinite import Guard

from .nonfinite_runs import MASKED, copied
from .resuming import assert_same
from .streams import cross_entropy, mean_cross_entropy, stream, tagger, zeros

M, STEPS, K = 3, 22, 4
GOES_ON = "Such a model stays as it was before that; the others go on."


class Adagrad:
    """A functional optimizer."""

    def init(self, params: Any) -> Any:
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, grads: Any, squares: Any, params: Any) -> Any:
        squares = {name: squares[name] + g.square() for name, g in grads.items()}
        stepped = {
            name: (p - 0.1 * grads[name] / (squares[name].sqrt() + 1e-8)).detach()
            for name, p in params.items()
        }
        return stepped, squares


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params.values(), lr=0.1),
    "nesterov": lambda params: torch.optim.SGD(
        params.values(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "functional": lambda params: Adagrad(),
}


def data(bad: dict[int, int], *, masked: bool = False) -> Chunk:
    """A stream for each model, with a NaN at a step of those in ``bad``; all begin anew at step 16.

    ``masked``: steps 9 to 15 have no part in the loss, but in the gradient.
    """
    streams = [stream(STEPS, seed=seed) for seed in range(M)]
    x, y = (torch.stack([s[i] for s in streams]) for i in (0, 1))
    for model, step in bad.items():
        x[model, step, 1] = math.nan
    reset, mask = torch.arange(STEPS) == 16, torch.ones(STEPS, dtype=torch.bool)
    mask[9:16] = False
    return Chunk(x, y, reset, mask if masked else None)


def stacked() -> dict[str, Tensor]:
    params, _ = stack_module_state([tagger(seed) for seed in range(M)])
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def ensemble(chunk: Chunk, kind: str = "adam", **options: Any) -> Stream:
    params = stacked()
    loss = mean_cross_entropy if chunk.mask is None else cross_entropy
    segment = make_train_segment(tagger(), loss, backend="eager")
    state = tuple(torch.stack([leaf] * M) for leaf in zeros())
    return train_stream(
        vmap(segment), params, state, chunk, OPTIMIZERS[kind](params), k1=K, time_dim=1,
        progress=False, interval=0, **options,
    )  # fmt: skip


def of_model(run: Stream, model: int) -> dict[str, Tensor]:
    return {name: p[model] for name, p in run.params.items()}


def told(run: Stream) -> tuple[list[Any], list[str]]:
    """The updates, with copies of their parameters, and the warnings."""
    with pytest.warns(RuntimeWarning) as caught:
        made = [(update, copied(update.params)) for update in run]
    return made, [str(w.message) for w in caught]


@pytest.mark.parametrize("clip_norm", [None, 0.25])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_others_go_on(kind: str, clip_norm: float | None) -> None:
    """As they would without it; it stays, also when its loss is finite again after a reset."""
    run = ensemble(data({1: 9}), kind, clip_norm=clip_norm)
    given = run.params
    made, (said,) = told(run)
    assert (run.params is given) == (kind != "functional")
    assert said.startswith(
        "ftbptt: the loss of update 2 is not finite in 1 of 3 entries of vmap, first in [1]: x is "
        "first not finite at step 9"
    )
    assert said.endswith(f". {GOES_ON}")
    good = ensemble(data({}), kind, clip_norm=clip_norm)
    expected = [(update, copied(update.params)) for update in good]
    assert len(made) == len(expected) == 6
    for model in (0, 2):
        assert_same(of_model(run, model), of_model(good, model))
        for (update, _), (other, _) in zip(made, expected, strict=True):
            assert torch.equal(update.loss[model], other.loss[model])
    before = {name: p[1] for name, p in expected[1][1].items()}
    for update, params in made[2:]:
        assert update.loss[1].isnan()
        assert_same({name: p[1] for name, p in params.items()}, before)


def test_reports_are_of_those_that_go_on() -> None:
    run = ensemble(data({1: 9}))
    made, _ = told(run)
    for (update, _), report in zip(made, run.history, strict=True):
        others = [0, 2] if update.index >= 2 else [0, 1, 2]
        assert report.loss == pytest.approx(float(update.loss[others].mean()), rel=1e-6)
        assert report.grad_norm == pytest.approx(float(update.grad_norm[others].mean()), rel=1e-6)


def test_a_gradient() -> None:
    """With a NaN in a step that has no part in the loss."""
    run = ensemble(data({2: 10}, masked=True))
    made, (said,) = told(run)
    assert said == (
        "ftbptt: the gradient's norm is not finite in 1 of 3 entries of vmap, first in [2] in "
        f"update 2, though its {MASKED} {GOES_ON}"
    )
    good = ensemble(data({}, masked=True))
    expected = [copied(update.params) for update in good]
    assert len(made) == 6
    assert_same(of_model(run, 0), of_model(good, 0))
    assert_same(of_model(run, 2), {name: p[2] for name, p in expected[1].items()})


def test_one_after_the_other() -> None:
    """The run stops with the last; each has the parameters from before its own stop."""
    run = ensemble(data({1: 9, 0: 13, 2: 13}))
    made, (first, last) = told(run)
    assert first.endswith(GOES_ON)
    assert last.startswith(
        "ftbptt: the loss of update 3 is not finite in 2 of 3 entries of vmap, first in [0]: "
    )
    assert last.endswith("The run stops before that update; the parameters are those before it.")
    assert [update.position for update, _ in made] == [4, 8, 12]
    good = ensemble(data({}))
    expected = [copied(update.params) for update in good]
    for model, update in ((0, 2), (1, 1), (2, 2)):
        stopped = {name: p[model] for name, p in expected[update].items()}
        assert_same(of_model(run, model), stopped)


def test_a_device_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: it is told with the next report, but the parameters are the same."""
    expected, _ = told(ensemble(data({1: 9, 0: 13})))
    monkeypatch.setattr(Guard, "reads_now", lambda self, value: False)
    run = ensemble(data({1: 9, 0: 13}))
    made, said = told(run)
    assert said == [
        f"ftbptt: up to update {update} the loss or the gradient is not finite in 1 of 3 entries "
        f"of vmap, first in [{model}]. {GOES_ON}"
        for update, model in ((2, 1), (3, 0))
    ]
    for (_, params), (_, other) in zip(made, expected, strict=True):
        assert_same(params, other)
    made, (said_at_end,) = told(ensemble(data({0: 9, 1: 9, 2: 9})))
    assert said_at_end == (
        "ftbptt: up to update 2 the loss or the gradient is not finite in 3 of 3 entries of vmap, "
        "first in [0]. The run stops: no model is left. Each stays as it was before that."
    )
    assert_same(made[2][1], made[1][1])


@pytest.mark.parametrize("after", [2, 4])
def test_a_resumed_run(after: int, tmp_path: Path) -> None:
    """Before the stop or after it: the model does not begin again."""
    whole, _ = told(ensemble(data({1: 9})))
    file = tmp_path / "run.pt"
    options = {"checkpoint": file, "ema_decay": 0.9}
    run = ensemble(data({1: 9}), updates=after, **options)
    if after == 2:
        list(run)
    else:
        told(run)
    assert load_checkpoint(file)["index"] == after
    resumed = ensemble(data({1: 9}), resume=True, **options)
    if after == 2:
        told(resumed)
    else:
        assert all(update.loss[1].isnan() for update in resumed)
    assert_same(resumed.params, whole[-1][1])
    assert load_checkpoint(file)["index"] == 6


def test_a_run_of_which_no_model_was_left_is_resumed(tmp_path: Path) -> None:
    """From the update before, with data that is right this time."""
    file = tmp_path / "run.pt"
    run = ensemble(data({0: 9, 1: 9, 2: 9}), checkpoint=file)
    made, _ = told(run)
    assert len(made) == 2
    resumed = ensemble(data({}), checkpoint=file, resume=True)
    assert len(list(resumed)) == 4
    good = ensemble(data({}))
    list(good)
    assert_same(resumed.params, good.params)


def test_windows_that_are_accumulated() -> None:
    """A model that stops in the second window has no part of the first one either."""
    run = ensemble(data({1: 13}), accumulate=2)
    made, _ = told(run)
    good = ensemble(data({}), accumulate=2)
    expected = [copied(update.params) for update in good]
    assert_same(of_model(run, 1), {name: p[1] for name, p in expected[0].items()})
    assert_same(of_model(run, 2), of_model(good, 2))
    assert made[1][0].loss[1].isnan()


def test_a_parameter_that_is_nan_already() -> None:
    """Of the model that stops; checkpoints of the others are written all the same."""

    class Spoils:
        """A functional optimizer whose step is NaN for one model."""

        def init(self, params: Any) -> int:
            return 0

        def update(self, grads: Any, count: int, params: Any) -> Any:
            rate = torch.full((M,), 0.1, dtype=torch.float64)
            if count == 1:
                rate[0] = math.nan
            return {
                name: (p - rate.reshape(M, *(1,) * (p.dim() - 1)) * grads[name]).detach()
                for name, p in params.items()
            }, count + 1

    params = stacked()
    segment = make_train_segment(tagger(), mean_cross_entropy, backend="eager")
    state = tuple(torch.stack([leaf] * M) for leaf in zeros())
    run = train_stream(
        vmap(segment), params, state, data({}), Spoils(), k1=K, time_dim=1, progress=False
    )
    made, (said,) = told(run)
    assert "first in [0]: " in said
    assert "params['cell.weight_ih'] is not finite already" in said
    assert len(made) == 6
    assert all(leaf.isfinite().all() for leaf in of_model(run, 2).values())


def test_shared_parameters_stop_all() -> None:
    """A loss for each sequence, and one gradient: it has no part that is still right."""
    cell = nn.GRUCell(3, 5).double()
    params = dict(cell.named_parameters())
    segment = make_train_segment(cell, lambda out, y: out.square().mean(), backend="eager")

    def averaged(*args: Any) -> Any:
        result = vmap(segment, in_dims=(None, 0, 0, None))(*args)
        return result._replace(grads={name: g.mean(0) for name, g in result.grads.items()})

    x = stream(8, rows=2)[0]
    sequences = torch.stack([x, x.clone()])
    sequences[1, 5] = math.nan
    run = train_stream(
        averaged, params, torch.zeros(2, 2, 5).double(), (sequences, None),
        torch.optim.SGD(params.values(), lr=0.1), k1=4, time_dim=1, progress=False,
    )  # fmt: skip
    made, (said,) = told(run)
    assert len(made) == 1
    assert "is not finite in 1 of 2 entries of vmap, first in [1]" in said
    assert said.endswith("The run stops before that update; the parameters are those before it.")
