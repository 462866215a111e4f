"""What a user relies on around the numbers: chaining, optimizers, plans, and what is theirs."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import ftbptt
from ftbptt import make_train_segment, tap
from ftbptt._garbage import without_garbage_collection
from ftbptt._locks import LockOverForks
from ftbptt.compiler.tracing.trace import TRACING
from ftbptt.contract.held_tensors import HOLDING

from ..cells import problem, slow_but
from ..cells.problems import Draw, Problem
from ..oracle import assert_close, check, reference

Segments = Callable[..., Any]


def make(given: Problem, **options: Any) -> Any:
    options = {"backend": "eager", "time_dim": given.time_dim or None} | options
    return ftbptt.make_train_segment(given.step, given.loss, **options)


def test_segments_chain(segments: Segments) -> None:
    """The state goes from segment to segment; a ragged tail needs no second trace."""
    segment, given = segments("stacked_lstm_cells", "eager"), problem("stacked_lstm_cells")
    params, state, x, y = given.data(17)
    expected_state, traced = state, []
    for first in (0, 7, 14):
        now = slice(first, first + 7)
        found = segment(params, state, x[now], y[now])
        piece = Problem(
            given.step, params, expected_state, lambda _, n=now: x[n], lambda _, n=now: y[n],
            given.loss,
        )  # fmt: skip
        expected = reference(piece, 7)
        assert_close(found, expected)
        state, expected_state = found.state, expected.state
        traced.append(segment.trace_count)
    assert traced[0] == traced[-1]


def test_gradients_can_be_written_to(segments: Segments) -> None:
    """An optimizer step in place, and the next segment sees the new parameters."""
    given = problem("elman")
    segment = segments("elman", "eager")
    params = {name: p.clone() for name, p in given.params.items()}
    optimizer = torch.optim.SGD([p.requires_grad_() for p in params.values()], lr=0.1)
    losses = []
    for _ in range(5):
        found = segment(params, given.state, given.x(7), given.y(7))
        for name, p in params.items():
            p.grad = found.grads[name]
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
        losses.append(found.loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05


def test_the_result_of_one_call_survives_the_next(segments: Segments) -> None:
    segment, given = segments("lstm_readout", "eager"), problem("lstm_readout")
    first = segment(*given.data(7))
    kept = tree_map(torch.clone, first)
    other = problem("lstm_readout", seed=1)
    segment(given.params, other.state, other.x(7), other.y(7))
    assert_close(first, kept, tolerance=0)


def test_a_step_without_randomness_draws_nothing(segments: Segments) -> None:
    before = torch.get_rng_state()
    check(segments("layer_norm_lstm", "eager"), problem("layer_norm_lstm"), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_shapes_and_dtypes_are_other_plans() -> None:
    given = problem("elman")
    segment = make(given)
    params, state, x, y = given.data(3)
    check(segment, given, 3)
    smaller = segment(params, state[:1], x[:, :1], y[:, :1])
    assert smaller.out.shape == (3, 1, 4)
    low = problem("elman", torch.float32)
    assert segment(*low.data(3)).loss.dtype == torch.float32
    assert segment.trace_count == 3
    check(segment, given, 5)
    assert segment.trace_count == 3


@pytest.mark.parametrize("name", ["lstm_readout", "gru_3_layers", "min_gru", "delay_line"])
def test_explain(name: str, segments: Segments) -> None:
    text = str(segments(name, "eager").explain(*problem(name).data(7)))
    assert "eager" in text
    assert "map" in text
    if name in ("lstm_readout", "gru_3_layers"):
        assert "scan" in text
        assert "GEMM" in text.upper()


def test_what_is_explained_and_measured_is_what_runs_now() -> None:
    """Also where nothing has called the segment since the step reads another number."""
    config = {"factor": 0.5, "squared": False}

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = config["factor"] * h + x_t * params["w"]
        return h * h if config["squared"] else h, h

    segment = make_train_segment(step, lambda out, y: out.sum(), backend="eager")
    x, state = torch.ones(9, 2, 3), torch.zeros(2, 3)
    given = {"w": torch.ones(3)}, state, x, None

    def decay() -> float:
        return ftbptt.gradient_horizon(segment, *given, max_lag=3).decay

    assert decay() == pytest.approx(0.5)
    config["factor"] = 0.25
    with pytest.warns(RuntimeWarning, match="compiled again: .*'factor'.* has changed"):
        assert decay() == pytest.approx(0.25)
    before = segment.explain(*given)
    config["squared"] = True
    with pytest.warns(RuntimeWarning, match="compiled again: .*'squared'.* has changed"):
        assert segment.explain(*given).saved != before.saved


def test_all_leaves_of_the_result_are_the_users_own(segments: Segments) -> None:
    """Writing into the result must not reach into what was given, nor into the plan."""
    segment, given = segments("exchanged_state", "eager"), problem("exchanged_state")
    expected = reference(given, 3)
    own = given.data(3)
    found = segment(*own)
    for leaf in tree_leaves((found.grads, found.state)):
        leaf.zero_()
    assert_close(segment(*own), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop .*unfold_backward:UserWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mapped", [False, True])
def test_outputs_are_the_users_own(mapped: bool, backend: str) -> None:
    """Each in its own memory, as the plain loop stacks them: whatever of the step they are."""

    def step(params: Any, x_t: Tensor, state: Any) -> Any:
        h, last = state
        new = torch.tanh(h * params["w"] + x_t)
        out = [x_t, x_t[..., 1:], params["w"], params["w"] * 2, h, new, new, new[..., 0], last]
        out += [new.T.split(1)[0], torch.zeros(2)]
        out += [new[:, :1].expand(2, 3), new.mean(1, keepdim=True).expand(2, 3)]
        out += [x_t[:, :1].expand(2, 3), new.unfold(1, 2, 1)]
        return [value.double() for value in out], (new, x_t)

    def loss(out: Any, y: Tensor) -> Tensor:
        return sum(((own - y[..., :1].mean()) ** 2).sum() for own in out)

    draw = Draw(0)
    params, state = {"w": draw(3)}, (draw(2, 3), draw(2, 3))
    given = Problem(step, params, state, draw.sequence(2, 3), draw.sequence(2, 3), loss)
    segment = make(given, backend=backend)
    for steps in (4, 1):
        arguments = given.data(steps)
        found = check(segment, given, steps)
        if mapped:
            arguments = (params, *tree_map(lambda leaf: leaf.unsqueeze(0), arguments[1:]))
            found = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))(*arguments)
        leaves = tree_leaves((found.grads, found.state, found.out))
        memory = [leaf.untyped_storage().data_ptr() for leaf in [*leaves, *tree_leaves(arguments)]]
        assert len(set(memory)) == len(memory)
        for leaf in leaves:
            leaf.add_(1)  # no two numbers of it lie in one place


@pytest.mark.parametrize("backend", ["eager", pytest.param("fused", marks=pytest.mark.slow)])
def test_a_loss_that_is_a_part_of_the_outputs_or_targets_is_the_users_own(backend: str) -> None:
    """As of a step that adds it up itself."""

    def step(params: Any, x_t: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + (x_t - params["w"]).square().sum()
        return total, total

    draw = Draw(0)
    given = {"w": draw(3)}, draw(), draw(4, 3), draw(4)
    own = make_train_segment(step, lambda out, y: out[-1], backend=backend)
    of_y = make_train_segment(step, lambda out, y: y[-1], backend=backend)
    for run in (own, own.evaluate, of_y.evaluate):
        found = run(*given)
        before = found.out.clone(), given[3].clone()
        found.loss.zero_()
        assert torch.equal(found.out, before[0])
        assert torch.equal(given[3], before[1])


@pytest.mark.parametrize("backend", ["eager", pytest.param("fused", marks=pytest.mark.slow)])
def test_gradients_of_taps_are_the_users_own(backend: str) -> None:
    """Also where two tensors have the same one, and where it is the same for many elements."""

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x_t = ftbptt.tap("x", x_t)
        a, b = ftbptt.tap("a", x_t * params["w"]), ftbptt.tap("b", h * params["w"])
        h = torch.tanh(a + b)
        return h + x_t.sum(1, keepdim=True), ftbptt.tap("h", h)

    draw = Draw(0)
    given = {"w": draw(3)}, draw(2, 3), draw(4, 2, 3), draw(4, 2, 3)
    segment = make_train_segment(
        step, lambda out, y: (out * y).sum(), backend=backend, taps=["x", "a", "b", "h"]
    )
    found = segment(*given)
    leaves = [leaf for tapped in found.taps.values() for leaf in (tapped.value, tapped.grad)]
    leaves += tree_leaves((found.grads, found.state, found.out))
    memory = [leaf.untyped_storage().data_ptr() for leaf in [*leaves, *tree_leaves(given)]]
    assert len(set(memory)) == len(memory)
    for leaf in leaves:
        leaf.add_(1)


@pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning")
def test_torch_compile_around_the_callers_code() -> None:
    """The segment is compiled by itself; the rest is Dynamo's."""
    given = problem("gru_cell")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    arguments = given.data(4)
    expected = segment(*arguments)

    @torch.compile(backend="eager")
    def update(params: Any, *rest: Any) -> Any:
        grads, state, loss, _ = segment(params, *rest)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, state, loss * 2

    for _ in range(2):
        params, state, loss = update(*arguments)
        assert_close((state, loss), (expected.state, expected.loss * 2))
        for name, p in arguments[0].items():
            assert_close(params[name], p - 0.1 * expected.grads[name])


