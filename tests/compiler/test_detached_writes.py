"""In-place writes under no_grad or after detach(): new values with the old gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftbptt import make_train_segment

from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import check

Tree = Any
K = 4


def halved(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(0.5)
    return h


def halved_by_an_operator(h: Tensor) -> Tensor:
    with torch.no_grad():
        h *= 0.5
    return h


def of_itself(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(h)
    return h


def set_in_part(h: Tensor) -> Tensor:
    with torch.no_grad():
        h[:, 1:3] = 0.25
    return h


def view_of_it(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.T[:2, 0].clamp_(-0.1, 0.1)
    return h


def parts_of_it(h: Tensor) -> Tensor:
    with torch.no_grad():
        _, last = h.split([3, H - 3], -1)
        last.sub_(1)
    return h


def given_as_out(h: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(h, 3.0, out=h)
    return h


def by_a_function(h: Tensor) -> Tensor:
    with torch.no_grad():
        F.relu(h, inplace=True)
    return h


def detached(h: Tensor) -> Tensor:
    other = h.detach()
    other *= 0.5
    return h + other


def view_of_detached(h: Tensor) -> Tensor:
    torch.detach(h).detach().view(-1)[::2].clamp_(-0.1, 0.1)
    return h


def detached_and_seen(h: Tensor) -> Tensor:
    other = h.detach()
    h[:, 0] = 2 * h[:, 1]
    other[:, 1] = 1
    return h * other


def detached_result(h: Tensor) -> Tensor:
    return h + (h * 2).detach().clamp_(-0.1, 0.1) * h


def buffer(h: Tensor) -> Tensor:
    with torch.no_grad():
        buffer = torch.full_like(h, -torch.inf)
        buffer[0].copy_(h[0])
        buffer[1:].clamp_(min=-1)
    return h * buffer


def buffer_from_before(h: Tensor) -> Tensor:
    largest, count = torch.full_like(h, -torch.inf), torch.zeros(B, dtype=torch.long)
    with torch.no_grad():
        torch.maximum(largest, h, out=largest)
        count += 1
    return h * largest * count[:, None]


WRITES = [
    halved, halved_by_an_operator, of_itself, set_in_part, view_of_it, parts_of_it,
    given_as_out, by_a_function, detached, view_of_detached, detached_and_seen, detached_result,
    buffer, buffer_from_before,
]  # fmt: skip


def problem(change: Any, loss: Any = mse) -> Problem:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = change(x_t + h @ params["w"])
        return h, h

    draw = Draw(0)
    params, state = {"w": draw(H, H)}, draw(B, H)
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(B, H), loss)


def checked(problem: Problem) -> None:
    check(make_train_segment(problem.step, problem.loss, backend="eager"), problem, K)


@pytest.mark.parametrize("change", WRITES, ids=lambda change: change.__name__)
def test_in_the_step(change: Callable[[Tensor], Tensor]) -> None:
    checked(problem(change))


@pytest.mark.parametrize("change", [halved, detached], ids=lambda change: change.__name__)
def test_in_the_loss(change: Callable[[Tensor], Tensor]) -> None:
    checked(problem(lambda h: h, lambda out, y: change(out - y).square().mean()))


def through_data(h: Tensor) -> Tensor:
    h.data[:, 0].clamp_(-1, 1)
    return h


def data_assigned(h: Tensor) -> Tensor:
    h.data = h.data * 0.5
    return h


@pytest.mark.parametrize(
    "change", [through_data, data_assigned], ids=lambda change: change.__name__
)
def test_what_autograd_does_not_see_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """torch would compute the gradient from values that were overwritten."""
    message = r"writes through \.data.*write h \+ \(new - h\)\.detach\(\)"
    with pytest.raises(RuntimeError, match="step " + message) as caught:
        checked(problem(change))
    assert "test_detached_writes.py" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="loss " + message):
        checked(problem(lambda h: h, lambda out, y: change(out - y).square().mean()))


def test_data_that_is_only_read() -> None:
    checked(problem(lambda h: h * h.data + h.data.clone().mul_(0.5)))


BY_OTHER_NAMES = [
    lambda h: h.clip_(-0.3, 0.3),
    lambda h: h.square_().subtract_(0.5, alpha=0.5),
    lambda h: h.multiply_(3.0).divide_(2.0).negative_(),
    lambda h: torch.nn.SELU(inplace=True)(h),
    lambda h: torch.selu_(torch.square_(h)),
    lambda h: h * h.detach().clone().greater_(0),
    lambda h: h + (h.T @ h).fill_diagonal_(0.5)[:B],
]


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("number", range(len(BY_OTHER_NAMES)))
def test_functions_that_write_by_other_names(number: int, is_hidden: bool) -> None:
    """Of those torch has no functional form in a trace."""

    def change(h: Tensor) -> Tensor:
        if is_hidden:
            with torch.no_grad():
                h.clip_(-0.4, 0.4)
        return BY_OTHER_NAMES[number](h)

    checked(problem(lambda h: torch.tanh(change(0.5 * h.tanh()))))


def test_what_another_name_cannot_write() -> None:
    """As in the loop: the result would be cut to whole numbers."""

    def step(params: Any, x_t: Any, state: Any) -> Any:
        h, count = state
        count = count + 1
        count.multiply_(0.5)
        return h, (h + x_t * params["w"], count)

    segment = make_train_segment(step, lambda out, y: out.mean(), backend="eager")
    state = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"result type torch.float32 can't be cast to torch.int"):
        segment({"w": torch.ones(3)}, state, torch.zeros(4, 2, 3), None)
