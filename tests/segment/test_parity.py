"""Every cell of the table against the oracle: K, backend, dtype, reset, mask, options.

A TrainSegment is made once a session for each question (`segments`), so these tests also count:
one trace for all K, and nothing compiled for a second K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ftbptt import make_train_segment, reference_segment

from ..cells import CELLS, REPRESENTATIVE, WITH_ROWS, problem, slow_but
from ..cells.problems import B, H, Problem
from ..kernels.scans import random
from ..oracle import assert_close, assert_form, check, reference

STEPS = (7, 1, 2, 3, 63)  # 7 first: what is compiled for it must do for the others
Segments = Callable[..., Any]

# Compiling takes many seconds: the others are marked slow.
COMPILED = ["lstm_readout", "nested_everything"]


def flags(*shape: int, seed: int = 0, true: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < true


def where_time_is(given: Problem, rows: Tensor) -> Tensor:
    """``[K, B]`` laid out as the problem's x."""
    return rows.movedim(0, given.time_dim) if rows.dim() == 2 else rows


def masks_its_loss(given: Problem) -> bool:
    return given.loss(reference(given, 2).out, given.y(2)).dim() > 0


MASKABLE = [name for name in CELLS if masks_its_loss(problem(name))]
MASKABLE_ROWS = [
    name
    for name in MASKABLE
    if name in WITH_ROWS
    and problem(name).loss(reference(problem(name), 2).out, problem(name).y(2)).dim() == 2
]


def check_all_steps(segment: Any, name: str) -> None:
    given = problem(name)
    first, *others = STEPS
    before = segment.trace_count  # by other tests, with reset and mask
    check(segment, given, first)
    traced, compiled = segment.trace_count, segment.compile_count
    for steps in others:
        check(segment, given, steps)
    assert traced <= before + 1, "one signature, one trace"
    assert segment.trace_count == traced, "another K was traced anew"
    assert segment.compile_count == compiled, "another K was compiled anew"


@pytest.mark.parametrize("name", CELLS)
def test_eager(name: str, segments: Segments) -> None:
    check_all_steps(segments(name, "eager"), name)


@pytest.mark.parametrize("name", slow_but(COMPILED, CELLS))
def test_compile(name: str, segments: Segments) -> None:
    segment = segments(name, "compile")
    check_all_steps(segment, name)
    assert segment.compile_count > 0


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_chunks_and_one_step_first(name: str, in_chunks: None) -> None:
    """A long segment in chunks of 16 steps; the plan made by a call of one step."""
    given = problem(name)
    segment = make(given)
    for steps in (1, 17, 63):
        check(segment, given, steps)
    assert segment.trace_count == 1


def test_chunks_of_large_steps() -> None:
    """What lives only inside a chunk stays in a cache, however few steps that is."""
    cell, rows = nn.LSTMCell(8, 256), 1024
    segment = make_train_segment(cell, lambda out, y: (out - y).square().mean())
    state = (torch.zeros(rows, 256),) * 2
    data = torch.zeros(32, rows, 8), torch.zeros(32, rows, 256)
    chunk = segment.explain(dict(cell.named_parameters()), state, *data).chunk
    gates = rows * 4 * 256 * 4
    assert chunk is not None
    assert 1 < chunk < (30 << 20) // gates  # beside which there is more


# -- reset and mask -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_reset_of_all_rows(name: str, steps: int, segments: Segments) -> None:
    check(segments(name, "eager"), problem(name), steps, reset=flags(steps))
    check(segments(name, "eager"), problem(name), steps, reset=torch.ones(steps).bool())


@pytest.mark.parametrize("name", [name for name in WITH_ROWS if name not in MASKABLE_ROWS])
def test_reset_by_row(name: str, segments: Segments) -> None:
    given = problem(name)
    reset = where_time_is(given, flags(7, given.rows))
    check(segments(name, "eager"), given, 7, reset=reset)


@pytest.mark.parametrize("name", slow_but({*REPRESENTATIVE, "gru_batch_first"}, MASKABLE_ROWS))
def test_mask_and_reset_by_row(name: str, segments: Segments) -> None:
    given = problem(name)
    for steps in (7, 1):
        reset = where_time_is(given, flags(steps, given.rows, seed=1))
        mask = where_time_is(given, flags(steps, given.rows, seed=2, true=0.7))
        check(segments(name, "eager"), given, steps, reset=reset, mask=mask)


