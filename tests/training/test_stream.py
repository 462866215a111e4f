"""``train_stream`` against plain loops of autograd, in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment
from ftbptt.training import Chunk, train_stream

from .stream_runs import Segments, assert_equal, run, sgd
from .streams import cross_entropy, honest_updates, mean_cross_entropy, stream, tagger, zeros


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
    with pytest.raises(TypeError, match="k2, burn_in: the next window starts within this one"):
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


@pytest.mark.parametrize("clip_norm", [None, 0.25])
def test_ensemble_by_vmap(clip_norm: float | None) -> None:
    """A vmapped segment trains many models, each on its own stream; time is after their axis.

    None of them has a part in another's clipping.
    """
    modules = [tagger(seed).double() for seed in range(3)]
    params, _ = torch.func.stack_module_state(modules)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    segment = make_train_segment(modules[0], mean_cross_entropy, backend="eager")
    data = [stream(9, seed=seed) for seed in range(3)]
    x, y = (torch.stack([d[i] for d in data]) for i in (0, 1))
    state = tuple(torch.stack([leaf] * 3) for leaf in zeros())
    run = train_stream(
        torch.func.vmap(segment), params, state, (x, y), sgd(params), k1=4, progress=False,
        time_dim=1, clip_norm=clip_norm, interval=0,
    )  # fmt: skip
    updates = list(run)
    assert updates[0].loss.shape == updates[0].grad_norm.shape == (3,)
    assert run.history[0].grad_norm == pytest.approx(float(updates[0].grad_norm.mean()))
    if clip_norm is not None:
        norms_of_all = torch.cat([update.grad_norm for update in updates])
        assert norms_of_all.min() < clip_norm < norms_of_all.max()
    for i, own in enumerate(modules):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        norms: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_, norms=norms, own=own: norms.append(
            nn.utils.clip_grad_norm_(own.parameters(), clip_norm or math.inf)
        ))  # fmt: skip
        honest_updates(own, zeros(), *data[i], optimizer, k1=4, k2=4, on_update=lambda *_: None)
        assert_equal([p[i] for p in params.values()], list(own.parameters()))
        assert_equal([update.grad_norm[i] for update in updates], norms)


def test_an_ensemble_whose_state_has_no_axis_of_models() -> None:
    """The first window returns one that has."""
    cell = nn.GRUCell(3, 5)
    params, _ = torch.func.stack_module_state([cell] * 4)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    segment = make_train_segment(cell, lambda out, y: out.mean(), backend="eager")
    run = train_stream(
        torch.func.vmap(segment, in_dims=(0, None, None, None)), params, torch.zeros(2, 5),
        (torch.randn(8, 2, 3), None), sgd(params), k1=4, progress=False, time_dim=0,
    )  # fmt: skip
    next(run)
    with pytest.raises(ValueError, match="hidden") as error:
        next(run)
    assert (
        "ftbptt: the run started from state= of shape [2, 5], but the segment returned one of "
        "[4, 2, 5], which this window starts from. Under torch.func.vmap give the state its axis "
        "from the start, and map over it: in_dims=(0, 0, ...)."
    ) in error.value.__notes__


def test_an_ensemble_that_is_frozen() -> None:
    module = tagger()
    params = {
        name: nn.Parameter(torch.stack([p.detach()] * 3), requires_grad=False)
        for name, p in module.named_parameters()
    }
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    x, y = (torch.stack([leaf] * 3) for leaf in stream(8))
    state = tuple(torch.stack([leaf] * 3) for leaf in zeros())
    run = train_stream(
        torch.func.vmap(segment), params, state, (x, y), sgd(params), k1=4, progress=False,
        time_dim=1,
    )  # fmt: skip
    assert [float(update.grad_norm) for update in run] == [0.0, 0.0]
