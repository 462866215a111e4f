"""Modules as users have them: parametrised, frozen, subclassed, with buffers, of mixed dtypes."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from ftbptt import as_step, make_train_segment, reference_segment

from ..cells import problem, slow_but
from ..cells.problems import VOCABULARY, B, D, Draw, H, Problem, mse, named, per_row
from ..oracle import assert_close, assert_same_structure, check, check_low_precision, reference

K = 5
Tree = Any


class Plain(nn.Module):
    """An Elman cell whose recurrent layer may be wrapped."""

    def __init__(self, wrap: Any = lambda layer: layer) -> None:
        super().__init__()
        self.enter, self.recur = nn.Linear(D, H), wrap(nn.Linear(H, H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x_t) + self.recur(h))
        return h, h


def problem_of(module: nn.Module, draw: Draw, **changes: Any) -> Problem:
    made = Problem(
        module, named(module), draw(B, H), draw.sequence(B, D), draw.sequence(B, H), per_row
    )
    return replace(made, **changes)


def check_module(made: Problem) -> None:
    segment = make_train_segment(made.step, made.loss, backend="eager")
    for steps in (K, 1):
        check(segment, made, steps)
    check(segment, made, K, reset=torch.rand(K, B) < 0.4)


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "spectral_norm"])
def test_parametrised(kind: str) -> None:
    draw, wrap = Draw(0), getattr(parametrizations, kind)
    module = draw.module(lambda: Plain(wrap)).eval()
    check_module(problem_of(module, draw))


def test_a_cache_of_parametrized_weights() -> None:
    """torch's is one for all calls, whatever the parameters: neither takes from the other."""
    draw = Draw(0)
    made = problem_of(draw.module(lambda: Plain(parametrizations.weight_norm)), draw)
    module: Any = made.step
    segment = make_train_segment(module, made.loss, backend="eager")
    others = {name: 0.5 * p.detach() for name, p in made.params.items()}
    _, state, x, y = made.data(K)
    with parametrize.cached():
        before = module(x[0], state)[0]
        assert_close(segment(others, state, x, y), reference(replace(made, params=others), K))
        assert_close(segment(made.params, state, x, y), reference(made, K))
        assert torch.equal(module(x[0], state)[0], before)


def test_spectral_norm_in_train_mode_changes_a_buffer() -> None:
    draw = Draw(0)
    made = problem_of(draw.module(lambda: Plain(parametrizations.spectral_norm)), draw)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    with pytest.raises(RuntimeError, match=r"changes its buffer .*recur\.parametrizations.*_[uv]"):
        segment(*made.data(K))


class WithBuffer(nn.Module):
    """Work on a buffer alone, outside the loop and without gradient."""

    leak: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(D, H)
        self.register_buffer("leak", torch.linspace(-1, 1, H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.lerp(h, torch.tanh(self.enter(x_t)), self.leak.sigmoid())
        return h, h


def test_work_on_a_buffer_alone() -> None:
    draw = Draw(0)
    check_module(problem_of(draw.module(WithBuffer), draw))


def test_buffers_are_read_anew_at_each_call() -> None:
    draw = Draw(0)
    module = draw.module(WithBuffer)
    made = problem_of(module, draw)
    segment = make_train_segment(module, made.loss, backend="eager")
    check(segment, made, K)
    module.leak.mul_(0.5)
    check(segment, made, K)
    module.leak = module.leak + 1
    check(segment, made, K)
    assert segment.trace_count == 1


def test_a_captured_tensor_is_read_anew_too() -> None:
    constant = torch.ones(H, dtype=torch.float64)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params + h * constant.exp().clamp(max=2))
        return h, h

    draw = Draw(0)
    made = problem_of(nn.Identity(), draw, step=step, params=draw(D, H))
    segment = make_train_segment(step, made.loss, backend="eager")
    check(segment, made, K)
    constant.mul_(0.3)
    check(segment, made, K)


def test_a_frozen_parameter_still_has_its_gradient() -> None:
    draw = Draw(0)
    module = draw.module(Plain)
    module.recur.weight.requires_grad_(False)
    made = problem_of(module, draw)
    check_module(made)
    assert reference(made, K).grads["recur.weight"].any()


def test_a_subclass_of_a_cell() -> None:
    class Own(nn.GRUCell):
        pass

    draw = Draw(0)
    check_module(problem_of(draw.module(lambda: Own(D, H)), draw))


class TwoRecurrences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(D, H), nn.LSTM(H, H, 2)

    def forward(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        x, first = self.first(x, state["first"])
        x, second = self.second(x, state["second"])
        return x, {"first": first, "second": second}


def test_a_sequence_model_with_two_recurrences() -> None:
    draw = Draw(0)
    module = draw.module(TwoRecurrences)
    state = {"first": draw(1, B, H), "second": (draw(2, B, H), draw(2, B, H))}
    check_module(problem_of(module, draw, step=as_step(module, sequence=True), state=state))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, H, padding_idx=0)
        self.recur = nn.Linear(H, H)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.embed(x_t) + self.recur(h))
        return h, h


