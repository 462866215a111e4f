"""Numbers in tensors that a step, its loss or its initial state reads, and that change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftbptt import TrainSegment, make_train_segment

from ..cells.problems import H, Problem, mse
from ..oracle import check
from .changing import AGAIN, made_with

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float": lambda h, v: h * float(v),
    "item": lambda h, v: h * v.item(),
    "if": lambda h, v: h if v else -h,
    "shift": lambda h, v: h.roll(v, 1),
    "slope": lambda h, v: F.leaky_relu(h, v),
    "fill": lambda h, v: h + torch.full((H,), v, dtype=h.dtype),
}


def check_changes(segment: TrainSegment, made: Problem, v: Tensor, **options: Any) -> None:
    """The number changes, is written again, and the first call comes again with another K."""
    check(segment, made, 4, **options)
    traces = segment.trace_count
    v.fill_(0)
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4, **options)
    assert segment.trace_count == traces + 1
    v.fill_(0)
    check(segment, made, 3, **options)  # K is no part of a trace
    v.fill_(2)
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4, **options)
    assert segment.trace_count == traces + 2


@pytest.mark.parametrize("read", READS)
def test_by_a_step(read: str) -> None:
    v = torch.tensor(2) if read == "shift" else torch.tensor(2.0, dtype=torch.float64)
    made = made_with(lambda h: READS[read](h, v))
    check_changes(make_train_segment(made.step, made.loss, backend="eager"), made, v)


@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_compiled(backend: str) -> None:
    v = torch.tensor(2.0)
    made = made_with(lambda h: h * float(v))
    check_changes(make_train_segment(made.step, made.loss, backend=backend), made, v)


def test_by_a_loss() -> None:
    v = torch.tensor(2.0)
    made = made_with(lambda h: h, lambda out, y: mse(out, y) * v.item())
    check_changes(make_train_segment(made.step, made.loss, backend="eager"), made, v)


def test_by_the_initial_state() -> None:
    v = torch.tensor(2.0)
    made = made_with(lambda h: h)

    def start(params: Any) -> Tensor:
        return params["w"][:1] * float(v)

    segment = make_train_segment(made.step, made.loss, backend="eager", initial_state=start)
    reset = torch.tensor([False, True, False, True])
    check(segment, made, 4, initial_state=start, reset=reset)
    v.fill_(3)
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4, initial_state=start, reset=reset)


def test_of_inference_mode() -> None:
    """Such a tensor does not count how often it is written to."""
    with torch.inference_mode():
        v = torch.tensor(2.0)
    made = made_with(lambda h: h * float(v))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    with torch.inference_mode():
        v.fill_(3)
    with pytest.warns(RuntimeWarning, match=AGAIN):
        check(segment, made, 4)


def test_that_is_read_for_a_branch() -> None:
    """A change that does not matter, and one that does."""
    v = torch.tensor(2.0)
    made = made_with(lambda h: h if float(v) > 1.5 else -h)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    for number in (3.0, 1.0):
        v.fill_(number)
        with pytest.warns(RuntimeWarning, match=AGAIN):
            check(segment, made, 4)


def test_of_a_tensor_that_the_step_makes() -> None:
    made = made_with(lambda h: h * torch.tensor(0.5).item())
    segment = make_train_segment(made.step, made.loss, backend="eager")
    check(segment, made, 4)
    assert segment.explain(*made.data(4)).backend == "eager"


@pytest.mark.filterwarnings("ignore:ftbptt. step is compiled again:RuntimeWarning")
def test_a_number_that_changes_again_and_again_holds_two_programs() -> None:
    """The first, by which calls are known, and the last."""
    v = torch.tensor(2.0)
    made = made_with(lambda h: h * float(v))
    segment = make_train_segment(made.step, made.loss, backend="eager")
    plans = []
    for i in range(4):
        v.fill_(i)
        segment(*made.data(4))
        (executable,) = segment._executables._by_key.values()
        plans.append(weakref.ref(executable.plan))
        del executable
    gc.collect()
    assert [plan() is not None for plan in plans] == [True, False, False, True]
