"""What an optimizer is given, and what becomes of it while a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import SegmentOutput, make_train_segment
from ftbptt.training import Chunk, Events, Stream, train_stream
from ftbptt.training.updates.learner import Learner
from ftbptt.training.updates.window_stats import WindowStats

from .streams import (
    Tagger,
    cross_entropy,
    honest_updates,
    mean_cross_entropy,
    stream,
    tagger,
    zeros,
)


def started(params: dict[str, Tensor], optimizer: Any, module: nn.Module, **options: Any) -> Stream:
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    options = {"k1": 4, "progress": False, **options}
    return train_stream(segment, params, zeros(), stream(20), optimizer, **options)


def test_what_an_optimizer_keeps_in_another_dtype(tmp_path: Path) -> None:
    """NAdam has a number in float32 beside parameters in float64. torch casts it when it loads."""

    def trained(*cuts: int | None) -> Tagger:
        module = tagger()
        file = tmp_path / f"{len(cuts)}.pt"
        for cut in cuts:
            optimizer = torch.optim.NAdam(module.parameters(), lr=0.05)
            params = dict(module.named_parameters())
            for _ in started(params, optimizer, module, checkpoint=file, resume=True, updates=cut):
                pass
        return module

    torch.testing.assert_close(
        trained(2, None).state_dict(), trained(None).state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize("as_group", [True, False])
def test_a_group_that_is_added_in_the_midst_of_a_run(as_group: bool) -> None:
    """As when layers are thawed one after the other: it is trained from the next update on.

    So are tensors that are put into a group that was there.
    """

    def begun() -> tuple[Tagger, torch.optim.Optimizer, Callable[..., None]]:
        module, seen = tagger(), []
        own = torch.optim.SGD(module.cell.parameters(), lr=0.5, momentum=0.9)

        def updated(*_: Any) -> None:
            seen.append(0)
            if len(seen) == 2 and as_group:
                own.add_param_group({"params": module.readout.parameters(), "lr": 0.1})
            elif len(seen) == 2:
                own.param_groups[0]["params"] += module.readout.parameters()

        return module, own, updated

    found, optimizer, updated = begun()
    for update in started(dict(found.named_parameters()), optimizer, found):
        updated(update)
    expected, optimizer, updated = begun()
    honest_updates(expected, zeros(), *stream(20), optimizer, k1=4, k2=4, on_update=updated)
    torch.testing.assert_close(found.state_dict(), expected.state_dict())
    assert not torch.equal(found.readout.weight, tagger().readout.weight)


def test_a_group_of_a_tensor_that_is_not_in_params() -> None:
    module = tagger()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    run = started(dict(module.named_parameters()), optimizer, module)
    next(run)
    optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    with pytest.raises(ValueError, match=r"its tensor 0 of group 1, of shape .3., is not one of"):
        next(run)


def test_many_steps_in_half_precision() -> None:
    """The sum over so many steps would be infinite."""
    params = {"w": nn.Parameter(torch.zeros(2, dtype=torch.float16))}
    learner = Learner(
        params, torch.optim.SGD(params.values(), lr=1.0), clip_norm=None, clip_value=None,
        scheduler=None, scaler=None, ema_decay=None,
    )  # fmt: skip
    parts = [(1.0, 60_000), (3.0, torch.tensor(20_000)), (2.0, 0)]
    for value, weight in parts:
        learner.add({"w": torch.full((2,), value, dtype=torch.float16)}, weight)
    measured = [WindowStats(torch.tensor(v, dtype=torch.float16), n, 1, 1) for v, n in parts]
    joined = WindowStats.joined(measured)
    grads, _ = learner.ready(joined.loss)
    assert grads[0].tolist() == [1.5, 1.5]
    assert (float(joined.loss), int(joined.weight)) == (1.5, 80_000)


def test_a_scaler_goes_on_after_an_error(tmp_path: Path) -> None:
    """Between the unscaling and the step, as in an event or by Ctrl-C."""
    seen = []
    for wrong in (False, True):
        module = tagger()
        failing = [wrong, False, wrong]

        def before_update(grads: list[Tensor], failing: list[bool] = failing) -> None:
            if failing and failing.pop():
                raise ZeroDivisionError

        run = started(
            dict(module.named_parameters()), torch.optim.SGD(module.parameters(), lr=0.5), module,
            scaler=torch.amp.GradScaler("cpu"), checkpoint=tmp_path / f"{wrong}.pt",
            events=Events(before_update=before_update),
        )  # fmt: skip
        while not run._trainer.ended:
            try:
                for _ in run:
                    pass
            except ZeroDivisionError:
                assert wrong
        assert not failing
        seen.append(module.state_dict())
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)


def test_a_loss_that_overflows_when_it_is_scaled() -> None:
    """It is left to the scaler, which makes no step and goes down."""
    module = tagger().float()
    params = dict(module.named_parameters())
    segment = make_train_segment(
        module, lambda out, y: cross_entropy(out, y).half(), backend="eager"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    x, y = stream(80)
    losses = [
        float(update.loss)
        for update in train_stream(
            segment, params, tuple(leaf.float() for leaf in zeros()), (x.float(), y),
            torch.optim.SGD(params.values(), lr=0.5), k1=4, scaler=scaler, progress=False,
        )
    ]  # fmt: skip
    assert len(losses) == 20
    assert all(0 < loss < 4 for loss in losses)
    assert 1 < scaler.get_scale() < 2.0**20
    assert not torch.equal(params["readout.weight"], tagger().float().readout.weight)


def test_parameters_in_another_order_are_not_mistaken(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(3, 3).double())

        def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return h, torch.tanh(self.a(x_t) + self.b(h))

    def run(names: str, resume: bool) -> Stream:
        module = Two(names)
        segment = make_train_segment(module, lambda out, y: out.square().mean(), backend="eager")
        params = dict(module.named_parameters())
        return train_stream(
            segment, params, torch.zeros(2, 3).double(), (stream(8)[0], None),
            torch.optim.SGD(params.values(), lr=0.1), k1=4, progress=False,
            checkpoint=tmp_path / "run.pt", resume=resume,
        )  # fmt: skip

    list(run("ab", False))
    assert run("ab", True).index == 2
    words = r"params: found \['b.weight'\], \['b.bias'\], .*in the checkpoint \['a.weight'"
    with pytest.raises(ValueError, match=words):
        run("ba", True)


@pytest.mark.parametrize("functional", [False, True])
def test_gradients_of_a_segment_under_vmap(functional: bool) -> None:
    """One for each of what was mapped over: torch would only say that the sizes differ."""
    module = tagger()
    params = dict(module.named_parameters())
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    many = torch.func.vmap(segment, in_dims=(None, 0, 1, 1))
    x, y = stream(20)
    data = torch.stack([x, x + 1, x - 1], 1), torch.stack([y] * 3, 1)
    state = tuple(torch.stack([leaf] * 3) for leaf in zeros())
    optimizer: Any = torch.optim.SGD(params.values(), lr=0.5)
    if functional:
        optimizer = Plain()
    message = (
        r"grads\['cell.weight_ih'\]: has shape \[3, 20, 3\], but the parameter has \[20, 3\]\. .*"
        r"torch.func.vmap.*average"
    )
    with pytest.raises(ValueError, match=message):
        next(train_stream(
            many, params, state, data, optimizer, k1=4, progress=False, time_dim=0
        ))  # fmt: skip

    def averaged(*args: Any) -> SegmentOutput:
        result = many(*args)
        return result._replace(grads={name: g.mean(0) for name, g in result.grads.items()})

    updates = train_stream(averaged, params, state, data, optimizer, k1=4, progress=False)
    assert len(list(updates)) == 5


class Plain:
    """Gradient descent as two pure functions."""

    def init(self, params: Any) -> None:
        return None

    def update(self, grads: Any, state: None, params: Any) -> tuple[Any, None]:
        return {name: p - 0.5 * grads[name] for name, p in params.items()}, None


class Scaled(nn.Module):
    """A cell with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x_t, h)
        return h * self.scale, h


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"micro_batches": 2}])
def test_a_single_number_keeps_its_dtype(options: dict[str, int]) -> None:
    """Weights of windows are float64 tensors where a mask counts the steps; torch promotes it."""
    torch.manual_seed(0)
    x, y = torch.randn(11, 3, 3), torch.randn(11, 3, 5)
    mask = torch.rand(11, 3, generator=torch.Generator().manual_seed(1)) < 0.6
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        module = Scaled().to(dtype)
        params = dict(module.named_parameters())
        segment = make_train_segment(
            module, lambda out, y: (out - y).square().mean(-1), backend="eager"
        )
        for _ in train_stream(
            segment, params, torch.zeros(3, 5, dtype=dtype),
            Chunk(x.to(dtype), y.to(dtype), mask=mask), torch.optim.Adam(params.values(), lr=0.1),
            k1=4, progress=False, **options,
        ):  # fmt: skip
            assert {p.grad.dtype for p in params.values()} == {dtype}
        found.append({name: p.detach().double() for name, p in params.items()})
    assert abs(found[1]["scale"] - 1.5) > 0.05
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-3)


