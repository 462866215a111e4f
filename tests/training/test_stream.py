"""``train_stream`` against plain loops of autograd, in float64."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ftbptt import TrainSegment, make_train_segment
from ftbptt.training import Chunk, EarlyStop, Update, train_stream

from .streams import (
    Tagger,
    cross_entropy,
    honest_updates,
    mean_cross_entropy,
    stream,
    tagger,
    zeros,
)

Params = dict[str, Tensor]
Segments = Callable[..., tuple[TrainSegment, Params]]


@pytest.fixture(scope="module")
def segment() -> Segments:
    """``segment(loss) -> (train_segment, its module's parameters as at the start)``, made once."""
    made: dict[Any, tuple[Tagger, TrainSegment]] = {}

    def make(loss: Any = mean_cross_entropy, backend: str = "eager") -> tuple[TrainSegment, Params]:
        if (loss, backend) not in made:
            module = tagger()
            made[loss, backend] = module, make_train_segment(module, loss, backend=backend)
        module, train_segment = made[loss, backend]
        module.load_state_dict(tagger().state_dict())
        return train_segment, dict(module.named_parameters())

    return make


def sgd(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.values(), **{"lr": 0.5, **options})


def run(segment: Any, data: Any, **options: Any) -> tuple[list[Update], Params]:
    """All updates, and the parameters after them."""
    train_segment, params = segment
    optimizer = options.pop("optimizer", None) or sgd(params)
    options = {"k1": 4, "progress": False} | options
    updates = list(train_stream(train_segment, params, zeros(), data, optimizer, **options))
    return updates, params


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def check(segment: Any, total: int, **windows: Any) -> None:
    """Losses, states and parameters of every update are those of the plain loop."""
    x, y = stream(total)
    module, expected = tagger(), []
    reset = windows.pop("reset", None)
    honest_updates(
        module, zeros(), x, y, torch.optim.SGD(module.parameters(), lr=0.5), reset=reset,
        on_update=lambda loss, state: expected.append((loss, state)), **windows,
    )  # fmt: skip
    updates, params = run(segment, Chunk(x, y, reset), **windows)
    assert len(updates) == len(expected) > 0
    for update, (loss, state) in zip(updates, expected, strict=True):
        assert update.loss.item() == pytest.approx(loss, abs=1e-10)
        assert_equal(update.state, state)
    assert_equal(list(params.values()), list(module.parameters()))


# -- TBPTT(k1, k2) ------------------------------------------------------------------------------

CASES = {
    "k1 = k2": {"k1": 4, "k2": 4},
    "overlapping": {"k1": 2, "k2": 7},
    "overlapping, every step": {"k1": 1, "k2": 3},
    "overlapping by less than half": {"k1": 4, "k2": 6},
    "gaps": {"k1": 5, "k2": 2},
    "burn-in": {"k1": 4, "k2": 4, "burn_in": 3},
    "burn-in longer than k1": {"k1": 2, "k2": 3, "burn_in": 5},
    "burn-in as long as k1": {"k1": 3, "k2": 3, "burn_in": 3},
    "burn-in in a gap": {"k1": 7, "k2": 2, "burn_in": 2},
    "context": {"k1": 4, "k2": 4, "context": 2},
    "each loss once": {"k1": 2, "k2": 6, "context": 4},
    "all": {"k1": 2, "k2": 5, "burn_in": 4, "context": 2},
    "fresh": {"k1": 4, "k2": 4, "fresh": True},
    "fresh, overlapping": {"k1": 2, "k2": 5, "fresh": True},
    "fresh with burn-in and context": {"k1": 3, "k2": 4, "burn_in": 2, "context": 1, "fresh": True},
    "fresh with gaps": {"k1": 6, "k2": 3, "fresh": True},
}


@pytest.mark.parametrize("total", [9, 22])
@pytest.mark.parametrize("name", CASES)
def test_windows(name: str, total: int, segment: Segments) -> None:
    check(segment(), total, **CASES[name])


@pytest.mark.parametrize("name", ["k1 = k2", "overlapping", "all", "gaps"])
def test_windows_with_resets(name: str, segment: Segments) -> None:
    generator = torch.Generator().manual_seed(3)
    reset = torch.rand(22, 2, generator=generator) < 0.2
    check(segment(), 22, reset=reset, **CASES[name])


def test_a_segment_that_has_a_context() -> None:
    """Told to make_train_segment, it is that of the windows as well: the first are too short."""
    x, y = stream(22)
    found = []
    for there, here in ((4, None), (0, 4)):
        module = tagger()
        train_segment = make_train_segment(
            module, mean_cross_entropy, backend="eager", context=there
        )
        params = dict(module.named_parameters())
        updates, _ = run((train_segment, params), (x, y), k1=2, k2=6, context=here)
        found.append([float(update.loss) for update in updates])
    assert found[0] == found[1]
    assert len(found[0]) == 9


@pytest.mark.parametrize("context", [0, 3])
def test_a_context_is_given_once(context: int) -> None:
    """An explicit 0 is not the default."""
    module = tagger()
    train_segment = make_train_segment(module, mean_cross_entropy, backend="eager", context=3)
    params = dict(module.named_parameters())
    with pytest.raises(ValueError, match=r"context: the segment was made with context=3\. Give it"):
        run((train_segment, params), stream(22), k1=2, k2=6, context=context)


@pytest.mark.slow
def test_windows_compiled(segment: Segments) -> None:
    """Every K on one compilation, also with a context and with states kept within a window."""
    train_segment, _ = segment(backend="fused")
    check(segment(backend="fused"), 22, k1=2, k2=6, context=3, burn_in=1)
    assert train_segment.trace_count <= 1


def test_a_stream_longer_than_one_epoch(segment: Segments) -> None:
    x, y = stream(10)
    updates, params = run(segment(), (x, y), epochs=3, k1=4)
    assert [(u.epoch, u.position, u.index) for u in updates[2:5]] == [
        (0, 10, 2),
        (1, 4, 3),
        (1, 8, 4),
    ]
    own = tagger()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for _ in range(3):
        honest_updates(own, zeros(), x, y, optimizer, k1=4, k2=4, on_update=lambda *_: None)
    assert_equal(list(params.values()), list(own.parameters()))
    updates, _ = run(segment(), (x, y), epochs=None, updates=5, k1=4)
    assert len(updates) == 5


def test_the_tail_counts_by_its_steps(segment: Segments) -> None:
    """10 steps in windows of 4: gradients of one update over all three are those of the mean."""
    x, y = stream(10)
    (update,), params = run(segment(), (x, y), k1=4, accumulate=3)
    own, optimizer = tagger(), None
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    losses, state = [], zeros()
    for start in (0, 4, 8):
        state = tuple(leaf.detach() for leaf in state)
        for t in range(start, min(start + 4, 10)):
            out, state = own(x[t], state)
            losses.append(mean_cross_entropy(out[None], y[t : t + 1]))
    torch.stack(losses).mean().backward()
    optimizer.step()
    assert update.loss.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-12)
    assert_equal(list(params.values()), list(own.parameters()))
    assert update.steps == 20


