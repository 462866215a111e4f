"""``in_dims=``: a step for one sequence on a batch with shared parameters, the mean loss graded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ftbptt import (
    SegmentOutput,
    compare_to_reference,
    make_train_segment,
    random_truncation,
    reference_segment,
)
from ftbptt.training import evaluate_stream

from ..cells import problem, slow_but
from ..cells.problems import D, Draw, H, mse, per_step
from ..compiler.test_counts import Made
from ..oracle import assert_close, assert_same_structure, unchanged
from ..sequences import N, looped, sequences, stacked

Segments = Callable[..., Any]
UNBATCHED = ["elman_one_sequence", "lstm_cell_unbatched", "gru_unbatched", "captured_tensor"]


def mean_over_sequences(expected: SegmentOutput) -> SegmentOutput:
    """Per-sequence results -> the gradients of the mean loss, and the mean loss."""
    grads = tree_map(lambda leaf: leaf.mean(0), expected.grads)
    return expected._replace(grads=grads, loss=expected.loss.mean())


@pytest.mark.parametrize("name", [*UNBATCHED, "lstm_readout", "embedding_tied", "aliases"])
def test_in_dims_is_vmap_and_mean(name: str, segments: Segments) -> None:
    segment = segments(name, "eager", in_dims=(None, 0, 0, 0))
    check_in_dims(segment, name, 5)
    traced = segment.trace_count  # other tests share the segment
    check_in_dims(segment, name, 1)
    assert segment.trace_count == traced


def check_in_dims(segment: Any, name: str, steps: int) -> None:
    given, calls = problem(name), sequences(name, steps)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    with unchanged(given.params, state, x, y):
        found = segment(given.params, state, x, y)
    assert_same_structure(found.grads, given.params)
    expected = looped(given, [(given.params, *call[1:]) for call in calls])
    assert_close(found, mean_over_sequences(expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBATCHED)
def test_in_dims_compiled(name: str, segments: Segments) -> None:
    segment = segments(name, "compile", in_dims=(None, 0, 0, 0))
    for steps in (5, 63, 1):
        check_in_dims(segment, name, steps)


def test_in_dims_of_time_major_data(segments: Segments) -> None:
    """x [K, N, D] and y [K, N, O]: their batch axis is 1, and so is that of out."""
    name = "elman_one_sequence"
    given, calls = problem(name), sequences(name, 5)
    x, y = (stacked([call[i] for call in calls], dim=1) for i in (2, 3))
    state = stacked([call[1] for call in calls])
    reset, mask = torch.rand(5, N) < 0.3, torch.rand(5, N) < 0.7
    segment = segments(name, "eager", in_dims=(None, 0, 1, 1))
    found = segment(given.params, state, x, y, reset=reset, mask=mask)
    own = [(given.params, *call[1:]) for call in calls]
    expected = mean_over_sequences(looped(given, own, reset=list(reset.T), mask=list(mask.T)))
    assert_close(found, expected._replace(out=expected.out.transpose(0, 1).contiguous()))


def test_in_dims_with_one_state_for_all(segments: Segments) -> None:
    """The state goes in without the axis; it comes out with it, since the sequences differ."""
    name = "elman_one_sequence"
    given, calls = problem(name), sequences(name, 5)
    x, y = (stacked([call[i] for call in calls]) for i in (2, 3))
    segment = segments(name, "eager", in_dims=(None, None, 0, 0))
    found = segment(given.params, given.state, x, y)
    own = [(given.params, given.state, *call[2:]) for call in calls]
    assert_close(found, mean_over_sequences(looped(given, own)))


def test_in_dims_with_torchs_zero_state(segments: Segments) -> None:
    name = "lstm_cell_unbatched"
    given, calls = problem(name), sequences(name, 5)
    x, y = (stacked([call[i] for call in calls]) for i in (2, 3))
    found = segments(name, "eager", in_dims=(None, 0, 0, 0))(given.params, None, x, y)
    zeros = tree_map(torch.zeros_like, given.state)
    own = [(given.params, zeros, *call[2:]) for call in calls]
    assert_close(found, mean_over_sequences(looped(given, own)))


def test_in_dims_never_makes_a_gradient_per_sequence() -> None:
    """No tensor of shape [N, *param], nor [K, *param], at any point of the segment."""
    n, k = 11, 13
    draw, given = Draw(0), problem("elman_one_sequence")
    segment = make_train_segment(given.step, per_step, backend="eager", in_dims=(None, 0, 0, 0))
    arguments = given.params, draw(n, H), draw(n, k, D), draw(n, k, 4)
    segment(*arguments)
    with Made() as made:
        segment(*arguments)
    assert len(made.shapes) > 3
    for parameter in given.params.values():
        if parameter.dim() == 2:
            for lead in ((n,), (k,), (n, k), (k, n)):
                assert (*lead, *parameter.shape) not in made.shapes
                assert (*lead, *parameter.shape[::-1]) not in made.shapes


@pytest.mark.parametrize("axis", [0, 1])
def test_in_dims_with_an_initial_state(axis: int) -> None:
    """It is that of one sequence, whatever axis of the state counts them."""
    given, calls = problem("elman_one_sequence"), sequences("elman_one_sequence", 5)
    state, x, y = (stacked([call[i] for call in calls], dim=axis) for i in (1, 2, 3))
    initial, reset = Draw(1)(H), torch.rand(N, 5) < 0.4
    options = {"backend": "eager", "in_dims": (None, axis, axis, axis)}
    segment = make_train_segment(given.step, given.loss, initial_state=initial, **options)
    found = segment(given.params, state, x, y, reset=reset.movedim(0, axis))
    own = [(given.params, *call[1:]) for call in calls]
    expected = looped(given, own, reset=list(reset), initial_state=[initial] * N)
    assert_close(found.grads, mean_over_sequences(expected).grads)
    wrong = make_train_segment(given.step, given.loss, initial_state=state, **options)
    words = rf"initial_state: has shape .*, but state has \[{H}\] without axis {axis}"
    with pytest.raises(ValueError, match=words):
        wrong(given.params, state, x, y)


@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("axis", slow_but([0, 2], [0, 1, 2]))
def test_flags_have_time_and_sequences_in_the_order_of_x(axis: int, time_dim: int) -> None:
    """Though they have fewer axes than x."""
    given, calls = problem("elman_one_sequence"), sequences("elman_one_sequence", 5)
    state = stacked([call[1] for call in calls])
    x, y = (stacked([call[i].movedim(0, time_dim) for call in calls], dim=axis) for i in (2, 3))
    reset, mask = torch.rand(N, 5) < 0.4, torch.rand(N, 5) < 0.7
    segment = make_train_segment(
        given.step, lambda out, y: (out - y).square().mean(1 - time_dim), backend="eager",
        in_dims=(None, 0, axis, axis), time_dim=time_dim,
    )  # fmt: skip
    order = (lambda flags: flags) if axis <= time_dim else (lambda flags: flags.T)
    found = segment(given.params, state, x, y, reset=order(reset), mask=order(mask))
    expected = make_train_segment(given.step, per_step, backend="eager", in_dims=(None, 0, 0, 0))(
        given.params, *(stacked([call[i] for call in calls]) for i in (1, 2, 3)),
        reset=reset, mask=mask,
    )  # fmt: skip
    assert_close(found.grads, expected.grads)
    assert_close(found.state, expected.state)
    flags = {"reset": order(reset), "mask": order(mask)}
    arguments = (given.params, state, x, y)
    assert compare_to_reference(segment, *arguments, **flags).agrees
    assert_close(random_truncation(segment, 1e15)(*arguments, **flags), found)
    data = (x, y, flags["reset"], flags["mask"])
    held_out = evaluate_stream(segment, given.params, state, data, k=2)
    assert_close(held_out.state, expected.state)
    assert held_out.steps == mask.sum()


@pytest.mark.parametrize("axis", [0, 1])
def test_in_dims_with_flags_for_all_sequences(axis: int, segments: Segments) -> None:
    given, calls = problem("elman_one_sequence"), sequences("elman_one_sequence", 5)
    state, x, y = (stacked([call[i] for call in calls], dim=axis) for i in (1, 2, 3))
    segment = segments("elman_one_sequence", "eager", in_dims=(None, axis, axis, axis))
    reset, mask = torch.rand(5) < 0.4, torch.rand(5) < 0.7
    found, expected = (
        segment(given.params, state, x, y, reset=r, mask=m)
        for r, m in (
            (reset, mask),
            [flags.expand(N, 5).movedim(0, axis) for flags in (reset, mask)],
        )
    )
    assert_close(found, expected)


@pytest.mark.parametrize("at", [0, -1, 2])
def test_in_dims_of_a_step_that_writes_into_a_row(at: int) -> None:
    """Under vmap, torch's gradient by what is written is too large."""
    draw = Draw(0)

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z, row = x_t @ params["w"] + h, torch.tanh(h @ params["w"])[at]
        z[at] = row * 2
        z[:, at] = x_t[:, 0]
        return z, torch.tanh(z)

    params = {"w": draw(H, H)}
    state, x, y = draw(N, 3, H), draw(N, 4, 3, H), draw(N, 4, 3, H)
    found = make_train_segment(step, mse, backend="eager", in_dims=(None, 0, 0, 0))
    each = [reference_segment(step, mse, params, state[i], x[i], y[i]).grads for i in range(N)]
    expected = torch.stack([grads["w"] for grads in each]).mean(0)
    torch.testing.assert_close(found(params, state, x, y).grads["w"], expected)