def test_padding_idx_has_no_gradient() -> None:
    draw = Draw(0)
    made = problem_of(draw.module(Embedded), draw, x=draw.tokens(VOCABULARY, B))
    check_module(made)
    assert not reference(made, 9).grads["embed.weight"][0].any()


def test_autocast() -> None:
    """The segment runs as the eager loop does there, and is another plan."""
    made = problem("lstm_readout", torch.float32)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    plain = segment(*made.data(K))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference(made, K)
        found = segment(*made.data(K))
    assert_same_structure(found, expected)
    assert segment.trace_count == 2
    error = (expected.loss - plain.loss).abs()
    assert error > 0
    assert_close(found, expected, tolerance=2e-2)
    assert_close(segment(*made.data(K)), plain, tolerance=0)


@pytest.mark.parametrize("backend", slow_but(["eager", "fused"], ["eager", "fused", "compile"]))
def test_a_part_of_the_step_without_autocast(backend: str) -> None:
    """What the caller keeps in float32 is not cast when the recorded step runs either."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        return h @ params["v"], h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (out.float() @ torch.ones(H, H) - y).square().mean()

    draw = Draw(0)
    params = {"w": draw(D, H), "u": draw(H, H), "v": draw(H, H)}
    data = [draw(B, H), draw(K, B, D), draw(K, B, H)]
    params, (h, x, y) = {k: p.float() for k, p in params.items()}, [t.float() for t in data]
    segment = make_train_segment(step, loss, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference_segment(step, loss, params, h, x, y)
        found = segment(params, h, x, y)
        assert segment.explain(params, h, x, y).blocks  # the plan is found again
        assert segment.trace_count == 1
    assert (found.state.dtype, found.out.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(found.state, expected.state)
    torch.testing.assert_close(found.loss, expected.loss)
    # `v` has gradients in bfloat16; there, the order of a sum is seen.
    torch.testing.assert_close(found.grads, expected.grads, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("start", ["none", "tree", "function"])
def test_a_state_with_its_parts_in_another_order(start: str) -> None:
    """It is the same to whoever reads it by name."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h = torch.tanh(x_t @ params["w"] + state["h"])
        return h, {"past": ({"b": h, "a": state["past"][0]["a"] + 1},), "h": 0.5 * h}

    draw = Draw(0)
    params, x, y = {"w": draw(D, H), "start": draw(B, H)}, draw(K, B, D), draw(K, B, H)
    state = {"h": draw(B, H), "past": ({"a": draw(B, H), "b": draw(B, H)},)}
    tree = {"past": ({"b": draw(B, H), "a": draw(B, H)},), "h": draw(B, H)}
    function = lambda params: {**tree, "h": params["start"]}  # noqa: E731
    initial: Any = {"none": None, "tree": tree, "function": function}[start]
    reset = torch.rand(K, B) < 0.4
    segment = make_train_segment(step, mse, backend="eager", initial_state=initial)
    found = segment(params, state, x, y, reset=reset)
    expected = reference_segment(step, mse, params, state, x, y, reset=reset, initial_state=initial)
    assert_close(found, expected)
    assert list(found.state) == ["h", "past"]
    assert list(found.state["past"][0]) == ["a", "b"]


def test_float16() -> None:
    draw = Draw(0)
    made = problem_of(draw.module(Plain), draw).to(torch.float16)
    check_low_precision(make_train_segment(made.step, made.loss, backend="eager"), made, K)


def test_mixed_dtypes() -> None:
    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, total = state
        h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        total = total + h.double()
        return h + total.float(), (h, total)

    draw = Draw(0)
    made = problem_of(
        nn.Identity(), draw, step=step, params={"w": draw(D, H), "u": draw(H, H)},
        state=(draw(B, H), draw(B, H)),
    ).to(torch.float32)  # fmt: skip
    made = replace(made, state=(made.state[0], made.state[1].double()))
    segment = make_train_segment(step, made.loss, backend="eager")
    assert_close(segment(*made.data(K)), reference(made, K), tolerance=1e-5)


