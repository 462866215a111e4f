"""The fused backend: every cell of the table through its kernels, and what does not become one.

With the fixture ``kernels`` all around the kernels runs operation by operation, on real tensors,
and what a kernel does not write is NaN. A few tests at the end compile whole programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import Explanation, make_train_segment
from ftbptt.backends import fused
from ftbptt.kernels.cpu import build

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import assert_close, assert_form, check, reference
from ..segment.test_parity import MASKABLE_ROWS, STEPS, check_all_steps, flags, start_from_params
from ..segment.test_parity import where_time_is as over_time
from .scans import KERNEL

Segments = Callable[..., Any]

# (phase, the operation that stopped it) of each scan block that no kernel is made of.
NOT_FUSED = {
    "conv_lstm": [("forward", "convolution.default"), ("reverse", "input_gradient")],
    "competing_units": [("forward", "cumsum.default"), ("reverse", "flip.default")],
}
# Building takes seconds: the others are marked slow. Each of these is of another kind.
QUICK = {
    "lstm_readout", "layer_norm_lstm", "cho_gru", "embedding_tied", "counter_and_flag",
    "lru_complex", "delay_line", "elman_one_sequence", "schedule_scalar", "fast_weights",
}  # fmt: skip


def make(given: Problem, **options: Any) -> Any:
    options = {"backend": "fused", "time_dim": given.time_dim or None} | options
    return make_train_segment(given.step, given.loss, **options)


def not_fused(found: Explanation) -> list[tuple[str, str]]:
    reasons = [(b.phase, b.runs.partition("no kernel: ")[2]) for b in found.blocks]
    return [(phase, reason.split(" (")[0]) for phase, reason in reasons if reason]


@pytest.mark.parametrize("name", CELLS)
def test_what_is_fused(name: str) -> None:
    given = problem(name)
    found = make(given).explain(*given.data(3))
    assert not_fused(found) == NOT_FUSED.get(name, [])
    for block in found.blocks:
        if "scan" in block.kind:
            assert (KERNEL in block.runs) != ("no kernel" in block.runs)
            assert block.runs.startswith("fused: ")


@pytest.mark.parametrize("name", slow_but({*QUICK, *NOT_FUSED}, CELLS))
def test_kernels(name: str, kernels: None) -> None:
    check_all_steps(make(problem(name)), name)


@pytest.mark.parametrize("name", slow_but(["gru_batch_first", "counter_and_flag"], MASKABLE_ROWS))
def test_mask_and_reset_by_row(name: str, kernels: None) -> None:
    given, segment = problem(name), make(problem(name))
    for steps in (7, 1):
        reset = over_time(given, flags(steps, given.rows, seed=1))
        mask = over_time(given, flags(steps, given.rows, seed=2, true=0.7))
        check(segment, given, steps, reset=reset, mask=mask)


@pytest.mark.parametrize("name", slow_but(["lstm_readout"], REPRESENTATIVE))
def test_reset_of_all_rows(name: str, kernels: None) -> None:
    given, segment = problem(name), make(problem(name))
    for steps in (7, 1):
        check(segment, given, steps, reset=flags(steps))
        check(segment, given, steps, reset=torch.ones(steps).bool())


def test_mask_of_steps(kernels: None) -> None:
    given, segment = problem("gru_cell"), make(problem("gru_cell"))
    for mask in (flags(7, true=0.6), flags(1, true=0.0), torch.arange(7) < 4):
        check(segment, given, len(mask), mask=mask)


def test_learned_initial_state(kernels: None) -> None:
    given = problem("lstm_readout")
    segment = make(given, initial_state=start_from_params)
    for steps in (7, 1):
        reset = flags(steps, given.rows, true=0.5)
        check(segment, given, steps, reset=reset, initial_state=start_from_params)
    params, _, x, y = given.data(7)
    first = torch.arange(7) == 0
    expected = reference(given, 7, reset=first, initial_state=start_from_params)
    assert_close(segment(params, None, x, y), expected)


def test_a_norm_of_everything(kernels: None) -> None:
    """Such an operation names no axes."""

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a = x_t + h @ params["w"]
        h = torch.tanh(a / (1 + a.norm()))
        return h, h

    draw = Draw(0)
    x, y = draw.sequence(B, H), draw.sequence(B, H)
    given = Problem(step, {"w": draw(H, H)}, draw(B, H), x, y, mse)
    segment = make(given)
    assert not_fused(segment.explain(*given.data(3))) == []
    check(segment, given, 4)


@pytest.mark.parametrize("name", ["lstm_readout", "coupled_stack", "min_gru"])
def test_recompute(name: str, kernels: None) -> None:
    segment = make(problem(name), recompute=True)
    for steps in (7, 1):
        check(segment, problem(name), steps)


@pytest.mark.parametrize("name", ["lstm_readout", "counter_and_flag"])
def test_evaluate(name: str, kernels: None) -> None:
    given = problem(name)
    found = make(given).evaluate(*given.data(7))
    assert found.grads is None
    assert_form(found, given.params, given.state)
    assert_close(tuple(found)[1:], tuple(reference(given, 7))[1:])


@pytest.mark.parametrize("name", ["lstm_readout", "nested_everything"])
def test_chunks_and_one_step_first(name: str, kernels: None, in_chunks: None) -> None:
    given, segment = problem(name), make(problem(name))
    for steps in (1, 17, 63):
        check(segment, given, steps)
    assert segment.trace_count == 1


@pytest.mark.parametrize("name", ["elman_one_sequence", "captured_tensor"])
def test_one_sequence_over_a_batch(name: str, kernels: None) -> None:
    """``in_dims``: a step for one sequence, on several; the mean over them."""
    given = problem(name)
    params, state, x, y = given.data(5)
    many = [torch.stack([leaf, 0.5 * leaf, -leaf]) for leaf in (state, x, y)]
    found = make(given, in_dims=(None, 0, 0, 0))(params, *many)
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=(None, 0, 0, 0))
    assert_close(found, segment(params, *many))


def test_kernels_of_both_loops_are_begun_before_the_first_is_waited_for(
    kernels: None, in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    begin, run = build.start_ahead, fused.load

    def start_ahead(source: str) -> None:
        events.append("begun")
        begin(source)

    def load(library: str) -> Any:
        events.append("run")
        return run(library)

    monkeypatch.setattr(fused, "start_ahead", start_ahead)
    monkeypatch.setattr(fused, "load", load)
    given = problem("lstm_readout")
    segment = make(given)
    segment.evaluate(*given.data(3))
    assert events == ["begun", "run"]
    events.clear()
    for _ in range(2):
        segment(*given.data(3))
    assert events == ["begun", "begun", "run", "run", "run", "run"]


# -- whole programs, compiled -------------------------------------------------------------------


WHOLE = [
    "lstm_readout", "layer_norm_lstm", "embedding_tied", "nested_everything", "counter_and_flag",
    "delay_line", "gru_3_layers", "delta_rule",
]  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["lstm_readout"], WHOLE))
def test_compiled(name: str, segments: Segments) -> None:
    """Nothing is traced or compiled for another K (asserted in there)."""
    check_all_steps(segments(name, "fused"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_cell", "counter_and_flag"])
def test_reset_and_mask_compiled(name: str, segments: Segments) -> None:
    segment, given = segments(name, "fused"), problem(name)
    for steps in STEPS:
        reset = over_time(given, flags(steps, given.rows, seed=1))
        mask = over_time(given, flags(steps, given.rows, seed=2, true=0.7))
        traced, compiled = segment.trace_count, segment.compile_count
        check(segment, given, steps, reset=reset, mask=mask)
        if steps != STEPS[0]:
            assert (segment.trace_count, segment.compile_count) == (traced, compiled)


@pytest.mark.slow
def test_recompute_and_evaluate_compiled(segments: Segments) -> None:
    given = problem("lstm_readout")
    segment = segments("lstm_readout", "fused", recompute=True)
    for steps in (7, 3):
        check(segment, given, steps)
        found = segment.evaluate(*given.data(steps))
        assert_close(tuple(found)[1:], tuple(reference(given, steps))[1:])


@pytest.mark.slow
def test_learned_initial_state_compiled(segments: Segments) -> None:
    given = problem("lstm_readout")
    segment = segments("lstm_readout", "fused", initial_state=start_from_params)
    for steps in (7, 1):
        reset = flags(steps, given.rows, true=0.5)
        check(segment, given, steps, reset=reset, initial_state=start_from_params)
