"""What Lightning's Trainer asks of a ``TBPTTModule``: flags and logs."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from ftbptt import make_train_segment
from ftbptt.training import train_stream

from ..training.streams import honest_updates, mean_cross_entropy, stream, tagger, zeros
from .lightning_models import (
    Clipped,
    Tagger,
    assert_equal,
    by_hand,
    distance,
    fit,
    loader,
    model,
    trainer,
    whole_loss,
    with_scheduler,
)

# -- the Trainer's flags ------------------------------------------------------------------------


def clipped_by_hand(clip: Any, x: Tensor, y: Tensor) -> nn.Module:
    module = tagger()
    optimizer = Clipped(module.parameters(), lr=0.5)
    optimizer.clip = clip
    honest_updates(module, zeros(), x, y, optimizer, k1=4, k2=4, on_update=lambda *_: None)
    return module


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_gradient_clipping(algorithm: str | None) -> None:
    x, y = stream(22)
    own = model()
    fit(own, [(x, y)], gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)
    clip = nn.utils.clip_grad_value_ if algorithm == "value" else nn.utils.clip_grad_norm_
    module = clipped_by_hand(lambda params: clip(params, 0.02), x, y)
    assert_equal(list(own.parameters()), list(module.parameters()))


def test_clipping_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's hooks are called where automatic optimization calls them."""
    norms: dict[str, list[float]] = {"module": [], "callback": [], "behind": []}

    def norm(optimizer: Any) -> float:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return nn.utils.get_total_norm([p.grad for p in params]).item()

    def halved(optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        assert gradient_clip_val == 7.0
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        norms["behind"].append(norm(optimizer))

    class Watching(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms["callback"].append(norm(optimizer))

    x, y = stream(22)
    own = model()
    for name, hook in (
        ("on_before_optimizer_step", lambda optimizer: norms["module"].append(norm(optimizer))),
        ("configure_gradient_clipping", halved),
    ):
        monkeypatch.setattr(own, name, hook, raising=False)
    fit(own, [(x, y)], gradient_clip_val=7.0, callbacks=[Watching()])
    assert len(norms["module"]) == 6
    assert norms["module"] == norms["callback"]
    assert norms["behind"] == pytest.approx([n / 2 for n in norms["module"]])

    def halve(params: Any) -> None:
        for p in params:
            p.grad.mul_(0.5)

    assert_equal(list(own.parameters()), list(clipped_by_hand(halve, x, y).parameters()))


@pytest.mark.parametrize("n", [2, 4, 100])
def test_accumulation(n: int) -> None:
    """n windows to an update, across batches, by their steps; the last of an epoch has fewer."""
    batches = [stream(10, seed=1), stream(7, seed=2)]  # 4 + 4 + 2 and 4 + 3 steps
    own = model()
    run = fit(own, batches, accumulate_grad_batches=n, max_epochs=2)
    module = tagger()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    updates = 0
    for _ in range(2):
        waiting: list[tuple[int, Tensor]] = []
        for b, (x, y) in enumerate(batches):
            state = zeros()
            for start in range(0, len(x), 4):
                state, outs = tuple(leaf.detach() for leaf in state), []
                for x_t in x[start : start + 4]:
                    out, state = module(x_t, state)
                    outs.append(out)
                loss = mean_cross_entropy(torch.stack(outs), y[start : start + 4])
                waiting.append((len(outs), loss))
                if len(waiting) == n or (b == 1 and start + 4 >= len(x)):
                    steps = sum(count for count, _ in waiting)
                    optimizer.zero_grad()
                    sum(loss * count / steps for count, loss in waiting).backward()
                    optimizer.step()
                    updates += 1
                    waiting = []
    assert_equal(list(own.parameters()), list(module.parameters()))
    assert run.global_step == updates


def test_max_steps_may_end_within_a_batch() -> None:
    x, y = stream(22)
    own = model()
    run = fit(own, [(x, y), (x, y)], max_steps=3, max_epochs=-1)
    assert run.global_step == 3
    module, _ = by_hand([(x[:12], y[:12])])
    assert_equal(list(own.parameters()), list(module.parameters()))


@pytest.mark.parametrize("precision", [64, "64-true"])
def test_double_precision(precision: Any) -> None:
    """The module and the data, which were in single precision, are made double."""
    x, y = stream(22)
    own = model().float()
    start = copy.deepcopy(own.step).double()
    fit(own, [(x.float(), y)], precision=precision)
    assert next(own.parameters()).dtype == torch.float64
    optimizer = torch.optim.SGD(start.parameters(), lr=0.5)
    honest_updates(start, zeros(), x.float().double(), y, optimizer, k1=4, k2=4,
                   on_update=lambda *_: None)  # fmt: skip
    assert_equal(list(own.step.parameters()), list(start.parameters()))


def test_mixed_precision_in_bfloat16() -> None:
    """As ``train_stream`` has it; the parameters stay in single precision."""
    x, y = stream(22)
    own, module, exact = Tagger().float(), tagger().float(), Tagger().float()
    fit(own, [(x.float(), y)], precision="bf16-mixed")
    fit(exact, [(x.float(), y)])
    assert {p.dtype for p in own.parameters()} == {torch.float32}
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    params = dict(module.named_parameters())
    state = tuple(leaf.float() for leaf in zeros())
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    list(train_stream(segment, params, state, (x.float(), y), optimizer, k1=4, progress=False,
                      autocast=torch.bfloat16))  # fmt: skip
    assert distance(own.step, module) < 1e-6
    assert 1e-4 < distance(own.step, exact.step) < 0.02


class Multiplying(torch.optim.SGD):
    """An optimizer that multiplies matrices in its step, as Shampoo and Muon do."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        one = torch.ones(2, 2)
        self.dtype = (one @ one).dtype
        return value


def test_a_step_is_made_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tagger().float()
    optimizer = Multiplying(own.parameters(), lr=0.5)
    monkeypatch.setattr(own, "configure_optimizers", lambda: optimizer)
    x, y = stream(4)
    fit(own, [(x.float(), y)], precision="bf16-mixed")
    assert optimizer.dtype == torch.float32


class Tiny(Tagger):
    """A loss whose gradients are too small for float16."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(out.float(), y) * 1e-7


def half(scale: float) -> Any:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def test_mixed_precision_in_float16_with_a_scaler() -> None:
    """Small gradients are not lost; clipping and the norm are of the unscaled ones."""
    x, y = stream(8)
    grads = {}
    for scale in (1.0, 2.0**16):
        own = Tiny().renew().float()
        run = fit(own, [(x.float(), y)], plugins=half(scale), gradient_clip_val=3e-8)
        grads[scale] = [p.grad.clone() for p in own.parameters()]
        assert run.callback_metrics["train_loss"] < 1e-6
        assert run.callback_metrics["grad_norm"] < 1e-6
    assert not any(grad.any() for grad in grads[1.0][:2])
    norm = run.callback_metrics["grad_norm"].item()
    found = nn.utils.get_total_norm(grads[2.0**16]).item()
    assert found == pytest.approx(norm * 3e-8 / (norm + 1e-6), rel=1e-4)  # as torch clips


def test_a_scaler_leaves_out_what_overflows() -> None:
    own = Tagger().float()
    before = copy.deepcopy(own.step)
    own.loss = lambda out, y: mean_cross_entropy(out.float(), y)
    plugin = half(2.0**40)
    x, y = stream(4)
    own.configure_optimizers = lambda: with_scheduler(own)
    run = fit(own, [(x.float(), y)], plugins=plugin)
    assert distance(own.step, before) == 0
    assert plugin.scaler.get_scale() == 2.0**39
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 0


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, 12),
        ({"frequency": 5}, 2),
        ({"interval": "epoch"}, 2),
        ({"interval": "epoch", "frequency": 2}, 1),
    ],
)
def test_schedulers(config: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 updates in each of 2 epochs of 2 batches."""
    own = model(lr=0.0)
    monkeypatch.setattr(own, "configure_optimizers", lambda: with_scheduler(own, **config))
    run = fit(own, [stream(12), stream(12)], max_epochs=2)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**steps)


@pytest.mark.parametrize(
    ("monitor", "interval", "steps"),
    [("val_loss", "epoch", 2), ("train_loss_epoch", "epoch", 2), ("train_loss", "step", 8)],
)
def test_schedulers_on_plateau(
    monitor: str, interval: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is never better by 100: the rate falls each time but the first."""
    own = model()

    def configure() -> Any:
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=100, threshold_mode="abs"
        )
        config = {"scheduler": scheduler, "monitor": monitor, "interval": interval}
        return {"optimizer": optimizer, "lr_scheduler": config}

    monkeypatch.setattr(own, "configure_optimizers", configure)
    run = fit(own, [stream(12)], [stream(5)], max_epochs=3)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**steps)


