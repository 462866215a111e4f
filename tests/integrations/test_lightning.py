"""``TBPTTModule`` against plain loops of autograd, in float64."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, DistributedSampler

from ..training.streams import cross_entropy, stream, tagger, zeros
from .lightning_models import (
    Batchwise,
    ClassesFirst,
    Classifier,
    Masked,
    Tagger,
    assert_equal,
    by_hand,
    fit,
    loader,
    model,
    trainer,
    whole_loss,
)

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
def test_windows(name: str) -> None:
    batches = [stream(22, seed=1), stream(9, seed=2)]
    own = model(**CASES[name])
    run = fit(own, batches, max_epochs=2)
    module, losses = by_hand(batches * 2, **CASES[name])
    assert_equal(list(own.parameters()), list(module.parameters()))
    assert run.global_step == len(losses)


@pytest.mark.parametrize("name", ["k1 = k2", "overlapping", "each loss once"])
def test_carry_across_batches(name: str) -> None:
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
def test_the_carried_state_is_behind_the_last_step(options: Any) -> None:
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


def test_carry_between_batches_in_a_random_order() -> None:
    """As asked for, or as a strategy for several devices puts them, also on one device."""
    data: Any = [stream(8), stream(8)]
    for shuffle in (True, False):
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
        for order, found in (
            ({"shuffle": shuffle}, r"RandomSampler, so that .*carry=False"),
            ({"sampler": sampler}, r"DistributedSampler, so that .*strategy='auto'"),
        ):
            batches: Any = DataLoader(data, batch_size=None, **order)
            words = rf"carry: the batches are in a random order, since their sampler is a {found}"
            with pytest.raises(ValueError, match=words) if shuffle else nullcontext():
                trainer().fit(model(carry=True), batches)


@pytest.mark.parametrize("time_dim", [1, -1])
def test_any_time_axis(time_dim: int) -> None:
    """``[B, T, D]`` with ``[B, T]``; and ``[B, D, T]`` with ``[B, T]``, as cross entropy has it."""
    x, y = stream(22)
    if time_dim == 1:
        own, batch = model(Batchwise, 1, k1=3, k2=5), (x.transpose(0, 1), y.T)
    else:
        own, batch = model(ClassesFirst, -1, k1=3, k2=5), (x.permute(1, 2, 0), y.T)
    fit(own, [batch])
    module, _ = by_hand([(x, y)], k1=3, k2=5)
    assert_equal(list(own.parameters()), list(module.parameters()))


def test_resets_and_masks() -> None:
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


# -- validation, test, prediction ---------------------------------------------------------------


def test_evaluation_in_chunks_is_the_whole_loss() -> None:
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


def test_prediction_for_a_dict() -> None:
    class OfDicts(Classifier):
        def forward(self, x: Any, state: Any) -> tuple[Tensor, Any]:
            return super().forward(x["x"], state)

    own, x = OfDicts(), torch.randn(2, 9, 3, dtype=torch.float64)
    (out,) = trainer().predict(own, loader([{"x": x}]))
    (expected,) = trainer().predict(Classifier(), loader([(x,)]))
    assert_equal(out, expected, 0)


@pytest.mark.parametrize("by_row", [True, False])
def test_prediction_for_padded_sequences(by_row: bool) -> None:
    x, y = stream(22)
    mask = torch.rand(22, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = mask if by_row else mask[:, 0]
    own = model(Masked, k_eval=4)
    (out,) = trainer().predict(own, loader([(x, y, None, mask)]))
    state, expected = zeros(), []
    for t in range(22):
        out_t, after = own.step(x[t], state)
        keep = mask[t].reshape(-1, 1)
        state = tuple(torch.where(keep, a, b) for a, b in zip(after, state, strict=True))
        expected.append(out_t.detach())
    assert_equal(out, torch.stack(expected))


def test_zeros_of_a_layer_that_was_replaced() -> None:
    own, x = Classifier(), torch.randn(2, 9, 3, dtype=torch.float64)
    run = trainer()
    run.predict(own, loader([x]))
    own.lstm = nn.LSTM(3, 5, 2, batch_first=True).double()
    own.readout = nn.Linear(5, 3).double()
    (out,) = run.predict(own, loader([x]))
    assert_equal(out, own(x, None)[0], 1e-12)


def swapped(step: nn.Module) -> None:
    """The same parameters in another order."""
    cell = step.cell
    del step.cell
    step.cell = cell


def pruned(step: nn.Module) -> None:
    """So are those of a layer whose weight is a product with a mask, here of ones."""
    prune.custom_from_mask(step.cell, "weight_hh", torch.ones(20, 5))


def with_a_frozen_one(step: nn.Module) -> None:
    step.first = nn.Parameter(torch.ones(()), requires_grad=False)


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("change", [swapped, pruned, with_a_frozen_one])
def test_parameters_in_another_order_between_batches(change: Any, windows: int) -> None:
    """Gradients belong to the same ones, also those of windows that wait for an update."""

    class Changed(Tagger):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                change(self.step)

    own, kept = Changed(), model()
    for module in (own, kept):
        fit(module, [stream(12, seed=1), stream(8, seed=2)], accumulate_grad_batches=windows)
    found = {name.removesuffix("_orig"): p for name, p in own.named_parameters()}
    assert_equal([found[name] for name, _ in kept.named_parameters()], list(kept.parameters()))


def test_evaluation_by_valid_steps() -> None:
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


def test_evaluation_carries_too() -> None:
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


def test_validation_leaves_the_carried_state_alone() -> None:
    batches = [stream(8, seed=1), stream(11, seed=2)]
    own = model(carry=True)
    fit(own, batches, [stream(9, seed=5)], val_check_interval=1)
    module, _ = by_hand(batches, carry=True)
    assert_equal(list(own.parameters()), list(module.parameters()))


# -- the module itself --------------------------------------------------------------------------


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


class ByEpoch(Tagger):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(out, y) * (1 + self.current_epoch)


class ByStep(Tagger):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(out, y) * (1 + self.trainer.global_step)


@pytest.mark.parametrize(("kind", "name"), [(ByEpoch, "current_epoch"), (ByStep, "global_step")])
def test_a_loss_that_depends_on_progress(kind: Any, name: str) -> None:
    """They are numbers in a segment, which is compiled again when they change."""
    x, y = stream(4)
    plain = fit(model(lr=0.0), [(x, y)])
    with pytest.warns(RuntimeWarning, match=rf"compiled again: the attribute '{name}' of By"):
        run = fit(model(kind, lr=0.0), [(x, y)], [(x, y)], max_epochs=2)
    loss = plain.callback_metrics["train_loss"].item()
    assert run.callback_metrics["train_loss"] == pytest.approx(2 * loss)
    assert run.callback_metrics["val_loss"] == pytest.approx((2 + (kind is ByStep)) * loss)


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


def test_a_second_fit_compiles_nothing() -> None:
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
    code = "import sys, ftbptt, ftbptt.training; print('lightning' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
