"""What goes around a CUDA graph, with a stand-in for the graph that runs on any machine.

The stand-in does what a replay does: it works on the tensors that it was captured with, reads no
others, and leaves its results where the first ones were.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ftbptt import make_train_segment, reference_segment
from ftbptt.backends import CUDAGRAPH, EAGER, FUSED, fallback
from ftbptt.contract.output import EarlyGradients
from ftbptt.segment import capture, execute
from ftbptt.segment.call import settings_of
from ftbptt.training import train_stream

from ..cells import REPRESENTATIVE, problem, slow_but
from ..cells.problems import Problem
from ..kernels.scans import random
from ..oracle import assert_close, check
from .test_parity import flags


class Captures:
    """How often something was captured, and replayed."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def capture(
        self,
        warm_up: Callable[[], None],
        function: Callable[[], list[Tensor]],
        device: torch.device,
        separate_memory: bool,
    ) -> tuple[list[Tensor], Callable[[], None]]:
        warm_up()
        with torch.random.fork_rng([]):  # nothing is drawn until a replay
            outputs = [tensor.clone() for tensor in function()]
        self.made += 1
        self.separate_memory = separate_memory

        def replay() -> None:
            self.replayed += 1
            for output, tensor in zip(outputs, function(), strict=True):
                output.copy_(tensor)

        return outputs, replay


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, kernels: None) -> Captures:
    """Graphs of segments that run operation by operation, with the kernels of the CPU."""
    found = Captures()
    monkeypatch.setattr(capture, "_CAPTURED_ON", {"cpu"})
    monkeypatch.setattr(capture, "_capture", found.capture)
    return found


def make(given: Problem, **options: Any) -> Any:
    options = {"backend": "fused", "time_dim": given.time_dim or None} | options
    return make_train_segment(given.step, given.loss, **options)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["lstm_readout"],
        ["lstm_readout", "nested_everything", "counter_and_flag"],
    ),
)
def test_captured_when_a_length_comes_again(name: str, captures: Captures) -> None:
    given = problem(name)
    segment = make(given)
    counts = []
    for steps in (7, 7, 7, 3, 7, 1, 3):
        check(segment, given, steps)
        counts.append((captures.made, captures.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 2), (1, 3), (1, 3), (2, 4)]
    assert segment.trace_count == 1


def test_it_reads_what_it_is_given_and_keeps_nothing(captures: Captures) -> None:
    given = problem("lstm_readout")
    segment = make(given)
    params, state, x, y = given.data(7)
    for _ in range(3):
        kept = segment(params, state, x, y)
    before = tree_map(Tensor.clone, tuple(kept))
    for other in (problem("lstm_readout", seed=1), problem("lstm_readout", seed=2)):
        check(segment, other, 7)
    x = x.clone()
    first = segment(params, state, x, y)
    x.mul_(-0.5)  # in place, as from a buffer that is filled again
    assert_close(segment(params, state, x, y), make(given, backend="eager")(params, state, x, y))
    assert_close(tuple(first), before)
    assert_close(tuple(kept), before)
    own = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tuple(kept))}
    assert not own & {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tuple(first))}


def test_output_that_may_be_overwritten(captures: Captures) -> None:
    """Also when it is the next call's input."""
    given = problem("lstm_readout")
    segment = make(given, reuse_output=True)
    params, state, x, y = given.data(7)
    eager = make(given, backend="eager")
    for i in range(5):
        wanted = eager(params, state, x, y)
        found = segment(params, state, x, y)
        assert_close(tuple(found), tuple(wanted))
        state = found.state if i % 2 else tree_map(Tensor.clone, wanted.state)
    assert captures.separate_memory
    again = segment(params, state, x, y)
    assert tree_leaves(again.out)[0].data_ptr() == tree_leaves(found.out)[0].data_ptr()


@pytest.mark.slow
def test_resets_that_change(captures: Captures) -> None:
    given = problem("lstm_readout")
    segment = make(given, recompute=True)
    for seed in range(4):
        check(segment, given, 7, reset=flags(7, given.rows, seed=seed))
    assert captures.replayed == 3


def test_noise_does_not_depend_on_when_it_is_captured(captures: Captures) -> None:
    """As in a run that is resumed, which begins without a graph."""
    given = problem("lstm_readout")

    def step(params: Any, x_t: Tensor, state: Any) -> Any:
        return functional_call(given.step, params, (torch.dropout(x_t, 0.5, True), state))

    def segment() -> Any:
        return make_train_segment(step, given.loss, backend="fused")

    undisturbed, states, found = segment(), [], []
    for _ in range(3):
        states.append(torch.get_rng_state())
        found.append(undisturbed(*given.data(7)))
    assert (captures.made, captures.replayed) == (1, 2)
    assert not torch.equal(found[1].loss, found[2].loss)
    for state, wanted in zip(states, found, strict=True):
        torch.set_rng_state(state)
        assert_close(tuple(segment()(*given.data(7))), tuple(wanted))