def test_frozen_parameters() -> None:
    own = model()
    own.step.readout.weight.requires_grad_(False)
    fit(own, [stream(12)])
    module = tagger()
    module.readout.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    honest_updates(module, zeros(), *stream(12), optimizer, k1=4, k2=4, on_update=lambda *_: None)
    assert_equal(list(own.parameters()), list(module.parameters()))


# -- loggers, the bar, callbacks ----------------------------------------------------------------


def rows(path: str) -> list[dict[str, str]]:
    with Path(path, "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(found: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in found if row[name]}


def test_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each update; what Lightning logs stands on the same axis."""
    batches, val = [stream(12, seed=1), stream(10, seed=2)], [stream(9, seed=3)]
    own = model()
    monkeypatch.setattr(own, "configure_optimizers", lambda: with_scheduler(own))
    logger = CSVLogger(tmp_path)
    fit(own, batches, val, logger=logger, max_epochs=2, callbacks=[LearningRateMonitor()])
    found = rows(logger.log_dir)
    module, losses, norms, at_epoch = tagger(), [], [], []
    optimizer = Clipped(module.parameters(), lr=0.5)
    optimizer.clip = lambda params: norms.append(
        nn.utils.get_total_norm([p.grad for p in params]).item()
    )

    def on_update(loss: float, state: Any) -> None:
        losses.append(loss)
        optimizer.param_groups[0]["lr"] *= 0.5

    for _ in range(2):
        for x, y in batches:
            honest_updates(module, zeros(), x, y, optimizer, k1=4, k2=4, on_update=on_update)
        at_epoch.append(whole_loss(val, module))
    assert column(found, "train_loss") == pytest.approx(dict(enumerate(losses)))
    assert column(found, "grad_norm") == pytest.approx(dict(enumerate(norms)))
    assert column(found, "val_loss") == pytest.approx({5: at_epoch[0], 11: at_epoch[1]})
    weights = [4, 4, 4, 4, 4, 2]
    means = [
        sum(w * loss for w, loss in zip(weights, losses[6 * e : 6 * e + 6], strict=True)) / 22
        for e in range(2)
    ]
    assert column(found, "train_loss_epoch") == pytest.approx({5: means[0], 11: means[1]})
    rates = column(found, "lr-SGD")  # noted where a batch begins
    assert rates == pytest.approx({n: 0.5**n * 0.5 for n in (0, 3, 6, 9)})


def test_rows_every_so_many_updates(tmp_path: Path) -> None:
    logger, written = CSVLogger(tmp_path), []
    file = Path(logger.log_dir, "metrics.csv")  # where rows are at once
    look = LambdaCallback(on_before_optimizer_step=lambda *_: written.append(file.exists()))
    fit(model(), [stream(40)], logger=logger, log_every_n_steps=4, callbacks=[look])
    assert list(column(rows(logger.log_dir), "train_loss")) == [3, 7]
    assert written == [False] * 4 + [True] * 6


def test_the_bar_moves_within_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    class Bar(TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            found = super().get_metrics(trainer, pl_module)
            seen.append((trainer.global_step, float(found["train_loss"])))
            return found

    fit(model(), [stream(12)], callbacks=[Bar()], enable_progress_bar=True)
    _, losses = by_hand([stream(12)])
    assert dict(seen) == {n + 1: pytest.approx(loss, rel=1e-3) for n, loss in enumerate(losses)}
    assert "train_loss=" in capsys.readouterr().out


def test_early_stopping() -> None:
    stop = EarlyStopping("val_loss", patience=2, min_delta=100)
    run = fit(model(), [stream(8)], [stream(5)], max_epochs=20, callbacks=[stop])
    assert run.current_epoch == 3


def test_averaged_weights() -> None:
    """A callback that copies the module, and averages after each batch."""
    batches = [stream(8), stream(12)]
    own = model()
    fit(own, batches, callbacks=[EMAWeightAveraging(decay=0.5)])
    first, last = by_hand(batches[:1])[0], by_hand(batches)[0]
    means = [(p + q) / 2 for p, q in zip(first.parameters(), last.parameters(), strict=True)]
    assert_equal([*own.step.parameters()], means)


def test_the_tuner_is_refused(tmp_path: Path) -> None:
    own = model()
    run = trainer(max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"^Tuner: .* takes away the callback"):
        Tuner(run).lr_find(own, loader([stream(8)]))
    assert not list(tmp_path.glob(".lr_find*"))
    fit(own, [stream(8)])
    assert distance(own.step, by_hand([stream(8)])[0]) < 1e-10


def test_a_module_in_torch_compile() -> None:
    own = model()
    compiled = torch.compile(own)
    with pytest.warns(RuntimeWarning, match="torch.compile around Tagger has no effect"):
        fit(compiled, [stream(8)])
    assert distance(own.step, by_hand([stream(8)])[0]) < 1e-10


def test_val_check_interval_counts_batches() -> None:
    seen = []

    class Watching(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.global_step)

    fit(model(), [stream(8)] * 4, [stream(5)], val_check_interval=2, callbacks=[Watching()])
    assert seen == [4, 8]
