"""``TBPTTModule`` in Lightning's Trainer against plain loops of autograd, in float64."""

from __future__ import annotations

import copy
import csv
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ftbptt import make_train_segment
from ftbptt.integrations.lightning import TBPTTModule
from ftbptt.training import Truncation, train_stream

from .streams import cross_entropy, honest_updates, mean_cross_entropy, stream, tagger, zeros


class Tagger(TBPTTModule):
    """The step of ``streams.Tagger`` as a module for chunks, in float64."""

    def __init__(self, time_dim: int = 0, backend: str = "eager", **options: Any) -> None:
        super().__init__(4, time_dim=time_dim, backend=backend, **options)
        self.step = tagger()
        self.renew()

    def renew(self, lr: float = 0.5, carry: bool = False, k_eval: int = 256, **windows: int) -> Any:
        """As new, with other options, but what was compiled is kept."""
        self.step.load_state_dict(tagger().state_dict())
        for p in self.parameters():
            p.requires_grad_(True)
            p.grad = None
        self.lr, self.carry, self.k_eval = lr, carry, k_eval
        windows = {"k1": 4, "k2": None, "burn_in": 0, "context": 0} | windows
        self._truncation = Truncation.of(**windows, fresh=False)
        self.outs: list[tuple[str, Tensor]] = []
        return self

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        outs = []
        for x_t in x.movedim(self.time_dim, 0):
            out, state = self.step(x_t, state)
            outs.append(out)
        return torch.stack(outs).movedim(0, self.time_dim), state

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_chunk(self, stage: str, out: Tensor, y: Tensor) -> None:
        self.outs.append((stage, out))


class Masked(Tagger):
    """A loss per step and row."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.movedim(-1, 1), y, reduction="none")


class ClassesFirst(Tagger):
    """``out`` is ``[B, C, T]``, as cross entropy has it."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y)


Models = Callable[..., Any]


@pytest.fixture(scope="module")
def model() -> Models:
    """``model(kind, time_dim, **options)``: each is compiled once."""
    made: dict[Any, Tagger] = {}

    def make(kind: Any = Tagger, time_dim: int = 0, **options: Any) -> Any:
        key = kind, time_dim
        if key not in made:
            made[key] = kind(time_dim)
        return made[key].renew(**options)

    return make


def trainer(**flags: Any) -> lightning.Trainer:
    quiet = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }  # fmt: skip
    return lightning.Trainer(**quiet | flags)


def loader(batches: Any) -> Any:
    return torch.utils.data.DataLoader(list(batches), batch_size=None)


def fit(model: TBPTTModule, batches: Any, val: Any = None, **flags: Any) -> lightning.Trainer:
    made = trainer(**flags)
    made.fit(model, loader(batches), None if val is None else loader(val))
    return made


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def by_hand(batches: Any, *, carry: bool = False, lr: float = 0.5, **windows: Any) -> Any:
    """The module of the plain loops behind all batches, and the losses of its updates."""
    module, losses, state = tagger(), [], zeros()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    windows = {"k1": 4} | windows
    windows.setdefault("k2", windows["k1"])

    def on_update(loss: float, behind: Any) -> None:
        nonlocal state
        losses.append(loss)
        state = behind

    for x, y in batches:
        honest_updates(module, state if carry else zeros(), x, y, optimizer,
                       on_update=on_update, **windows)  # fmt: skip
    return module, losses


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
def test_windows(name: str, model: Models) -> None:
    batches = [stream(22, seed=1), stream(9, seed=2)]
    own = model(**CASES[name])
    run = fit(own, batches, max_epochs=2)
    module, losses = by_hand(batches * 2, **CASES[name])
    assert_equal(list(own.parameters()), list(module.parameters()))
    assert run.global_step == len(losses)


