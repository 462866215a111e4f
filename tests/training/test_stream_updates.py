"""What an update of ``train_stream`` is: in parts, clipped, scheduled, averaged, scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment
from ftbptt.training import Chunk, EarlyStop, train_stream

from .stream_runs import FunctionalMomentum, Segments, assert_equal, run, sgd
from .streams import cross_entropy, mean_cross_entropy, stream, tagger, zeros


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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_parameter_whose_columns_are_in_a_row(kind: Any) -> None:
    """As torch.linalg.qr returns them. A fused optimizer takes them and the gradient as lists."""
    x, y = torch.randn(20, 2, 3).double(), torch.randn(20, 2, 4).double()
    found = []
    for how in ("stream", "by hand", "autograd"):
        torch.manual_seed(0)
        cell = nn.GRUCell(3, 4).double()
        cell.weight_hh = nn.Parameter(torch.linalg.qr(torch.randn(12, 4).double())[0])
        assert not cell.weight_hh.is_contiguous()
        params = dict(cell.named_parameters())
        optimizer = kind(params.values(), lr=0.1, fused=True)
        segment = make_train_segment(cell, nn.functional.mse_loss, backend="eager")
        state = torch.zeros(2, 4).double()
        if how == "stream":
            list(train_stream(segment, params, state, (x, y), optimizer, k1=5, progress=False))
        for x_k, y_k in zip(x.split(5), y.split(5), strict=True):
            if how == "by hand":
                grads, state, *_ = segment(params, state, x_k, y_k)
                for name, p in params.items():
                    p.grad = grads[name]
                optimizer.step()
            elif how == "autograd":
                outs, state = [], state.detach()
                for x_t in x_k:
                    outs.append(state := cell(x_t, state))
                optimizer.zero_grad()
                nn.functional.mse_loss(torch.stack(outs), y_k).backward()
                optimizer.step()
        found.append(params)
    assert_equal(found[0], found[2])
    assert_equal(found[1], found[2])


@pytest.mark.parametrize("parts", [{}, {"accumulate": 2}, {"micro_batches": 2}])
def test_the_loss_stays_in_its_dtype(parts: dict[str, int]) -> None:
    """The share of a masked part is a float64 tensor."""
    cell, x = nn.GRUCell(3, 5), torch.randn(8, 2, 3)
    segment = make_train_segment(cell, lambda out, y: out.square().mean(-1), backend="eager")
    params, mask = dict(cell.named_parameters()), torch.ones(8, 2, dtype=torch.bool)
    updates = train_stream(
        segment, params, None, Chunk(x, None, mask=mask), sgd(params), k1=4, progress=False, **parts
    )
    assert {update.loss.dtype for update in updates} == {torch.float32}


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


@pytest.mark.parametrize("options", [{}, {"burn_in": 2}, {"fresh": True}])
def test_steps_without_rows_and_without_a_state(options: dict[str, Any]) -> None:
    """Features are not counted as rows of a function step that knows its own state."""

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["w"] + h)
        return h, h

    torch.manual_seed(0)
    segment = make_train_segment(
        step, lambda out, y: (out - y).square().mean(), backend="eager",
        initial_state=torch.zeros(5).double(),
    )  # fmt: skip
    x, y = torch.randn(11, 3).double(), torch.randn(11, 5).double()
    counts = []
    for state in (None, torch.zeros(5).double()):
        params = {"w": torch.zeros(3, 5).double().requires_grad_()}
        updates = train_stream(
            segment, params, state, (x, y), sgd(params), k1=4, progress=False, **options
        )
        counts.append([(int(own.steps), float(own.loss)) for own in updates])
    assert [count for count, _ in counts[0]] == [4, 4, 3]
    assert counts[0] == counts[1]


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


def test_moving_average_of_16_bits() -> None:
    """What it gains in an update is less than bfloat16 resolves; without parameters it is none."""
    module = nn.GRUCell(3, 5).bfloat16()
    train_segment = make_train_segment(
        module, lambda out, y: (out - y).square().mean(), backend="eager"
    )
    params = dict(module.named_parameters())
    average = {name: p.detach().float() for name, p in params.items()}
    x = stream(200)[0].bfloat16()
    updates = train_stream(
        train_segment, params, None, (x, torch.ones(200, 2, 5).bfloat16()), sgd(params), k1=2,
        progress=False, ema_decay=0.999,
    )  # fmt: skip
    for _ in updates:
        for name, p in params.items():
            average[name] = average[name].lerp(p.detach().float(), 0.001)
    for name, p in updates.ema_params.items():
        torch.testing.assert_close(p, average[name].bfloat16())
    none = train_stream(
        make_train_segment(lambda p, x, h: (h, h + x), lambda out, y: out.mean(), backend="eager"),
        {}, torch.zeros(2), (torch.ones(6, 2), None), FunctionalMomentum(), k1=3, progress=False,
        ema_decay=0.9,
    )  # fmt: skip
    assert len(list(none)) == 2
    assert none.ema_params == {}


def test_functional_optimizer(segment: Segments) -> None:
    train_segment, params = segment()
    before = {name: p.detach().clone() for name, p in params.items()}
    updates, _ = run((train_segment, params), stream(22), optimizer=FunctionalMomentum())
    assert_equal(params, before, 0)  # nothing of the caller's is changed
    train_segment, params = segment()
    momentum = sgd(params, momentum=0.9)
    run((train_segment, params), stream(22), optimizer=momentum)
    assert_equal(updates[-1].params, params)


def test_an_epoch_that_ends_with_windows_without_a_loss(segment: Segments) -> None:
    """They are read once, also if an update waits for more windows: their chunks are dropped."""
    x, y = stream(8)
    chunks = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)]
    options = {"k1": 3, "k2": 6, "fresh": True, "context": 5, "accumulate": 2, "epochs": 2}
    for data in ((x, y), chunks):
        updates, _ = run(segment(), data, **options)
        assert [update.position for update in updates] == [6, 6]


def test_a_batch_of_other_rows_is_told(segment: Segments) -> None:
    """As the last one of a DataLoader may be (here it has more): the carried state does not fit."""
    data = [tuple(own[:, :rows] for own in stream(4, rows=3)) for rows in (2, 2, 3)]
    with pytest.raises(ValueError, match="which differ in the rows of the batch") as caught:
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