@pytest.mark.parametrize("name", [name for name in MASKABLE if name not in MASKABLE_ROWS])
def test_mask_of_steps(name: str, segments: Segments) -> None:
    for mask in (flags(7, true=0.6), flags(1, true=0.0), torch.arange(7) < 4):
        check(segments(name, "eager"), problem(name), len(mask), mask=mask)


@pytest.mark.parametrize("name", ["gru_cell", "lstm", "gru_batch_first", "counter_and_flag"])
def test_mask_of_steps_beside_reset_of_rows(name: str, segments: Segments) -> None:
    given = problem(name)
    reset = where_time_is(given, flags(7, given.rows, seed=1))
    mask = where_time_is(given, flags(7, given.rows, seed=2, true=0.7))
    check(segments(name, "eager"), given, 7, reset=reset, mask=flags(7))
    check(segments(name, "eager"), given, 7, reset=flags(7), mask=mask)
    check(segments(name, "eager"), given, 7, mask=flags(7))


@pytest.mark.parametrize(
    "name", slow_but(["gru_batch_first"], ["lstm_cell", "gru_batch_first", "counter_and_flag"])
)
def test_reset_and_mask_compiled(name: str, segments: Segments) -> None:
    segment, given = segments(name, "compile"), problem(name)
    for steps in STEPS:
        reset = where_time_is(given, flags(steps, given.rows, seed=1))
        mask = where_time_is(given, flags(steps, given.rows, seed=2, true=0.7))
        traced, compiled = segment.trace_count, segment.compile_count
        check(segment, given, steps, reset=reset, mask=mask)
        if steps != STEPS[0]:
            assert (segment.trace_count, segment.compile_count) == (traced, compiled)


def test_what_is_masked_does_not_matter(segments: Segments) -> None:
    segment, given = segments("lstm_cell", "eager"), problem("lstm_cell")
    params, state, x, y = given.data(7)
    mask = flags(7, given.rows, true=0.6)
    first = segment(params, state, x, y, mask=mask)
    other = torch.where(mask.unsqueeze(-1), x, 100 * torch.ones_like(x))
    second = segment(params, state, other, y * mask.unsqueeze(-1), mask=mask)
    assert_close(tuple(second)[:3], tuple(first)[:3])