def test_importing_the_package_does_not_start_torchs_compiler() -> None:
    """It takes a second, and fails where no folder can be written."""
    code = "import sys, ftbptt; print({'torch._dynamo', 'torch._inductor'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def step_to_pickle(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x_t * params["w"] + h)
    return h, h


def tapped_step_to_pickle(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return step_to_pickle(params, x_t, tap("h", h))


def loss_to_pickle(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def test_a_segment_that_was_called_can_be_pickled() -> None:
    """As a process that is started needs it; what is compiled stays behind."""
    segment = make_train_segment(step_to_pickle, loss_to_pickle, backend="eager")
    arguments = {"w": torch.randn(3)}, torch.zeros(2, 3), torch.randn(4, 2, 3), torch.zeros(4, 2, 3)
    expected = segment(*arguments)
    assert_close(pickle.loads(pickle.dumps(segment))(*arguments), expected)
    assert_close(copy.deepcopy(segment)(*arguments), expected)


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRU])
def test_a_segment_of_a_cell_of_torch_can_be_pickled(kind: Any) -> None:
    cell = kind(3, 3)
    segment = make_train_segment(cell, loss_to_pickle, backend="eager")
    arguments = dict(cell.named_parameters()), None, torch.randn(4, 2, 3), torch.zeros(4, 2, 3)
    assert_close(pickle.loads(pickle.dumps(segment))(*arguments), segment(*arguments))