def test_default_dtype() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params + h * torch.tensor(0.5) + torch.ones(H))
        return h, h

    draw = Draw(0)
    made = problem_of(nn.Identity(), draw, step=step, params=draw(D, H))
    torch.set_default_dtype(torch.float64)
    try:
        check(make_train_segment(step, made.loss, backend="eager"), made, K)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_rows_at_all() -> None:
    draw = Draw(0)
    module = draw.module(Plain)
    x, y = draw.sequence(0, D), draw.sequence(0, H)
    made = problem_of(module, draw, state=draw(0, H), x=x, y=y)
    total = replace(made, loss=lambda out, y: (out - y).square().sum())
    check(make_train_segment(module, total.loss, backend="eager"), total, K)


def test_one_tensor_given_twice() -> None:
    """The same zeros for h and c, the same weight under two names, y a view of x."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, c = state
        c = torch.tanh(x_t @ params["w"] + c)
        h = torch.sigmoid(h @ params["u"] + c)
        return h, (h, c)

    draw = Draw(0)
    zeros, w, data = torch.zeros(B, H).double(), draw(H, H), draw.sequence(B, H)
    made = Problem(
        step, {"w": w, "u": w}, (zeros, zeros),
        lambda steps: data(steps + 1)[:-1], lambda steps: data(steps + 1)[1:], per_row,
    )  # fmt: skip
    whole = data(K + 1)
    segment = make_train_segment(step, per_row, backend="eager")
    check(segment, made, K)
    found = segment(made.params, made.state, whole[:-1], whole[1:])
    assert_close(found, reference(made, K))
    assert not torch.equal(found.grads["w"], found.grads["u"])


@pytest.mark.parametrize("params", [{}, (), []], ids=["dict", "tuple", "list"])
def test_nothing_to_train_and_nothing_to_carry(params: Any) -> None:
    draw = Draw(0)
    made = Problem(
        lambda params, x_t, state: (torch.tanh(x_t), state), params, (),
        draw.sequence(B, D), draw.sequence(B, D), mse,
    )  # fmt: skip
    check(make_train_segment(made.step, mse, backend="eager"), made, K)


def test_params_as_one_tensor_and_out_as_nothing() -> None:
    draw = Draw(0)
    made = Problem(
        lambda w, x_t, h: ((), torch.tanh(x_t @ w + h)), draw(D, H), draw(B, H),
        draw.sequence(B, D), draw.sequence(B, H), lambda out, y: y.mean(),
    )  # fmt: skip
    check(make_train_segment(made.step, made.loss, backend="eager"), made, K)


def test_a_copied_module_is_another_module() -> None:
    draw = Draw(0)
    module = draw.module(Plain)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.recur.weight.mul_(0.5)
    one, two = problem_of(module, Draw(1)), problem_of(other, Draw(1))
    segment = make_train_segment(module, per_row, backend="eager")
    check(segment, one, K)
    check(segment, two, K)  # its parameters, through the first module's code


# -- what torch.compile has made ------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.LSTMCell(D, H), Plain], ids=["cell", "module"])
@pytest.mark.parametrize("names", ["its own", "of the module inside"])
def test_a_compiled_module_is_the_module(make: Any, names: str) -> None:
    draw = Draw(0)
    module = draw.module(make)
    compiled = torch.compile(module)
    state = (draw(B, H), draw(B, H)) if isinstance(module, nn.LSTMCell) else draw(B, H)
    made = problem_of(module, draw, state=state)
    params = named(compiled if names == "its own" else module)
    segment = make_train_segment(compiled, made.loss, backend="eager")
    found = segment(params, *made.data(K)[1:])
    assert list(found.grads) == list(params)
    expected = segment(named(module), *made.data(K)[1:])
    assert_close(found._replace(grads=list(found.grads.values())),
                 expected._replace(grads=list(expected.grads.values())))  # fmt: skip
    check(segment, made, K)


class CompiledInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.compile(nn.GRUCell(D, H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x_t, h)
        return h, h


def test_compiled_parts_are_traced_as_they_are_written() -> None:
    @torch.compile
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params + h)
        return h, h

    draw = Draw(0)
    module = CompiledInside().double()
    for own, params in ((step, draw(D, H)), (module, named(module))):
        made = problem_of(nn.Identity(), draw, step=own, params=params)
        segment = make_train_segment(own, torch.compile(made.loss), backend="eager")
        found = segment(*made.data(K))
        assert found.loss.isfinite()
        assert segment.trace_count == 1


class WordsOfCharacters(nn.Module):
    """A step reads a word, forwards and backwards."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.reader = kind(D, 3, bidirectional=True, batch_first=True, **options)
        self.cell = nn.GRUCell(6, H)

    def forward(self, characters: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.reader(characters)[0].mean(1), h)
        return h, h


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.GRU, {"num_layers": 2}),
        (nn.RNN, {"bias": False}),
        (nn.LSTM, {"num_layers": 2, "bias": False}),
    ],
)
def test_both_directions_along_another_axis_than_time(kind: Any, options: Any) -> None:
    draw = Draw(0)
    module = draw.module(lambda: WordsOfCharacters(kind, **options))
    made = problem_of(module, draw, x=draw.sequence(B, 4, D))
    check(make_train_segment(module, per_row, backend="eager"), made, K)


class SparseEmbedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, H, sparse=True)
        self.cell = nn.GRUCell(H, H)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.table(x_t), h)
        return h, h


def test_the_gradient_of_a_sparse_embedding_is_dense() -> None:
    torch.manual_seed(0)
    module = SparseEmbedded()
    given = named(module), torch.zeros(B, H), torch.randint(VOCABULARY, (K, B)), torch.ones(K, B, H)
    found = make_train_segment(module, mse, backend="eager")(*given)
    module.table.sparse = False
    assert_close(found, reference_segment(module, mse, *given), 1e-5)


def test_a_buffer_among_the_parameters() -> None:
    """As an ensemble has it, whose models have buffers of their own."""
    module = WithBuffer().double()
    h, x, y = (
        torch.randn(B, H).double(),
        torch.randn(K, B, D).double(),
        torch.zeros(K, B, H).double(),
    )
    params = {**named(module), "leak": module.leak + 1}
    segment = make_train_segment(module, mse, backend="eager")
    found = segment(params, h, x, y), reference_segment(module, mse, params, h, x, y)
    module.leak += 1
    expected = reference_segment(module, mse, named(module), h, x, y)
    for result in found:
        assert_close((result.loss, result.out), (expected.loss, expected.out))


class Counting(nn.Module):
    """A step that puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.seen = self.seen + 1
        h = self.cell(x_t, h) / self.seen
        return h, h


def test_a_buffer_that_is_assigned() -> None:
    """In the user's loop it counts steps. It was ignored, also by the oracle."""
    module = Counting()
    arguments = named(module), torch.zeros(B, H), torch.randn(K, B, D), torch.zeros(K, B, H)
    words = "step Counting assigns to its buffer 'seen'. Buffers are constants of a segment: carry"
    for run in (make_train_segment(module, mse, backend="eager"),
                partial(reference_segment, module, mse)):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            run(*arguments)
    assert module.seen == 0


class Checkpointed(Plain):
    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(checkpoint(self.recur, h, use_reentrant=False) + self.enter(x_t))
        return h, h


def test_checkpoints_in_a_step_with_other_parameters_than_the_modules() -> None:
    """They run again in the backward, of the oracle too, with the parameters that were passed."""
    torch.manual_seed(0)
    module = Checkpointed().double()
    plain = Plain().double()
    params = {name: 1.5 * p.detach() for name, p in module.named_parameters()}
    arguments = params, torch.randn(B, H).double(), torch.randn(K, B, D).double(), None

    def loss(out: Tensor, y: None) -> Tensor:
        return out.square().mean()

    expected = reference_segment(plain, loss, *arguments)
    assert_close(reference_segment(module, loss, *arguments), expected)
    found = make_train_segment(module, loss, backend="eager")(*arguments)
    assert_close(found, expected)


class Shared(nn.Module):
    """A submodule under two names, and a parameter and a buffer of it in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(H, H)
        self.b = self.a
        self.w = self.a.weight
        self.a.register_buffer("scale", torch.full((H,), 0.5))
        self.register_buffer("scale", self.a.scale)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x_t) * self.a.scale + self.b(h) + h @ self.w * self.scale)
        return h, h


def test_what_has_two_names_is_one_and_stays_in_the_module() -> None:
    draw = Draw(0)
    module = draw.module(Shared)
    before = [module.a.weight, module.a.bias, module.w, module.a.scale, module.scale]
    params = named(module)
    assert len(params) == 2
    arguments = params, draw(B, H), draw(K, B, H), draw(K, B, H)
    segment = make_train_segment(module, mse, backend="eager")
    found = segment(*arguments)
    assert_close(found, reference_segment(module, mse, *arguments))
    after = [module.a.weight, module.a.bias, module.w, module.a.scale, module.scale]
    assert all(a is b for a, b in zip(before, after, strict=True))
    state = arguments[1]
    outs = []
    for x_t in arguments[2]:
        out, state = module(x_t, state)
        outs.append(out)
    mse(torch.stack(outs), arguments[3]).backward()
    for name, p in module.named_parameters():
        assert_close(found.grads[name], p.grad)