def start_from_params(params: Any) -> tuple[Tensor, Tensor]:
    """An initial state that is learned: the tanh of a readout's weights."""
    h = torch.tanh(params["gates_x.bias"][:H]).expand(B, H)
    return h, 0.5 * h * params["readout.bias"].sum()


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "compile"]))
def test_learned_initial_state(backend: str, segments: Segments) -> None:
    given = problem("lstm_readout")
    segment = segments("lstm_readout", backend, initial_state=start_from_params)
    for steps in (7, 1):
        reset = flags(steps, given.rows, true=0.5)
        check(segment, given, steps, reset=reset, initial_state=start_from_params)
    # state=None starts there, with its gradient, as a reset of the first step does.
    params, _, x, y = given.data(7)
    found = segment(params, None, x, y)
    first = torch.arange(7) == 0
    assert_close(found, reference(given, 7, reset=first, initial_state=start_from_params))


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "compile"]))
def test_state_and_parameters_of_no_elements(backend: str) -> None:
    """They are no part of a loop, of which Inductor could not make one."""

    def step(params: Any, x_t: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h, none = state
        h = torch.tanh(x_t + h + torch.cat([h, none], -1) @ params["w"] + none @ params["of none"])
        return h, (h, h @ params["to none"])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean()

    params = {"w": random(4, 4), "of none": random(0, 4), "to none": random(4, 0)}
    given = params, (random(3, 4), random(3, 0)), random(5, 3, 4), random(5, 3, 4, seed=1)
    segment = make_train_segment(step, loss, backend=backend)
    reset = flags(5, 3)
    expected = reference_segment(step, loss, *given, reset=reset)
    assert_close(tuple(segment(*given, reset=reset)), tuple(expected))


def test_initial_state_that_closes_over_tensors(segments: Segments) -> None:
    given, own = problem("lstm_readout"), torch.randn(7, dtype=torch.float64)

    def start(params: Any) -> tuple[Tensor, Tensor]:
        return own.expand(3, 7), 0.5 * own * params["gates_x.bias"][:7].expand(3, 7)

    segment = segments("lstm_readout", "eager", initial_state=start)
    for flag in (flags(7, given.rows, true=0.5), torch.arange(7) == 3):
        check(segment, given, 7, reset=flag, initial_state=start)


def test_given_initial_state(segments: Segments) -> None:
    given = problem("nested_everything")
    start = problem("nested_everything", seed=1).state
    segment = make(given, initial_state=start)
    check(segment, given, 7, reset=flags(7, given.rows), initial_state=start)
    params, _, x, y = given.data(7)
    expected = reference(given, 7, reset=torch.arange(7) == 0, initial_state=start)
    assert_close(segment(params, None, x, y), expected)


@pytest.mark.parametrize(
    "name",
    ["rnn_cell_tanh", "gru_cell", "lstm_cell", "lstm_cell_unbatched", "rnn_tanh", "gru_unbatched",
     "gru_batch_first", "lstm_projected", "lstm_batch_first", "lstm_unbatched"],
)  # fmt: skip
def test_torchs_own_state_is_zero_if_none(name: str, segments: Segments) -> None:
    given = problem(name)
    params, state, x, y = given.data(3)
    zeros = tree_map(torch.zeros_like, state)
    found = segments(name, "eager")(params, None, x, y)
    assert_close(found, segments(name, "eager")(params, zeros, x, y))


# -- options ------------------------------------------------------------------------------------


def make(given: Problem, **options: Any) -> Any:
    options = {"backend": "eager", "time_dim": given.time_dim or None} | options
    return make_train_segment(given.step, given.loss, **options)


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_recompute(name: str, segments: Segments) -> None:
    segment = segments(name, "eager", recompute=True)
    for steps in (7, 1):
        check(segment, problem(name), steps)
    if name in REPRESENTATIVE and name in MASKABLE_ROWS:
        given = problem(name)
        reset = where_time_is(given, flags(7, given.rows))
        check(segment, given, 7, reset=reset, mask=~reset)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_readout", "gru_3_layers"])
def test_recompute_compiled(name: str, segments: Segments) -> None:
    for steps in STEPS:
        check(segments(name, "compile", recompute=True), problem(name), steps)


@pytest.mark.parametrize("name", ["elman", "gru_cell", "lstm_no_bias", "slot_attention"])
def test_time_dim(name: str) -> None:
    given = problem(name)
    params, state, x, y = given.data(7)
    segment = make(given, time_dim=1)
    moved = segment(params, state, x.transpose(0, 1), y.transpose(0, 1))
    expected = reference(given, 7)
    assert_close(moved._replace(out=moved.out.transpose(0, 1)), expected)


def test_time_dim_with_reset_and_mask() -> None:
    given = problem("gru_cell")
    params, state, x, y = given.data(7)
    reset, mask = flags(7, 3, seed=1), flags(7, 3, seed=2, true=0.7)
    segment = make(given, time_dim=1)
    found = segment(params, state, x.transpose(0, 1), y.transpose(0, 1), reset=reset.T, mask=mask.T)
    expected = reference(given, 7, reset=reset, mask=mask)
    assert_close(found._replace(out=found.out.transpose(0, 1)), expected)


@pytest.mark.parametrize("name", CELLS)
def test_evaluate(name: str, segments: Segments) -> None:
    segment, given = segments(name, "eager"), problem(name)
    found = segment.evaluate(*given.data(7))
    assert found.grads is None
    assert_form(found, given.params, given.state)
    expected = reference(given, 7)
    assert_close(tuple(found)[1:], tuple(expected)[1:])


def test_evaluate_compiled_and_without_y(segments: Segments) -> None:
    segment, given = segments("lstm_readout", "compile"), problem("lstm_readout")
    for steps in (7, 3):
        found = segment.evaluate(*given.data(steps))
        assert_close(tuple(found)[1:], tuple(reference(given, steps))[1:])
    plain = make(given)
    params, state, x, _ = given.data(7)
    free = lambda out, y: out.square().mean()  # noqa: E731
    free_segment = make(Problem(given.step, params, state, given.x, given.y, free))
    assert free_segment(params, state, x, None).loss == free(plain(*given.data(7)).out, None)