def test_two_segments_in_turns(captures: Captures) -> None:
    made = [(problem(name), make(problem(name))) for name in ("lstm_readout", "embedding_tied")]
    for steps in (7, 7, 3, 7, 3):
        for given, segment in made:
            check(segment, given, steps)
    assert captures.made == 4


def test_gradients_and_evaluation_have_graphs_of_their_own(captures: Captures) -> None:
    given = problem("lstm_readout")
    segment = make(given)
    for _ in range(3):
        found, evaluated = segment(*given.data(7)), segment.evaluate(*given.data(7))
        assert_close(tuple(evaluated)[1:], tuple(found)[1:])
    assert captures.made == 2


def test_few_graphs_are_kept(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftbptt.segment.capture._MOST_GRAPHS", 2)
    given = problem("lstm_readout")
    segment = make(given)
    for steps in (2, 3, 4):
        check(segment, given, steps)
    with pytest.warns(RuntimeWarning, match="more than 2 CUDA graphs.*now 2.*fewer lengths"):
        check(segment, given, 2)
    for steps in (3, 4):  # each is forgotten before it comes again, which is said once
        check(segment, given, steps)
    assert captures.made == 0
    for steps in (4, 4):
        check(segment, given, steps)
    assert captures.made == 1


@pytest.mark.parametrize("how", ["evicted", "failed", "segment dropped"])
def test_inputs_outlive_the_last_replay(
    how: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be on another stream, and not over when the graph is dropped."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("no")

    kept: list[Tensor] = []
    monkeypatch.setattr(capture, "_keep_until_replayed", kept.extend)
    given = problem("lstm_readout")
    segment = make(given)
    for _ in range(2):
        segment(*given.data(3))
    assert captures.made == 1
    assert not kept
    if how == "evicted":
        monkeypatch.setattr(capture, "_MOST_GRAPHS", 1)
        segment(*given.data(2))
    elif how == "failed":
        monkeypatch.setattr(capture, "_capture", refuse)
        segment(*given.data(2))
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            segment(*given.data(2))
    else:
        del segment
    gc.collect()
    assert kept


def test_what_a_failed_warm_up_reads_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that ran out of memory: kernels on the capture's stream still read its inputs."""
    waits: list[tuple[Any, Any]] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            waits.append((self, other))

    def fail() -> None:
        raise torch.OutOfMemoryError

    callers, own = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: callers)
    monkeypatch.setattr(capture, "_memory_pool", lambda device: (None, own, None))
    with pytest.raises(torch.OutOfMemoryError):
        capture._capture(fail, list, torch.device("cuda", 0), False)
    assert waits == [(own, callers), (callers, own)]


@contextmanager
def as_set(change: Callable[[Any], None], before: Any, now: Any) -> Iterator[None]:
    change(now)
    try:
        yield
    finally:
        change(before)


SETTINGS: dict[str, tuple[Callable[[Any], None], Any, Any]] = {
    "float32": (torch.set_float32_matmul_precision, "highest", "high"),
    "sums of bfloat16": (
        partial(setattr, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        True, False,
    ),
    "convolutions": (partial(setattr, torch.backends.cudnn, "allow_tf32"), True, False),
    "deterministic convolutions": (
        partial(setattr, torch.backends.cudnn, "deterministic"), False, True,
    ),
    "deterministic": (torch.use_deterministic_algorithms, False, True),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_precision_is_part_of_a_graph(setting: str, captures: Captures) -> None:
    given = problem("lstm_readout", torch.float32)
    segment = make(given)
    for _ in range(2):
        segment(*given.data(7))
    with as_set(*SETTINGS[setting]):
        for _ in range(2):
            segment(*given.data(7))
    assert captures.made == 2


def test_precision_is_part_of_a_plan_on_a_gpu() -> None:
    """By which the tiles of kernels are chosen."""
    recipe = make(problem("lstm_readout", torch.float32)).recipe
    before = {device: settings_of(recipe, device) for device in ("cpu", "cuda")}
    with as_set(*SETTINGS["float32"]):
        assert settings_of(recipe, "cpu") == before["cpu"]
        assert settings_of(recipe, "cuda") != before["cuda"]
    assert settings_of(recipe, "cuda") == before["cuda"]


def test_what_a_step_closes_over_is_read_where_it_is(captures: Captures) -> None:
    weight, x, h = torch.eye(3).double(), random(4, 2, 3), random(2, 3)

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t * params["w"] + h @ weight)
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean()

    segment = make_train_segment(step, loss, backend="fused")
    given = {"w": random(3)}, h, x, x

    def check_twice() -> None:
        for _ in range(2):
            assert_close(tuple(segment(*given)), tuple(reference_segment(step, loss, *given)))

    check_twice()
    weight.data = random(3, 3)  # elsewhere
    check_twice()
    weight.mul_(-1)  # in its place
    check_twice()
    assert captures.made == 2
    weight.data = weight.t()  # there, in another order
    check_twice()
    assert captures.made == 3


def test_a_number_that_a_step_closes_over_is_part_of_a_graph() -> None:
    """A GPU, for which "meta" stands here, has no address of it."""
    from ftbptt.segment.capture import _as_captured

    number, device = torch.tensor(2.0), torch.device("meta")
    before = _as_captured(number, device)
    number.fill_(3.0)
    assert _as_captured(number, device) != before


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_what_cannot_be_captured_runs_without(
    kind: type[Exception], captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only a graph's own memory is too much, too."""

    def refuse(*given: Any) -> Any:
        raise kind("operation not permitted when stream is capturing")

    monkeypatch.setattr("ftbptt.segment.capture._capture", refuse)
    given = problem("lstm_readout")
    segment = make(given)
    check(segment, given, 7)
    with pytest.warns(RuntimeWarning, match="could not be captured as a CUDA graph .operation not"):
        check(segment, given, 7)
    for _ in range(2):  # said once
        check(segment, given, 7)


def test_what_a_step_moves_to_the_device_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the CPU waits for a GPU, for which "meta" stands here.

    So is a single number, which torch reads there beside tensors of a GPU, but a kernel cannot.
    """
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    table, number = torch.arange(9.0), torch.tensor(2.0)

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t + h * params["w"] + table[:3].to(h) * number)
        return h, h

    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend="eager")
    shapes = ((3,), (2, 3), (4, 2, 3), (4, 2, 3))
    w, *given = (torch.empty(shape, device="meta") for shape in shapes)
    plan, _ = segment.plan({"w": w}, *given)
    assert [capture.device.type for capture in plan.captures] == ["meta", "meta"]


def test_what_is_tried_after_a_backend_that_failed() -> None:
    assert fallback(FUSED, "cuda") is CUDAGRAPH
    assert fallback(CUDAGRAPH, "cuda") is EAGER
    assert fallback(FUSED, "cpu") is EAGER


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_steps_called_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops of the backend itself, operation by operation, on a CPU."""
    from dataclasses import replace

    from ftbptt import backends
    from ftbptt.backends import cudagraph

    monkeypatch.setattr(cudagraph, "build", lambda function, examples, mode: function)
    around = replace(backends.CUDAGRAPH, build=None)
    monkeypatch.setitem(backends._BY_NAME, "cudagraph", around)
    given = problem(name)
    segment = make(given, backend="cudagraph")
    for steps in (7, 1, 2):
        check(segment, given, steps)


@pytest.mark.parametrize("name", slow_but(["lstm_readout"], REPRESENTATIVE))
def test_steps_compiled(name: str) -> None:
    given = problem(name)
    segment = make(given, backend="cudagraph")
    for steps in (7, 1, 2, 63):
        check(segment, given, steps)
    assert segment.trace_count == 1
    loops = [b for b in segment.explain(*given.data(7)).blocks if "scan" in b.kind]
    assert bool(loops) == (name != "delay_line")
    assert all("its step compiled once, and called K times" in b.runs for b in loops)


def test_a_stream_on_output_that_may_be_overwritten(captures: Captures) -> None:
    """Losses are read, and gradients gathered, after the next window has run."""
    given, found = problem("lstm_readout"), []
    for reuse_output in (False, True):
        params = {name: p.detach().clone() for name, p in given.params.items()}
        x, y = given.x(24), given.y(24)
        run = train_stream(
            make(given, reuse_output=reuse_output), params, given.state, (x, y),
            torch.optim.SGD(params.values(), lr=0.1), k1=4, accumulate=2,
            progress=False,
        )  # fmt: skip
        updates = list(run)
        found.append(([update.loss for update in updates], params))
    assert captures.replayed
    assert_close(*found)


def test_a_graph_that_was_captured_in_inference_mode(captures: Captures) -> None:
    """Tensors that are made in that mode cannot be written to outside of it."""
    given = problem("lstm_readout")
    segment = make(given)
    with torch.inference_mode():
        for _ in range(3):
            segment.evaluate(*given.data(7))
    other = problem("lstm_readout", seed=1)
    found = segment.evaluate(*other.data(7))
    assert captures.made == 1
    assert_close(found.out, reference_segment(other.step, other.loss, *other.data(7)).out)


@pytest.mark.parametrize(("in_one_kernel", "graphs"), [(False, 1), (True, 0)])
def test_gradients_that_are_handed_over_early(
    in_one_kernel: bool, graphs: int, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts where few kernels are launched; else a graph is quicker, and comes first."""
    monkeypatch.setattr(execute, "_UNCUT_BYTES", 0)
    backend = replace(EAGER, captured=True, in_one_kernel=lambda block: in_one_kernel)
    monkeypatch.setattr("ftbptt.segment.executables.choose", lambda name: backend)
    given = problem("lstm_readout")
    segment, handed = make(given, backend="eager"), []
    early = EarlyGradients([[3], [2], [0, 1]], lambda loss, grads: handed.append((loss, *grads)))
    for _ in range(3):
        handed.clear()
        found = segment.with_early_gradients(early, *given.data(7))
        assert_close(found, reference_segment(given.step, given.loss, *given.data(7)))
        leaves = tree_leaves(found.grads)
        expected = [(found.loss, *(leaves[i] for i in part)) for part in early.parts]
        assert_close(handed, expected)
    assert captures.made == graphs