@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_segment_with_taps_can_be_pickled(kind: str) -> None:
    cell = torch.nn.RNNCell(3, 3)
    step, params = {
        "function": (tapped_step_to_pickle, {"w": torch.randn(3)}),
        "module": (cell, dict(cell.named_parameters())),
    }[kind]
    segment = make_train_segment(step, loss_to_pickle, backend="eager", taps=["h"])
    arguments = params, torch.zeros(2, 3), torch.randn(4, 2, 3), torch.zeros(4, 2, 3)
    expected = segment(*arguments)
    assert expected.taps["h"].grad.any()
    assert_close(pickle.loads(pickle.dumps(segment))(*arguments), expected)


def test_under_anomaly_detection(segments: Segments) -> None:
    given = problem("lstm_readout")
    segment = make(given)
    with torch.autograd.set_detect_anomaly(True):
        check(segment, given, 3)


@pytest.mark.parametrize("backend", slow_but(["fused"], ["fused", "compile"]))
def test_a_first_call_while_operations_are_counted(backend: str) -> None:
    """What is traced and compiled once is no part of what a segment does at every call."""
    given = problem("lstm_readout")
    segment = make(given, backend=backend)
    with FlopCounterMode(display=False) as counted:
        found = segment(*given.data(3))
        first = counted.get_total_flops()
        segment(*given.data(3))
    assert counted.get_total_flops() == 2 * first
    assert_close(found, reference(given, 3))


def test_a_segment_that_is_dropped_is_freed_at_once() -> None:
    """Not when garbage is next collected: on a GPU much memory hangs on it."""
    given = problem("gru_cell")
    make(given)(*given.data(3))  # the first that is compiled: of a process, there is more to do
    gc.disable()
    try:
        segment = make(given)
        segment(*given.data(3))
        kept = weakref.ref(segment._executables)
        (executable,) = map(weakref.ref, segment._executables._by_key.values())
        del segment
        assert kept() is executable() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_during_a_first_call_searches_for_garbage() -> None:
    found: list[int] = []

    def fork() -> None:
        if (process := os.fork()) == 0:
            os._exit(10 + gc.isenabled())
        found.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))

    with without_garbage_collection():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert found == [11]


@pytest.mark.parametrize("lock", [HOLDING, TRACING])
@pytest.mark.parametrize("held_by", ["nobody", "the thread that forks", "another thread"])
def test_a_process_that_is_forked_while_a_lock_is_held(lock: LockOverForks, held_by: str) -> None:
    """By a thread that runs a step, or traces one, which does not exist there."""
    forked, is_held = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            forked.wait(20)

    def is_free() -> bool:
        """For another thread."""
        taken = threading.Event()

        def take() -> None:
            with lock:
                taken.set()

        threading.Thread(target=take, daemon=True).start()
        return taken.wait(10)

    thread = threading.Thread(target=hold)
    if held_by == "another thread":
        thread.start()
        assert is_held.wait(20)
    with lock if held_by == "the thread that forks" else nullcontext():
        process = os.fork()
    if process == 0:
        signal.alarm(10)  # ends it
        with lock:
            pass
        os._exit(10 + is_free())
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 11


@pytest.mark.parametrize("is_on", [True, False])
def test_no_search_for_garbage_in_a_first_call(is_on: bool) -> None:
    """Afterwards it is as the caller had it, also where the step fails."""

    def of_three(params: Any, x_t: Tensor, h: Tensor) -> Any:
        assert not gc.isenabled()
        if x_t.shape[-1] != 3:
            raise ValueError("three features")
        return h, torch.tanh(h + x_t * params["w"])

    segment = make_train_segment(of_three, lambda out, y: out.mean(), backend="eager")
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        for features in (3, 2):
            x, state = torch.ones(4, 2, features), torch.zeros(2, features)
            with nullcontext() if features == 3 else pytest.raises(ValueError, match="features"):
                segment({"w": torch.ones(1)}, state, x, None)
            assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()
