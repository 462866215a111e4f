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

from ..cells.problems import VOCABULARY, B, D, Draw, H, Problem, mse, named, per_row
from ..oracle import assert_close, check, reference
from .plain_module import K, Plain, problem_of

Tree = Any


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
    words = r"changes its buffer .*recur\.parametrizations.*_[uv]"
    with pytest.raises(RuntimeError, match=words) as caught:
        segment(*made.data(K))
    assert "module.train(); module.recur.weight; module.eval()" in str(caught.value)


def test_spectral_norm_that_iterates_between_segments() -> None:
    """As the error says; the buffers it writes are read by the program that is there."""
    draw = Draw(0)
    module = draw.module(lambda: Plain(parametrizations.spectral_norm))
    made = problem_of(module, draw)
    segment = make_train_segment(made.step, made.loss, backend="eager")
    losses = []
    for _ in range(2):
        module.train()
        _ = module.recur.weight
        module.eval()
        found = segment(*made.data(K))
        assert_close(found, reference(made, K))
        losses.append(found.loss)
    assert losses[0] != losses[1]
    assert segment.trace_count == 1


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


class PeepholeCell(nn.RNNCellBase):
    """As torch's own cells are derived, with a state and a result of its own."""

    def __init__(self) -> None:
        super().__init__(D, H, bias=True, num_chunks=4)

    def forward(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, c = state
        gates = x @ self.weight_ih.T + h @ self.weight_hh.T + self.bias_ih
        i, f, g, o = gates.chunk(4, -1)
        c = (f + c).sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return 2 * h, (h, c)


class DoublingCell(nn.LSTMCell):
    def forward(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:  # type: ignore[override]
        h, c = super().forward(x, state)
        return 2 * h, (h, c)


@pytest.mark.parametrize("kind", [PeepholeCell, DoublingCell])
def test_a_class_of_cells_that_returns_a_pair(kind: Any) -> None:
    draw = Draw(0)
    module = draw.module(lambda: kind() if kind is PeepholeCell else kind(D, H))
    check_module(problem_of(module, draw, state=(draw(B, H), draw(B, H))))


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