class Careless:
    """Gradient descent that leaves detaching to its caller; its parameters are on spheres."""

    def __init__(self, order: Callable[[list[str]], list[str]] = list) -> None:
        self.order = order

    def init(self, params: Any) -> Any:
        return {"sum": {name: 0 * p for name, p in params.items()}}

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        total = {name: state["sum"][name] + params[name] for name in self.order(list(params))}
        moved = {name: params[name] - 0.5 * grads[name] for name in self.order(list(params))}
        return {name: p / p.norm() for name, p in moved.items()}, {"sum": total}


def test_a_functional_optimizer_that_does_not_detach() -> None:
    """Else each update keeps the graph of all before it, and memory grows with the stream."""
    module = tagger()
    run = started(dict(module.named_parameters()), Careless(), module)
    for update in run:
        kept = [*update.params.values(), *run._trainer.learner.opt_state["sum"].values()]
        assert not any(leaf.requires_grad or leaf.grad_fn for leaf in kept)
        assert all(leaf.norm() == pytest.approx(1) for leaf in update.params.values())
    assert run.index == 5


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda params: params, r"its update\(.*\) to return \(params, state\), found dict"),
        (lambda params: None, r"to return \(params, state\), found NoneType"),
        (lambda params: (params, {}), r"a state of another structure than state: state\['sum'\]"),
        (
            lambda params: (params, None),
            r"than state: state\['sum'\]\['cell.weight_ih'\] is missing",
        ),
        (lambda params: ({}, None), r"than params: params\['cell.weight_ih'\] is missing"),
        (lambda params: ({**params, "w": 0}, None), r"than params: params\['w'\] is new"),
        (lambda params: (list(params.values()), None), r"params\['cell.weight_ih'\] is missing"),
    ],
)
def test_a_functional_optimizer_that_returns_something_else(result: Any, words: str) -> None:
    class Odd(Careless):
        def update(self, grads: Any, state: Any, params: Any) -> Any:
            return result(params)

    module = tagger()
    with pytest.raises(TypeError, match=f"optimizer: .*{words}"):
        next(started(dict(module.named_parameters()), Odd(), module))


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_a_functional_optimizer_that_reorders(ema_decay: float | None, tmp_path: Path) -> None:
    """What is averaged and saved goes by place: no leaf may be taken for another."""

    def trained(optimizer: Careless, *cuts: int | None) -> Stream:
        module = tagger()
        file = tmp_path / f"{optimizer.order.__name__} {len(cuts)}.pt"
        for cut in cuts:
            run = started(
                dict(module.named_parameters()), optimizer, module, updates=cut, checkpoint=file,
                resume=True, ema_decay=ema_decay,
            )  # fmt: skip
            for _ in run:
                pass
        assert list(run.params) == list(dict(module.named_parameters()))
        return run

    def backwards(names: list[str]) -> list[str]:
        return sorted(names, reverse=True)

    expected = trained(Careless(), None)
    for cuts in ([None], [2, None]):
        found = trained(Careless(backwards), *cuts)
        assert found.index == 5
        torch.testing.assert_close(dict(found.params), dict(expected.params), rtol=0, atol=0)
        if ema_decay:
            torch.testing.assert_close(found.ema_params, expected.ema_params, rtol=0, atol=0)