def test_masked_windows_count_by_their_valid_steps(segment: Segments) -> None:
    x, y = stream(10)
    mask = torch.rand(10, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[4:8] = False  # nothing valid in a window
    (update,), _ = run(segment(cross_entropy), Chunk(x, y, None, mask), k1=4, accumulate=3)
    assert int(update.steps) == int(mask.sum())
    own, total, state = tagger(), 0.0, zeros()
    for t in range(10):
        out, after = own(x[t], state)
        keep = mask[t].unsqueeze(1)
        state = tuple(torch.where(keep, a, b) for a, b in zip(after, state, strict=True))
        total += float((cross_entropy(out[None], y[t : t + 1])[0] * mask[t]).sum().detach())
    assert update.loss.item() == pytest.approx(total / int(mask.sum()), abs=1e-12)


# -- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_micro_batches_are_the_whole_batch(count: int, segment: Segments) -> None:
    """Of two rows there are no more than two."""
    x, y = stream(11, rows=2)
    whole, expected = run(segment(), (x, y), k1=3, k2=5)
    expected = {name: p.detach().clone() for name, p in expected.items()}
    parts, params = run(segment(), (x, y), k1=3, k2=5, micro_batches=count)
    assert_equal(params, expected)
    for a, b in zip(parts, whole, strict=True):
        assert a.steps == b.steps
        assert_equal((a.loss, a.state, a.grad_norm), (b.loss, b.state, b.grad_norm))


def test_no_rows_for_micro_batches() -> None:
    """Features are not shared out in their place."""
    cell = nn.GRUCell(4, 5).double()
    segment = make_train_segment(cell, lambda out, y: (out - y).square().mean(), backend="eager")
    data = torch.randn(8, 4).double(), torch.randn(8, 5).double()
    params, state = dict(cell.named_parameters()), torch.zeros(5).double()
    updates = train_stream(
        segment, params, state, data, sgd(params), k1=4, progress=False, micro_batches=2
    )
    with pytest.raises(ValueError, match="micro_batches: x, y and the state have no rows in commo"):
        next(updates)


def test_a_segment_that_taps(segment: Segments) -> None:
    """Also where windows overlap or have a burn-in, for which the states within are kept."""
    data = stream(11)
    tapping = make_train_segment(tagger(), cross_entropy, backend="eager", taps=["cell.h"])
    for options in ({"k1": 3, "k2": 5}, {"k1": 3, "burn_in": 2}):
        whole, expected = run(segment(), data, **options)
        expected = {name: p.detach().clone() for name, p in expected.items()}
        found, params = run((tapping, dict(tagger().named_parameters())), data, **options)
        assert_equal(params, expected)
        assert_equal([update.loss for update in found], [update.loss for update in whole])


def test_clipping_by_norm_and_value(segment: Segments) -> None:
    x, y = stream(4)
    for options in (
        {"clip_norm": 0.01},
        {"clip_value": 0.002},
        {"clip_norm": 0.1, "clip_value": 0.01},
    ):
        (update,), params = run(segment(), (x, y), **options)
        own = tagger()
        out, state = [], zeros()
        for t in range(4):
            o, state = own(x[t], state)
            out.append(o)
        mean_cross_entropy(torch.stack(out), y).backward()
        norm = nn.utils.get_total_norm([p.grad for p in own.parameters()])
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(own.parameters(), options["clip_norm"])
        assert update.grad_norm.item() == pytest.approx(norm.item())
        if "clip_value" in options:
            nn.utils.clip_grad_value_(own.parameters(), options["clip_value"])
        torch.optim.SGD(own.parameters(), lr=0.5).step()
        assert_equal(list(params.values()), list(own.parameters()))


def test_gradient_norm_without_clipping(segment: Segments) -> None:
    (update,), params = run(segment(), stream(4))
    assert_equal(update.grad_norm, nn.utils.get_total_norm([p.grad for p in params.values()]))


def test_scheduler(segment: Segments) -> None:
    train_segment, params = segment()
    optimizer = sgd(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    run((train_segment, params), stream(16), optimizer=optimizer, scheduler=scheduler)
    assert scheduler.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_scheduler_on_plateau_is_given_the_loss(segment: Segments) -> None:
    train_segment, params = segment()
    optimizer = sgd(params, lr=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=100, threshold_mode="abs"
    )
    optimizer.param_groups[0]["lr"] = 0.25
    run((train_segment, params), stream(16), optimizer=optimizer, scheduler=scheduler, interval=0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25e-3)


def test_moving_average(segment: Segments) -> None:
    train_segment, params = segment()
    average = {name: p.detach().clone() for name, p in params.items()}
    updates = train_stream(
        train_segment, params, zeros(), stream(16), sgd(params), k1=4, progress=False, ema_decay=0.9
    )
    for _ in updates:
        for name, p in params.items():
            average[name] = 0.9 * average[name] + 0.1 * p.detach()
    assert_equal(updates.ema_params, average, 1e-12)


class FunctionalMomentum:
    """Stochastic gradient descent with momentum, as pure functions."""

    def init(self, params: Params) -> Params:
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, grads: Params, state: Params, params: Params) -> tuple[Params, Params]:
        state = {name: 0.9 * state[name] + grad for name, grad in grads.items()}
        return {name: p.detach() - 0.5 * state[name] for name, p in params.items()}, state


def test_functional_optimizer(segment: Segments) -> None:
    train_segment, params = segment()
    before = {name: p.detach().clone() for name, p in params.items()}
    updates, _ = run((train_segment, params), stream(22), optimizer=FunctionalMomentum())
    assert_equal(params, before, 0)  # nothing of the caller's is changed
    train_segment, params = segment()
    momentum = sgd(params, momentum=0.9)
    run((train_segment, params), stream(22), optimizer=momentum)
    assert_equal(updates[-1].params, params)


def test_a_batch_of_other_rows_is_told(segment: Segments) -> None:
    """As the last one of a DataLoader may be (here it has more): the carried state does not fit."""
    data = [tuple(own[:, :rows] for own in stream(4, rows=3)) for rows in (2, 2, 3)]
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        run(segment(), data, k1=4)
    (note,) = [own for own in caught.value.__notes__ if own.startswith("ftbptt: apart")]
    assert "x has shape [3, 3] in this window and [2, 3] in the one before" in note
    assert "drop_last=True" in note


def test_autocast_in_bfloat16() -> None:
    module = tagger().float()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    params = dict(module.named_parameters())
    x, y = stream(8)
    state = tuple(leaf.float() for leaf in zeros())
    kinds = set()
    for update in train_stream(
        segment, params, state, (x.float(), y), sgd(params), k1=4, autocast=torch.bfloat16,
        progress=False,
    ):  # fmt: skip
        kinds |= {p.grad.dtype for p in params.values()}
        assert update.loss.isfinite()
    assert kinds == {torch.float32}
    own = tagger().float()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = own(x[0].float(), tuple(leaf.float() for leaf in zeros()))
    assert out.dtype == torch.bfloat16  # so the two do differ


def test_gradient_scaler_with_float16() -> None:
    """Gradients too small for float16 are not lost; scaled ones too large are left out."""

    def tiny(out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(out.float(), y) * 1e-7

    x, y = stream(8)
    grads = {}
    for scaled in (False, True):
        module = tagger().float()
        params = dict(module.named_parameters())
        segment = make_train_segment(module, tiny, backend="eager")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if scaled else None
        state = tuple(leaf.float() for leaf in zeros())
        (update, _) = train_stream(
            segment, params, state, (x.float(), y), sgd(params), k1=4, autocast=torch.float16,
            scaler=scaler, progress=False,
        )  # fmt: skip
        grads[scaled] = params["readout.weight"].grad
        assert update.loss.item() < 1e-6
    exact = tagger().float()
    out, state = [], tuple(leaf.float() for leaf in zeros())
    assert not grads[False].any()
    assert grads[True].abs().max() > 1e-9
    del exact, out, state


def test_a_scaler_leaves_out_what_overflows() -> None:
    module = tagger().float()
    params = dict(module.named_parameters())
    segment = make_train_segment(
        module, lambda out, y: mean_cross_entropy(out.float(), y), backend="eager"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    x, y = stream(4)
    before = {name: p.detach().clone() for name, p in params.items()}
    state = tuple(leaf.float() for leaf in zeros())
    list(train_stream(segment, params, state, (x.float(), y), sgd(params), k1=4,
                      autocast=torch.float16, scaler=scaler, progress=False))  # fmt: skip
    assert_equal(params, before, 0)
    assert scaler.get_scale() == 2.0**39


def test_early_stop(segment: Segments) -> None:
    train_segment, params = segment()
    stop = EarlyStop(patience=3)
    updates, _ = run(
        (train_segment, params), stream(400), optimizer=sgd(params, lr=1e-9), stop=stop, interval=0,
        epochs=2, k1=50, k2=50,
    )  # fmt: skip
    assert len(updates) < 16
    assert stop.calls_without_gain == 3


def test_leaving_the_loop_and_going_on(segment: Segments) -> None:
    """The caller is in charge: an iterator left early goes on where it was."""
    train_segment, params = segment()
    updates = train_stream(
        train_segment, params, zeros(), stream(22), sgd(params), k1=4, progress=False
    )
    for update in updates:
        if update.index == 2:
            break
    rest = [update.index for update in updates]
    assert rest == [3, 4, 5]
    found = {name: p.detach().clone() for name, p in params.items()}
    _, params = run(segment(), stream(22))
    assert_equal(found, params, 0)


# -- other segments -----------------------------------------------------------------------------


def test_batch_first_layer() -> None:
    """[B, T, ...]; the state [L, B, H]."""
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, 2, batch_first=True).double()
    own = copy.deepcopy(layer)
    x = torch.randn(3, 13, 3).double()
    y = torch.randn(3, 13, 4).double()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean()

    params = dict(layer.named_parameters())
    segment = make_train_segment(layer, loss, backend="eager")
    for options in ({"k1": 4}, {"k1": 3, "k2": 6, "micro_batches": 3}):
        layer.load_state_dict(own.state_dict())
        updates = train_stream(
            segment, params, None, (x, y), sgd(params), progress=False, **options
        )
        reference, states = copy.deepcopy(own), {0: None}
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        k1, k2 = options["k1"], options.get("k2", options["k1"])
        for end in range(k1, 13 + k1, k1):
            start, stop = max(0, end - k2), min(end, 13)
            state, outs = states[start], []
            for t in range(start, stop):
                states[t] = None if state is None else tuple(s.detach() for s in state)
                out, state = reference(x[:, t : t + 1], state)
                outs.append(out)
            states[stop] = tuple(s.detach() for s in state)
            optimizer.zero_grad()
            value = loss(torch.cat(outs, 1), y[:, start:stop])
            value.backward()
            optimizer.step()
            update = next(updates)
            assert update.loss.item() == pytest.approx(value.item(), abs=1e-12)
            assert_equal(update.state, states[stop])
        assert next(updates, None) is None
        assert_equal(list(params.values()), list(reference.parameters()))


def test_a_function_of_the_contract(segment: Segments) -> None:
    """Such as a segment with something around it; windows side by side need no more."""
    train_segment, params = segment()

    def halved(*args: Any, **rows: Any) -> Any:
        result = train_segment(*args, **rows)
        return result._replace(loss=result.loss / 2)

    updates, _ = run((halved, params), stream(10))
    found = [update.loss.item() for update in updates]
    updates, _ = run(segment(), stream(10))
    assert found == [update.loss.item() / 2 for update in updates]
    with pytest.raises(TypeError, match="k2: windows that overlap need a state from within"):
        run((halved, params), stream(10), k1=2, k2=4)
    with pytest.raises(TypeError, match="burn_in, k2: steps without a gradient need"):
        run((halved, params), stream(10), k1=4, k2=2)


def test_a_frozen_parameter_stays_until_it_is_thawed(segment: Segments) -> None:
    """As with autograd, which gives it no gradient: weight decay and momentum leave it as well."""
    train_segment, params = segment()
    first = params["readout.weight"]
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1}
    before = first.detach().clone()
    module = tagger()
    module.readout.weight.requires_grad_(False)
    first.requires_grad_(False)
    try:
        run(segment(), stream(8), optimizer=sgd(params, **options), clip_norm=0.1)
        assert torch.equal(first, before)
        own = torch.optim.SGD(module.parameters(), lr=0.5, **options)
        clip = torch.nn.utils.clip_grad_norm_
        own.register_step_pre_hook(lambda *_: clip(module.parameters(), 0.1) and None)
        honest_updates(module, zeros(), *stream(8), own, k1=4, k2=4, on_update=lambda *_: None)
        assert_equal(list(params.values()), list(module.parameters()))
        optimizer = sgd(params)
        for update in train_stream(
            train_segment, params, zeros(), stream(8), optimizer, k1=4, progress=False
        ):
            assert torch.equal(first, before) == (update.index == 0)
            first.requires_grad_(True)
    finally:
        first.requires_grad_(True)


def test_ensemble_by_vmap() -> None:
    """A vmapped segment trains many models, each on its own stream; time is after their axis."""
    modules = [tagger(seed).double() for seed in range(3)]
    params, _ = torch.func.stack_module_state(modules)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    segment = make_train_segment(modules[0], mean_cross_entropy, backend="eager")
    data = [stream(9, seed=seed) for seed in range(3)]
    x, y = (torch.stack([d[i] for d in data]) for i in (0, 1))
    state = tuple(torch.stack([leaf] * 3) for leaf in zeros())
    updates = list(train_stream(
        torch.func.vmap(segment), params, state, (x, y), sgd(params), k1=4, progress=False,
        time_dim=1,
    ))  # fmt: skip
    assert updates[0].loss.shape == (3,)
    for i, own in enumerate(modules):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        honest_updates(own, zeros(), *data[i], optimizer, k1=4, k2=4, on_update=lambda *_: None)
        assert_equal([p[i] for p in params.values()], list(own.parameters()))


# -- bad input ----------------------------------------------------------------------------------


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
        ({"scaler": True}, TypeError, "scaler: expected a torch.amp.GradScaler, found True"),
        (
            {"scheduler": lambda index: 0.1},
            TypeError,
            "scheduler: expected one of torch.optim.lr_scheduler, or an object with step, found <",
        ),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, TypeError, "scheduler: expected one of"),
        ({"stop": 3}, TypeError, "stop: expected a function, found 3"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm: expected a number above 0, found 0.0"),
        ({"ema_decay": 1.0}, ValueError, "ema_decay: expected a number from 0 to below 1"),
        ({"on_nonfinite": "warn"}, ValueError, "on_nonfinite: expected one of stop, skip, raise"),
        ({"reduce_dtype": "bf16"}, TypeError, "reduce_dtype: expected a dtype such as torch.bfl"),
        ({"reduce_dtype": torch.float16}, ValueError, "reduce_dtype: sums over the steps of all"),
        ({"resume": True}, ValueError, "resume: give the file to resume from"),
        (
            {"optimizer": torch.optim.LBFGS([torch.zeros(1)])},
            TypeError,
            "optimizer: LBFGS evaluates the loss many times in a step, but a window of a stream is",
        ),
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer: expected a torch.optim.Optimizer"),
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
