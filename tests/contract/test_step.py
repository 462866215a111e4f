"""as_step: what becomes a step, where its rows and its zero state are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import Step, as_step, make_train_segment

from ..cells.problems import OUT, B, D, H
from ..cells.torch_modules import SequenceModel

Tree = Any


def apply(step: Step, x_t: Tree, state: Tree) -> Any:
    params = {} if step.module is None else dict(step.module.named_parameters())
    return step.apply(params, step.buffers(), x_t, state)


def step_function(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x_t + params, state + 1


def test_a_function() -> None:
    step = as_step(step_function)
    assert step.name == "step_function"
    assert step.parameter_names is None
    assert step.buffers() == {}
    assert step.zero_state is None
    out, state = step.apply(torch.ones(2), {}, torch.zeros(2), torch.zeros(2))
    assert out.tolist() == [1, 1]
    assert state.tolist() == [1, 1]


def test_a_step_is_returned_as_it_is() -> None:
    step = as_step(step_function)
    assert as_step(step) is step


def test_a_callable_object_is_named_by_its_type() -> None:
    class Recurrence:
        def __call__(self, params: Tree, x_t: Tree, state: Tree) -> tuple[Tree, Tree]:
            return x_t, state

    assert as_step(Recurrence()).name == "Recurrence"


@pytest.mark.parametrize("rows", [(B,), ()], ids=["batched", "unbatched"])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_torch_cells(kind: type[nn.Module], rows: tuple[int, ...]) -> None:
    cell = kind(D, H)
    step, x_t = as_step(cell), torch.randn(*rows, D)
    state = step.zero_state(x_t)
    out, after = apply(step, x_t, state)
    expected = cell(x_t)  # torch's own zero state
    h = expected[0] if kind is nn.LSTMCell else expected
    torch.testing.assert_close(out, h)
    torch.testing.assert_close(after, expected)
    assert step.parameter_names == ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]


def test_lstm_cell_keeps_the_kind_of_its_state() -> None:
    step = as_step(nn.LSTMCell(D, H))
    pair = [torch.zeros(B, H), torch.zeros(B, H)]
    assert type(apply(step, torch.zeros(B, D), pair)[1]) is list
    assert type(apply(step, torch.zeros(B, D), tuple(pair))[1]) is tuple


@pytest.mark.parametrize("rows", [(B,), ()], ids=["batched", "unbatched"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_torch_layers(kind: type[nn.Module], batch_first: bool, rows: tuple[int, ...]) -> None:
    layer = kind(D, H, 2, batch_first=batch_first)
    step, x_t = as_step(layer), torch.randn(*rows, D)
    out, after = apply(step, x_t, step.zero_state(x_t))
    axis = 1 if rows and batch_first else 0
    expected, expected_after = layer(x_t.unsqueeze(axis))
    torch.testing.assert_close(out, expected.squeeze(axis))
    torch.testing.assert_close(after, expected_after)
    assert step.batch_first == batch_first


def test_projection_makes_h_smaller_than_c() -> None:
    step = as_step(nn.LSTM(D, H, 2, proj_size=OUT))
    h, c = step.zero_state(torch.zeros(B, D))
    assert h.shape == (2, B, OUT)
    assert c.shape == (2, B, H)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_sequence_module_is_called_on_chunks_of_one_step(batch_first: bool) -> None:
    model = SequenceModel(batch_first)
    step = as_step(model, sequence=True)
    assert step.batch_first == batch_first
    state = torch.zeros(2, B, H), torch.zeros(2, B, H)
    x = torch.randn(3, B, D)
    whole, _ = model(x.transpose(0, 1) if batch_first else x, state)
    for t in range(3):
        out, state = apply(step, x[t], state)
        torch.testing.assert_close(out, whole.select(1 if batch_first else 0, t))


def test_sequence_over_pytrees_and_tokens() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(5, D), nn.GRU(D, H, batch_first=True)

        def forward(self, x: Tree, state: Tensor) -> tuple[Tree, Tensor]:
            out, state = self.rnn(self.embed(x["token"]) + x["extra"], state)
            return {"hidden": out, "token": x["token"]}, state

    step = as_step(Model(), sequence=True)
    x_t = {"token": torch.randint(5, (B,)), "extra": torch.randn(B, D)}
    out, state = apply(step, x_t, torch.zeros(1, B, H))
    assert out["hidden"].shape == (B, H)
    assert out["token"].shape == (B,)
    assert state.shape == (1, B, H)


def test_params_replace_the_modules_own() -> None:
    cell = nn.GRUCell(D, H)
    step, x_t, h = as_step(cell), torch.randn(B, D), torch.zeros(B, H)
    zeros = {name: torch.zeros_like(p) for name, p in cell.named_parameters()}
    out, _ = step.apply(zeros, {}, x_t, h + 1)
    torch.testing.assert_close(out, torch.full((B, H), 0.5))
    assert all(p.any() for p in cell.parameters())


def test_tied_parameters_are_named_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x_t), self.b(h)

    step = as_step(Tied())
    assert step.parameter_names == ["a.weight"]
    ones = torch.ones(B, H)
    out, after = step.apply({"a.weight": torch.eye(H)}, {}, ones, 2 * ones)
    torch.testing.assert_close((out, after), (ones, 2 * ones))


def test_buffers_are_read_anew() -> None:
    module = nn.Module()
    module.register_buffer("scale", torch.ones(1))
    step = as_step(module)
    assert step.buffers()["scale"] is module.scale
    module.scale = torch.zeros(1)
    assert step.buffers()["scale"].item() == 0


def test_row_axis() -> None:
    matrix, layered = torch.zeros(B, H), torch.zeros(2, B, H)
    assert as_step(step_function).row_axis(layered) == 0
    assert as_step(nn.GRU(D, H, 2)).row_axis(layered) == 1
    assert as_step(nn.GRU(D, H, 2)).row_axis(matrix) == 0
    assert as_step(SequenceModel(), sequence=True).row_axis(layered) == 1
    assert as_step(step_function, state_batch_dim=1).row_axis(layered) == 1
    assert as_step(SequenceModel(), sequence=True, state_batch_dim=0).row_axis(layered) == 0


class WithMemory(nn.Module):
    """An LSTM whose state is carried beside a memory ``[B, M, H]``."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, H, 2)

    def forward(self, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        pair, memory = state
        out, pair = self.rnn(x_t.unsqueeze(0), pair)
        memory = 0.5 * memory + out.squeeze(0).unsqueeze(1)
        return memory.sum(1), (pair, memory)


def row_of(state: Tree, row: int) -> Tree:
    (h, c), memory = state
    own = slice(row, row + 1)
    return (h[:, own], c[:, own]), memory[own]


@pytest.mark.parametrize("slots", [B, 4])
def test_rows_of_a_memory_beside_a_layer(slots: int) -> None:
    """Also where there are as many slots as rows: the layer has two layers, the memory has not."""
    module = WithMemory().double()
    pair = torch.randn(2, B, H).double(), torch.randn(2, B, H).double()
    state = pair, torch.randn(B, slots, H).double()
    params, x, y = dict(module.named_parameters()), torch.randn(6, B, D), torch.randn(6, B, H)
    segment = make_train_segment(
        module, lambda out, y: (out - y).square().mean(-1), backend="eager"
    )
    reset, mask = torch.rand(6, B) < 0.4, torch.rand(6, B) < 0.7
    found = segment(params, state, x.double(), y.double(), reset=reset, mask=mask)
    row = [
        segment(
            params, row_of(state, b), x[:, b : b + 1].double(), y[:, b : b + 1].double(),
            reset=reset[:, b : b + 1], mask=mask[:, b : b + 1],
        )
        for b in range(B)
    ]  # fmt: skip
    torch.testing.assert_close(found.out, torch.cat([one.out for one in row], 1))
    torch.testing.assert_close(found.state[1], torch.cat([one.state[1] for one in row]))


def test_rows_that_may_lie_on_two_axes() -> None:
    """Two rows, two slots, two layers: nothing says which leaf is the memory."""
    module = WithMemory()
    state = ((torch.zeros(2, 2, H), torch.zeros(2, 2, H)), torch.zeros(2, 2, H))
    params, x, y = dict(module.named_parameters()), torch.randn(6, 2, D), torch.randn(6, 2, H)
    segment = make_train_segment(module, lambda out, y: (out - y).square().mean(), backend="eager")
    assert segment(params, state, x, y, reset=torch.ones(6).bool()).loss.isfinite()
    words = r"reset: has 2 rows, and state\[0\]\[0\] of shape \[2, 2, 7\] as many on axis 0 and"
    with pytest.raises(ValueError, match=words):
        segment(params, state, x, y, reset=torch.ones(6, 2).bool())
    # The layer alone has as many states as there are leaves: no question.
    model = SequenceModel()
    pair = torch.zeros(2, 2, H), torch.zeros(2, 2, H)
    segment = make_train_segment(
        as_step(model, sequence=True), lambda out, y: out.square().mean(), backend="eager"
    )
    params = dict(model.named_parameters())
    assert segment(params, pair, x, y, reset=torch.ones(6, 2).bool()).loss.isfinite()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_bidirectional_is_refused_with_the_reason(kind: type[nn.Module]) -> None:
    words = rf"step: {kind.__name__}\(bidirectional=True\) cannot be trained by TBPTT: .*the end"
    with pytest.raises(ValueError, match=words):
        as_step(kind(D, H, bidirectional=True))
    with pytest.raises(ValueError, match="bidirectional"):
        as_step(nn.Sequential(nn.Linear(D, D), kind(D, H, bidirectional=True)), sequence=True)


def test_a_module_for_several_devices_is_refused() -> None:
    parallel = nn.DataParallel(nn.GRUCell(D, H))
    for own in (parallel, torch.compile(parallel)):
        with pytest.raises(
            TypeError, match=r"step: DataParallel .* Pass the module inside, step.m"
        ):
            as_step(own)


@pytest.mark.parametrize("wrong", [None, 3, "lstm", nn.LSTM, torch.zeros(2)])
def test_what_is_no_step(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=r"step: expected a module, or a function step\(params, x_t"
    ):
        as_step(wrong)


def test_sequence_needs_a_module() -> None:
    with pytest.raises(TypeError, match=r"as_step\(sequence=True\) needs an nn.Module"):
        as_step(step_function, sequence=True)


def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"step: a module of torch.jit.script .* made from"):
        as_step(torch.jit.script(nn.GRUCell(3, 3)))
    holder = nn.Module()
    holder.cell = torch.jit.script(nn.GRUCell(3, 3))
    with pytest.raises(TypeError, match=r"step\.cell: a module of torch.jit.script .* made from"):
        as_step(holder)


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        (as_step(nn.GRUCell(D, H)), {"sequence": True}, "sequence=True has no meaning for what as"),
        (step_function, {"batch_first": True}, "batch_first=True has no meaning for a function."),
        (nn.GRUCell(D, H), {"sequence": True}, "no meaning for GRUCell, which takes one step"),
        (nn.GRU(D, H), {"state_batch_dim": 0}, "state_batch_dim=0 has no meaning for GRU. Leave"),
        (nn.Linear(D, H), {"batch_first": False}, "batch_first=False has no meaning for a module"),
    ],
)
def test_options_without_a_meaning(step: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        as_step(step, **options)


@pytest.mark.parametrize(("axis", "kind"), [(-1, ValueError), (True, TypeError), ("0", TypeError)])
def test_rows_on_an_axis_that_is_none(axis: Any, kind: type[Exception]) -> None:
    """Counted from the back it would be another one in each leaf."""
    with pytest.raises(kind, match="state_batch_dim: expected"):
        as_step(step_function, state_batch_dim=axis)