class Counting(torch.optim.SGD):
    """Keeps a number beside the state of its parameters, under a name."""

    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index,call-overload]
        super().step(closure)


def test_an_optimizer_that_keeps_a_number_under_a_name(tmp_path: Path) -> None:
    def trained(*cuts: int | None) -> tuple[Tagger, Any]:
        module, optimizer = tagger(), None
        for cut in cuts:
            optimizer = Counting(module.parameters(), lr=0.5, momentum=0.9)
            params, file = dict(module.named_parameters()), tmp_path / f"{len(cuts)}.pt"
            list(started(params, optimizer, module, checkpoint=file, resume=True, updates=cut))
        return module, optimizer

    (found, optimizer), (expected, _) = trained(2, None), trained(None)
    assert optimizer.state["steps"] == 5
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


class Unrated(torch.optim.Optimizer):
    """Its groups have no "lr"."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"speed": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["speed"] * p.grad


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_the_reported_learning_rate_is_that_of_the_update(rate: Any) -> None:
    """Not the next one's, which the scheduler has set by then."""
    module = tagger()
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    params = dict(module.named_parameters())
    run = started(params, optimizer, module, interval=0, scheduler=scheduler)
    used = [float(update.learning_rate) for update in run]  # type: ignore[arg-type]
    assert used == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert [report.learning_rate for report in run.history] == used


def test_an_optimizer_without_a_learning_rate() -> None:
    modules = tagger(), tagger()
    optimizers = Unrated(modules[0].parameters()), torch.optim.SGD(modules[1].parameters(), lr=0.5)
    rates = []
    for module, optimizer in zip(modules, optimizers, strict=True):
        run = started(dict(module.named_parameters()), optimizer, module, interval=0)
        list(run)
        rates.append([report.learning_rate for report in run.history])
    assert rates == [[None] * 5, [0.5] * 5]
    torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict())
