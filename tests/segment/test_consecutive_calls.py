"""A segment that is followed gives what it gives anew, whatever has changed between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import TrainSegment, make_train_segment
from ftbptt.backends import EAGER
from ftbptt.segment.consecutive_calls import ConsecutiveCalls
from ftbptt.segment.execute import Executable

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..oracle import assert_close

Tree = Any


class Cell(nn.Module):
    """With a mode and a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x_t, h)
        return h * self.scale if self.training else -h, h


def loss(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def data(steps: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, 2, 3), torch.randn(steps, 2, 5)


class Both:
    """A segment followed, and the same one asked anew; what they return is compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.cell = Cell()
        self.params: Tree = dict(self.cell.named_parameters())
        self.segment = make_train_segment(self.cell, loss, backend="eager")
        self.consecutive = ConsecutiveCalls(self.segment)
        self.followed = 0
        run_checked = TrainSegment.run_checked

        def counted(segment: Any, checked: Any, leaves: Any, *rest: Any) -> Any:
            self.followed += leaves[0] is self.consecutive._params
            return run_checked(segment, checked, leaves, *rest)

        monkeypatch.setattr(TrainSegment, "run_checked", counted)
        self.state: Tree = torch.zeros(2, 5)

    def go(self, x: Tensor, y: Tensor) -> bool:
        """One call; whether it was followed."""
        before = self.followed
        found = self.consecutive(self.params, self.state, x, y)
        fresh = make_train_segment(self.cell, loss, backend="eager")
        assert_close(found, fresh(self.params, self.state, x, y))
        self.state = found.state
        return self.followed > before


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(monkeypatch)


def test_calls_that_follow_each_other(both: Both) -> None:
    assert [both.go(*data()) for _ in range(4)] == [False, True, True, True]


CHANGES: dict[str, Callable[[Both], Any]] = {
    "a mode": lambda both: both.cell.eval(),
    "a buffer": lambda both: both.cell.register_buffer("scale", torch.full((1,), 2.0)),
    "another state": lambda both: setattr(both, "state", torch.ones(2, 5)),
    "another parameter": lambda both: both.params.update(
        {"cell.weight_hh": torch.randn(15, 5), "cell.bias_hh": torch.zeros(15)}
    ),
    "other parameters": lambda both: setattr(
        both, "params", {name: p + 1 for name, p in both.params.items()}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_seen(change: str, both: Both) -> None:
    both.go(*data())
    assert both.go(*data())
    CHANGES[change](both)
    assert not both.go(*data())
    assert both.go(*data())


def test_a_sparse_tensor_is_refused_later_too(both: Both) -> None:
    x, y = data()
    both.go(x, y)
    for sparse in ((x.to_sparse(), y), (x, y.to_sparse())):
        assert both.go(x, y)
        with pytest.raises(TypeError, match="expected a dense tensor, found one of layout"):
            both.consecutive(both.params, both.state, *sparse)


def test_numbers_that_change_in_place_need_not_be_seen(both: Both) -> None:
    both.go(*data())
    with torch.no_grad():
        for p in both.params.values():
            p.mul_(0.5)
        both.cell.scale.fill_(3.0)
    both.state.add_(1)
    assert both.go(*data())


def test_a_call_of_another_kind_between(both: Both) -> None:
    """What is remembered of one call is not used for another."""
    x, _ = data()
    cell = both.cell
    segment = make_train_segment(cell, lambda out, y: out.mean(), backend="eager")
    consecutive, params = ConsecutiveCalls(segment), dict(cell.named_parameters())
    given = data()
    first = consecutive(params, torch.zeros(2, 5), *given)
    second = consecutive(params, first.state, x, None)
    third = consecutive(params, second.state, *given)
    fresh = make_train_segment(cell, lambda out, y: out.mean(), backend="eager")
    assert_close(third, fresh(params, second.state, *given))
    swapped = dict(zip(reversed(params), params.values(), strict=True))
    with pytest.raises((TypeError, ValueError, RuntimeError)):  # shapes under other names
        consecutive(swapped, third.state, *given)


def test_other_shapes_and_dtypes(both: Both) -> None:
    both.go(*data())
    assert not both.go(*data(5))
    assert both.go(*data(5))
    both.cell.double()  # the same tensors, of another dtype
    both.state = both.state.double()
    assert not both.go(*(leaf.double() for leaf in data(5)))
    assert both.go(*(leaf.double() for leaf in data(5)))


def nested(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x_t * params["cell"]["w"] + h)
    return h, h


def test_nested_parameters_of_a_functional_optimizer() -> None:
    segment = make_train_segment(nested, loss, backend="eager")
    consecutive, params = ConsecutiveCalls(segment), {"cell": {"w": torch.randn(5)}}
    state = torch.zeros(2, 5)
    for _ in range(4):
        x, y = torch.randn(4, 2, 5), torch.randn(4, 2, 5)
        found = consecutive(params, state, x, y)
        assert_close(found, segment(params, state, x, y))
        params = {"cell": {"w": params["cell"]["w"] - found.grads["cell"]["w"]}}
        state = found.state


def test_the_same_tensors_in_another_structure() -> None:
    def pair(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h = torch.tanh(x_t * params["w"] + state[0])
        return h, (h, *state[1:]) if type(state) is tuple else [-h, *state[1:]]

    segment = make_train_segment(pair, loss, backend="eager")
    consecutive, params = ConsecutiveCalls(segment), {"w": torch.randn(5)}
    state: Tree = (torch.zeros(2, 5), torch.zeros(2))
    for kind in (tuple, tuple, list, list):
        given = params, kind(state), torch.randn(4, 2, 5), torch.randn(4, 2, 5)
        found = consecutive(*given)
        assert_close(found, segment(*given))
        state = found.state


def test_a_backend_that_fails_is_left_at_once(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"auto": replace(EAGER, name="fused"), "eager": EAGER}
    monkeypatch.setattr("ftbptt.segment.executables.choose", backends.__getitem__)
    both.segment = make_train_segment(both.cell, loss)
    both.consecutive = ConsecutiveCalls(both.segment)
    assert [both.go(*data()) for _ in range(2)] == [False, True]
    run, failed = Executable.run, []

    def failing(own: Executable, *args: Any, **options: Any) -> Any:
        if own.backend.name == "fused":
            failed.append(own)
            raise RuntimeError("no more")
        return run(own, *args, **options)

    monkeypatch.setattr(Executable, "run", failing)
    with pytest.warns(RuntimeWarning, match="fused backend failed for Cell .*no more"):
        assert both.go(*data())
    assert [both.go(*data()) for _ in range(2)] == [True, True]
    assert len(failed) == 1


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_every_cell(name: str) -> None:
    given = problem(name)
    options = {"backend": "eager", "time_dim": given.time_dim or None}
    segment = make_train_segment(given.step, given.loss, **options)  # type: ignore[arg-type]
    consecutive = ConsecutiveCalls(segment)
    params, state, x, y = given.data(5)
    own = state
    for _ in range(3):
        found, expected = consecutive(params, own, x, y), segment(params, state, x, y)
        assert_close(found, expected)
        own, state = found.state, expected.state