@pytest.mark.parametrize("name", ["k1 = k2", "overlapping", "each loss once"])
def test_carry_across_batches(name: str, model: Models) -> None:
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
def test_the_carried_state_is_behind_the_last_step(options: Any, model: Models) -> None:
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
def test_any_time_axis(time_dim: int, model: Models) -> None:
    """``[B, T, D]`` with ``[B, T]``; and ``[B, D, T]`` with ``[B, T]``, as cross entropy has it."""
    x, y = stream(22)
    if time_dim == 1:
        own, batch = model(Batchwise, 1, k1=3, k2=5), (x.transpose(0, 1), y.T)
    else:
        own, batch = model(ClassesFirst, -1, k1=3, k2=5), (x.permute(1, 2, 0), y.T)
    fit(own, [batch])
    module, _ = by_hand([(x, y)], k1=3, k2=5)
    assert_equal(list(own.parameters()), list(module.parameters()))


class Batchwise(Tagger):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def test_resets_and_masks(model: Models) -> None:
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


# -- the Trainer's flags ------------------------------------------------------------------------


class Clipped(torch.optim.SGD):
    """SGD that clips by itself."""

    clip: Any = None

    def step(self, closure: Any = None) -> Any:
        self.clip([p for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def clipped_by_hand(clip: Any, x: Tensor, y: Tensor) -> nn.Module:
    module = tagger()
    optimizer = Clipped(module.parameters(), lr=0.5)
    optimizer.clip = clip
    honest_updates(module, zeros(), x, y, optimizer, k1=4, k2=4, on_update=lambda *_: None)
    return module


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_gradient_clipping(algorithm: str | None, model: Models) -> None:
    x, y = stream(22)
    own = model()
    fit(own, [(x, y)], gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)
    clip = nn.utils.clip_grad_value_ if algorithm == "value" else nn.utils.clip_grad_norm_
    module = clipped_by_hand(lambda params: clip(params, 0.02), x, y)
    assert_equal(list(own.parameters()), list(module.parameters()))


def test_clipping_of_ones_own(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_accumulation(n: int, model: Models) -> None:
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


def test_max_steps_may_end_within_a_batch(model: Models) -> None:
    x, y = stream(22)
    own = model()
    run = fit(own, [(x, y), (x, y)], max_steps=3, max_epochs=-1)
    assert run.global_step == 3
    module, _ = by_hand([(x[:12], y[:12])])
    assert_equal(list(own.parameters()), list(module.parameters()))


@pytest.mark.parametrize("precision", [64, "64-true"])
def test_double_precision(precision: Any, model: Models) -> None:
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


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p.double() - q.double()).abs().max().item() for p, q in pairs)


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


def with_scheduler(own: Tagger, **config: Any) -> Any:
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    config.setdefault("interval", "step")
    config.setdefault("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, 12),
        ({"frequency": 5}, 2),
        ({"interval": "epoch"}, 2),
        ({"interval": "epoch", "frequency": 2}, 1),
    ],
)
def test_schedulers(
    config: Any, steps: int, model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monitor: str, interval: str, steps: int, model: Models, monkeypatch: pytest.MonkeyPatch
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


def test_frozen_parameters(model: Models) -> None:
    own = model()
    own.step.readout.weight.requires_grad_(False)
    fit(own, [stream(12)])
    module = tagger()
    module.readout.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    honest_updates(module, zeros(), *stream(12), optimizer, k1=4, k2=4, on_update=lambda *_: None)
    assert_equal(list(own.parameters()), list(module.parameters()))


# -- validation, test, prediction ---------------------------------------------------------------


def whole_loss(batches: Any, module: nn.Module) -> float:
    """The mean over all steps of all batches, each from zeros, without chunks."""
    losses = []
    with torch.no_grad():
        for x, y in batches:
            state = zeros(x.shape[1])
            for x_t, y_t in zip(x, y, strict=True):
                out, state = module(x_t, state)
                losses.append(cross_entropy(out[None], y_t[None]).flatten())
    return torch.cat(losses).mean().item()


def test_evaluation_in_chunks_is_the_whole_loss(model: Models) -> None:
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


def test_evaluation_by_valid_steps(model: Models) -> None:
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


def test_evaluation_carries_too(model: Models) -> None:
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


def test_validation_leaves_the_carried_state_alone(model: Models) -> None:
    batches = [stream(8, seed=1), stream(11, seed=2)]
    own = model(carry=True)
    fit(own, batches, [stream(9, seed=5)], val_check_interval=1)
    module, _ = by_hand(batches, carry=True)
    assert_equal(list(own.parameters()), list(module.parameters()))


# -- loggers, the bar, callbacks ----------------------------------------------------------------


def rows(path: str) -> list[dict[str, str]]:
    with Path(path, "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(found: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in found if row[name]}


def test_loggers(model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rows_every_so_many_updates(model: Models, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(model(), [stream(40)], logger=logger, log_every_n_steps=4)
    assert list(column(rows(logger.log_dir), "train_loss")) == [3, 7]


def test_the_bar_moves_within_a_batch(model: Models, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_early_stopping(model: Models) -> None:
    stop = EarlyStopping("val_loss", patience=2, min_delta=100)
    run = fit(model(), [stream(8)], [stream(5)], max_epochs=20, callbacks=[stop])
    assert run.current_epoch == 3


def test_val_check_interval_counts_batches(model: Models) -> None:
    seen = []

    class Watching(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.global_step)

    fit(model(), [stream(8)] * 4, [stream(5)], val_check_interval=2, callbacks=[Watching()])
    assert seen == [4, 8]


# -- checkpoints --------------------------------------------------------------------------------


class Resumable:
    """A loader that goes on where it was."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.at = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Momentum(Tagger):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Save(Callback):
    """Writes a checkpoint behind the batch that ends with an update."""

    def __init__(self, path: Path, update: int) -> None:
        self.path, self.update = path, update

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.update:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("saved", [1, 3, 4, 6])
def test_resuming_is_exact(saved: int, model: Models, tmp_path: Path) -> None:
    """Behind any batch, the carried state included; 4 batches of 2 updates in an epoch."""
    batches, path = [stream(8, seed=seed) for seed in range(4)], tmp_path / "run.ckpt"
    own = model(Momentum, carry=True)
    whole = trainer(max_epochs=3, callbacks=[Save(path, 2 * saved)])
    whole.fit(own, Resumable(batches))
    expected = copy.deepcopy(own.step)
    own = model(Momentum, carry=True)
    resumed = trainer(max_epochs=3)
    resumed.fit(own, Resumable(batches), ckpt_path=path)
    assert resumed.global_step == whole.global_step == 24
    assert_equal(list(own.step.parameters()), list(expected.parameters()), 0)


def test_model_checkpoint(model: Models, tmp_path: Path) -> None:
    """The best by a loss, and one every so many updates where a batch ends with them."""
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="{val_loss:.6f}")
    often = ModelCheckpoint(tmp_path / "often", every_n_train_steps=4, save_top_k=-1)
    own = model()
    with pytest.warns(UserWarning, match="The checkpoint will contain the model state AFTER"):
        run = fit(own, [stream(8)] * 3, [stream(9, seed=5)], max_epochs=2,
                  enable_checkpointing=True, callbacks=[best, often])  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "often").iterdir()) == [
        "epoch=0-step=4.ckpt", "epoch=1-step=12.ckpt", "epoch=1-step=8.ckpt",
    ]  # fmt: skip
    saved = torch.load(best.best_model_path, weights_only=True)
    own.load_state_dict(saved["state_dict"])
    (found,) = run.validate(own, loader([stream(9, seed=5)]), verbose=False)
    assert found["val_loss"] == pytest.approx(float(best.best_model_score), abs=1e-6)


def test_structured_states_are_in_checkpoints(tmp_path: Path) -> None:
    batches = [stream(8, seed=seed) for seed in range(3)]
    own = Structured()
    whole = trainer()
    whole.fit(own, Resumable(structured(batches)))
    expected = [p.detach().clone() for p in own.parameters()]
    path = tmp_path / "run.ckpt"

    own = Structured()
    trainer(callbacks=[Save(path, 4)]).fit(own, Resumable(structured(batches)))
    own = Structured()
    trainer().fit(own, Resumable(structured(batches)), ckpt_path=path)
    assert_equal([*own.parameters()], expected, 0)
    loaded = Structured.load_from_checkpoint(path)
    assert sorted(loaded.state_dict()) == sorted(own.state_dict())


class HC(NamedTuple):
    h: Tensor
    c: Tensor


def structured(batches: Any) -> Any:
    """Nested inputs and targets."""
    return [({"first": x[..., :2], "rest": [x[..., 2:]]}, (y, y)) for x, y in batches]


class Structured(TBPTTModule):
    """A state in a dict with a named tuple, which begins at ones."""

    def __init__(self) -> None:
        super().__init__(4, time_dim=0, carry=True, backend="eager")
        self.step = tagger()

    def initial_state(self, x: Any) -> Any:
        h = torch.ones_like(x["first"][0, :, :1]).expand(-1, 5).contiguous()
        return {"cell": HC(h, torch.zeros_like(h)), "steps": torch.zeros_like(h[:, 0])}

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        outs = []
        for x_t in torch.cat([x["first"], *x["rest"]], -1):
            out, cell = self.step(x_t, state["cell"])
            state = {"cell": HC(*cell), "steps": state["steps"] + 1}
            outs.append(out)
        return {"scores": torch.stack(outs)}, state

    def loss(self, out: Any, y: Any) -> Tensor:
        return mean_cross_entropy(out["scores"], y[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_structured_states_and_data() -> None:
    batches = [stream(8, seed=1), stream(10, seed=2)]
    own = Structured()
    fit(own, structured(batches))
    module = tagger()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    state = torch.ones(2, 5).double(), torch.zeros(2, 5).double()
    for x, y in batches:
        behind = []
        honest_updates(module, state, x, y, optimizer, k1=4, k2=4,
                       on_update=lambda _, s, behind=behind: behind.append(s))  # fmt: skip
        state = behind[-1]
    assert_equal(list(own.parameters()), list(module.parameters()))


# -- the module itself --------------------------------------------------------------------------


class Classifier(TBPTTModule):
    """Layers of torch, whose state is None at first; dropout, which a trial run must not draw."""

    def __init__(self, **options: Any) -> None:
        super().__init__(k1=5, **{"backend": "eager"} | options)
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True)
        self.readout = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, state = self.lstm(x, state)
        return self.readout(h), state

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


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


def test_a_second_fit_compiles_nothing(model: Models) -> None:
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
    code = "import sys, ftbptt, ftbptt.training; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"k1": 0}, ValueError, "k1: expected at least 1, found 0"),
        ({"k1": 4.0}, TypeError, "k1: expected a number of steps, found 4.0"),
        ({"k1": 4, "time_dim": None}, TypeError, "time_dim: expected a whole number, found None"),
        ({"k1": 4, "k_eval": 0}, ValueError, "k_eval: expected at least 1 step, found 0"),
        ({"k1": 4, "context": 4}, ValueError, "context: 4 of the k2=4 steps"),
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
        (
            (X, Y, torch.zeros(9, dtype=torch.bool)),
            ValueError,
            "reset: has 9 steps on axis 0, but x has 10",
        ),
    ],
)
def test_bad_batches(batch: Any, kind: type[Exception], words: str, model: Models) -> None:
    with pytest.raises(kind, match=words):
        fit(model(), [batch])


def test_a_batch_without_a_loss(model: Models) -> None:
    with pytest.raises(ValueError, match="batch: no window of its 3 steps has a loss"):
        fit(model(context=3), [stream(3)])


def test_carry_between_batches_of_different_rows(model: Models) -> None:
    with pytest.raises(ValueError, match=r"carry: state\[0\] is \[2, 5\] behind.*\[3, 5\]"):
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
        fit(own, [(*batch, flags)])
    del own.initial_state
    own.forward = lambda x, state: (x, torch.ones(2, 3) if state is None else state)
    with pytest.raises(ValueError, match=r"initial_state: forward.* another state than zeros"):
        fit(own, [batch])
