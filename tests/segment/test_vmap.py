"""Under torch.func.vmap: the oracle is a Python loop over the sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import stack_module_state, vmap

from ftbptt import SegmentOutput, make_train_segment, reference_segment

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..cells.problems import B, D, Draw, H, mse
from ..oracle import assert_close, unchanged
from ..sequences import N, looped, sequences, stacked

Tree = Any
Segments = Callable[..., Any]

# These stand for their kind; compiling takes seconds, so all but one are marked slow.
COMPILED = slow_but(
    ["lstm"],
    [
        *("lstm", "lstm_cell", "gru_3_layers", "sequence_model"),
        *("embedding_tied", "counter_and_flag", "fast_weights"),
    ],
)


# -- the whole table ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_shared_parameters(name: str, segments: Segments) -> None:
    check_shared(segments(name, "eager"), name, steps=3)


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_ensemble(name: str, segments: Segments) -> None:
    check_ensemble(segments(name, "eager"), name, steps=3)


@pytest.mark.parametrize("name", COMPILED)
def test_shared_parameters_compiled(name: str, segments: Segments) -> None:
    segment = segments(name, "compile")
    check_shared(segment, name, steps=7)
    traced, compiled = segment.trace_count, segment.compile_count
    for steps in (1, 2, 63):
        check_shared(segment, name, steps)
    assert (segment.trace_count, segment.compile_count) == (traced, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "lstm_cell", "layer_norm_lstm"])
def test_ensemble_compiled(name: str, segments: Segments) -> None:
    for steps in (7, 3, 1):
        check_ensemble(segments(name, "compile"), name, steps)


def check_shared(segment: Any, name: str, steps: int) -> None:
    given, calls = problem(name), sequences(name, steps)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    with unchanged(given.params, state, x, y):
        found = vmap(segment, in_dims=(None, 0, 0, 0))(given.params, state, x, y)
    assert_close(found, looped(given, [(given.params, *call[1:]) for call in calls]))


def check_ensemble(segment: Any, name: str, steps: int, count: int = N) -> None:
    given, calls = problem(name), sequences(name, steps, count)
    if name == "unused_parameters":  # an index of each model cannot be mapped: torch, too
        calls = [({**call[0], "order": given.params["order"]}, *call[1:]) for call in calls]
        dims: Any = {key: None if key == "order" else 0 for key in given.params}
        params = {
            key: given.params[key] if dim is None else stacked([call[0][key] for call in calls])
            for key, dim in dims.items()
        }
    else:
        dims, params = 0, stacked([call[0] for call in calls])
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    found = vmap(segment, in_dims=(dims, 0, 0, 0))(params, state, x, y)
    assert_close(found, looped(given, calls))


# -- the forms of vmap --------------------------------------------------------------------------


def test_stack_module_state(segments: Segments) -> None:
    """An ensemble as torch's tutorial has it: same data for every model, too."""
    models = [Draw(seed).module(lambda: nn.LSTMCell(D, H)) for seed in range(N)]
    params, buffers = stack_module_state(models)
    assert not buffers
    _, state, x, y = problem("lstm_cell").data(5)
    segment = segments("lstm_cell", "eager")
    found = vmap(segment, in_dims=(0, None, None, None))(params, state, x, y)
    calls = [(dict(model.named_parameters()), state, x, y) for model in models]
    assert_close(found, looped(problem("lstm_cell"), calls))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.LSTMCell(D, H), nn.BatchNorm1d(H)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = self.cell(x, state)
        return self.norm(h), (h, c)


def test_batch_norms_of_an_ensemble() -> None:
    """In eval mode, the statistics of each model with its parameters: they have a gradient too."""
    models = [Draw(seed).module(Normalized).eval() for seed in range(N)]
    for model in models:
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2.0)
    params, buffers = stack_module_state(models)
    given = problem("lstm_cell")
    _, state, x, y = given.data(5)
    segment = make_train_segment(models[0], given.loss, backend="eager")
    found = vmap(segment, in_dims=(0, None, None, None))({**params, **buffers}, state, x, y)
    for i, model in enumerate(models):
        own = dict(model.named_parameters())
        expected = reference_segment(model, given.loss, own, state, x, y)
        grads = {name: found.grads[name][i] for name in own}
        assert_close((grads, found.loss[i]), (expected.grads, expected.loss))
        assert_close(found.out[i], expected.out)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_other_axes(dim: int, segments: Segments) -> None:
    """Axis 1 is time-major data of N sequences, [K, N, ...]."""
    given, calls = problem("lstm_readout"), sequences("lstm_readout", 5)
    x, y = (stacked([call[i] for call in calls], dim=dim) for i in (2, 3))
    state = stacked([call[1] for call in calls], dim=1)
    mapped = vmap(segments("lstm_readout", "eager"), in_dims=(None, 1, dim, dim), out_dims=0)
    found = mapped(given.params, state, x, y)
    assert_close(found, looped(given, [(given.params, *call[1:]) for call in calls]))


def test_out_dims(segments: Segments) -> None:
    given, calls = problem("elman"), sequences("elman", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    dims = SegmentOutput(0, 1, 0, 1)
    mapped = vmap(segments("elman", "eager"), in_dims=(None, 0, 0, 0), out_dims=dims)
    found = mapped(given.params, state, x, y)
    expected = looped(given, [(given.params, *call[1:]) for call in calls])
    assert_close(found.out.movedim(1, 0), expected.out)
    assert_close(found.state.movedim(1, 0), expected.state)


@pytest.mark.parametrize("which", [1, 2, 3], ids=["state", "x", "y"])
def test_only_one_argument_is_mapped(which: int, segments: Segments) -> None:
    given, calls = problem("lstm_readout"), sequences("lstm_readout", 5)
    own = [tuple(c[i] if i == which else calls[0][i] for i in range(4)) for c in calls]
    arguments = list(calls[0])
    arguments[which] = stacked([call[which] for call in calls])
    dims = tuple(0 if i == which else None for i in range(4))
    found = vmap(segments("lstm_readout", "eager"), in_dims=dims)(*arguments)
    assert_close(found, looped(given, own))


def test_only_one_parameter_is_mapped(segments: Segments) -> None:
    """One adapter for each model, the rest shared: the shared ones still have a gradient each."""
    given = problem("elman")
    calls = [
        ({**given.params, "u": problem("elman", seed=seed).params["u"]}, *given.data(5)[1:])
        for seed in range(N)
    ]
    params = {**given.params, "u": stacked([call[0]["u"] for call in calls])}
    dims = {name: 0 if name == "u" else None for name in params}
    mapped = vmap(segments("elman", "eager"), in_dims=(dims, None, None, None))
    assert_close(mapped(params, *given.data(5)[1:]), looped(given, calls))


def test_nested(segments: Segments) -> None:
    """An ensemble of models, each over its own sequences with shared parameters."""
    given = problem("gru_cell")
    models = [problem("gru_cell", seed=seed).params for seed in range(2)]
    calls = sequences("gru_cell", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    inner = vmap(segments("gru_cell", "eager"), in_dims=(None, 0, 0, 0))
    found = vmap(inner, in_dims=(0, None, None, None))(stacked(models), state, x, y)
    rows = [looped(given, [(params, *call[1:]) for call in calls]) for params in models]
    assert_close(found, stacked(rows))
    # The other way round, with time in front of both axes of x and y.
    x2, y2 = (torch.stack([leaf, leaf + 1]).movedim(2, 0) for leaf in (x, y))  # [K, 2, N, ...]
    inner = vmap(segments("gru_cell", "eager"), in_dims=(None, 0, 1, 1))
    found = vmap(inner, in_dims=(None, None, 1, 1))(given.params, state, x2, y2)
    rows = [
        looped(given, [(given.params, c[1], c[2] + more, c[3] + more) for c in calls])
        for more in (0, 1)
    ]
    assert_close(found, stacked(rows))


def with_rows(segment: Any) -> Any:
    """torch.func.vmap maps positional arguments only; a keyword is the same for every sequence."""

    def call(params: Tree, state: Tree, x: Tree, y: Tree, reset: Tensor, mask: Tree) -> Any:
        return segment(params, state, x, y, reset=reset, mask=mask)

    return call


@pytest.mark.parametrize("name", ["lstm", "gru_3_layers", "lstm_cell", "min_gru", "aliases"])
def test_reset_and_mask(name: str, segments: Segments) -> None:
    given, calls = problem(name), sequences(name, 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    own = [(given.params, *call[1:]) for call in calls]
    segment = with_rows(segments(name, "eager"))
    reset = torch.rand(N, 5, B) < 0.4
    found = vmap(segment, in_dims=(None, 0, 0, 0, 0, None))(given.params, state, x, y, reset, None)
    assert_close(found, looped(given, own, reset=list(reset)))
    if name == "aliases":  # its loss is a scalar
        return
    mask = torch.rand(N, 5, B) < 0.6
    mask[1] = False  # nothing valid in a sequence
    found = vmap(segment, in_dims=(None, 0, 0, 0, 0, 0))(given.params, state, x, y, reset, mask)
    assert_close(found, looped(given, own, reset=list(reset), mask=list(mask)))
    steps = mask[:, :, 0]
    found = vmap(segment, in_dims=(None, 0, 0, 0, None, 1))(
        given.params, state, x, y, reset[0], steps.T
    )
    assert_close(found, looped(given, own, reset=[reset[0]] * N, mask=list(steps)))


def test_a_reset_for_all_sequences(segments: Segments) -> None:
    """As a keyword it goes through vmap as it is."""
    given, calls = problem("gru_cell"), sequences("gru_cell", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    mapped = vmap(segments("gru_cell", "eager"), in_dims=(None, 0, 0, 0))
    own = [(given.params, *call[1:]) for call in calls]
    for reset in (torch.rand(5, B) < 0.4, torch.rand(5) < 0.4):
        found = mapped(given.params, state, x, y, reset=reset)
        assert_close(found, looped(given, own, reset=[reset] * N))


@pytest.mark.parametrize("shape", [(N, 5, B), (N, 5)])
def test_rows_of_each_entry_as_a_keyword(shape: tuple[int, ...]) -> None:
    """vmap does not map them: an error shows how."""
    given, calls = problem("gru_cell"), sequences("gru_cell", 5)
    segment = make_train_segment(given.step, given.loss, backend="eager")
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    words = (
        r"^mask: .* vmap\(lambda p, s, x, y, f: train_segment\(p, s, x, y, mask=f\)\)\(params, s"
    )
    with pytest.raises(ValueError, match=words):
        vmap(segment, in_dims=(None, 0, 0, 0))(
            given.params, state, x, y, mask=torch.ones(shape, dtype=torch.bool)
        )


class Wrapped(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x_t, h)
        return h, h


@pytest.mark.parametrize(
    "module", [nn.GRUCell(3, 4), Wrapped(nn.GRUCell(3, 4)), nn.GRU(3, 4, num_layers=4)]
)
def test_as_many_sequences_as_units_or_layers(module: nn.Module) -> None:
    """A reset for each sequence, as a keyword, was taken for one of each unit, or layer."""
    segment = make_train_segment(module, lambda out, y: out.square().mean(), backend="eager")
    params, reset = dict(module.named_parameters()), torch.rand(5, 4) < 0.4
    x, state = torch.randn(5, 4, 3), torch.randn(4, 4)
    if isinstance(module, nn.GRU):
        state = state.repeat(4, 1, 1)
    mapped = vmap(lambda s, x, f: segment(params, s, x, None, reset=f), in_dims=(0, 1, 1))
    mapped(state, x, reset)
    words = r"reset: has 4 rows, but state of shape .* has none: it is of one sequence\."
    with pytest.raises(
        ValueError, match=words + r" Give \[K\], or a batch\. torch\.func\.vmap maps"
    ):
        vmap(segment, in_dims=(None, 0, 1, None))(params, state, x, None, reset=reset)
    with pytest.raises(ValueError, match=words + r" Give \[K\], or a batch\.$"):
        segment(params, state[0], x[:, 0], None, reset=reset)


def test_learned_initial_state_and_none() -> None:
    """Each sequence resets to what its model has learned to start from."""
    given, calls = problem("elman_one_sequence"), sequences("elman_one_sequence", 5)

    def start(params: Tree) -> Tensor:
        return params["b"].tanh()

    segment = make_train_segment(given.step, given.loss, backend="eager", initial_state=start)
    params, state, x, y = (stacked([call[i] for call in calls]) for i in range(4))
    reset = torch.rand(N, 5) < 0.5
    dims = (0, 0, 0, 0, 0, None)
    found = vmap(with_rows(segment), in_dims=dims)(params, state, x, y, reset, None)
    results = [
        reference_segment(given.step, given.loss, *call, reset=flags, initial_state=start)
        for call, flags in zip(calls, reset, strict=True)
    ]
    assert_close(found, stacked(results))
    found = vmap(lambda p, x, y: segment(p, None, x, y))(params, x, y)
    first = torch.arange(5) == 0
    results = [
        reference_segment(given.step, given.loss, *call, reset=first, initial_state=start)
        for call in calls
    ]
    assert_close(found, stacked(results))


def test_evaluate(segments: Segments) -> None:
    given, calls = problem("lstm"), sequences("lstm", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    evaluate = segments("lstm", "eager").evaluate
    mapped = vmap(lambda *arguments: evaluate(*arguments)[1:], in_dims=(None, 0, 0, 0))
    found = mapped(given.params, state, x, y)
    expected = looped(given, [(given.params, *call[1:]) for call in calls])
    assert_close(found, tuple(expected)[1:])


def test_evaluate_as_it_is(segments: Segments) -> None:
    """Without gradients, for which there is no tensor that vmap could return."""
    given, calls = problem("lstm"), sequences("lstm", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    found = vmap(segments("lstm", "eager").evaluate, in_dims=(None, 0, 0, 0))(
        given.params, state, x, y
    )
    assert found.grads == ()
    expected = looped(given, [(given.params, *call[1:]) for call in calls])
    assert_close(tuple(found)[1:], tuple(expected)[1:])


def test_one_trace_for_all_calls() -> None:
    given, calls = problem("lstm_cell"), sequences("lstm_cell", 5)
    segment = make_train_segment(given.step, given.loss, backend="eager")
    state = stacked([call[1] for call in calls])
    for steps in (5, 3, 1):
        x, y = (stacked([call[i][:steps] for call in calls]) for i in (2, 3))
        vmap(segment, in_dims=(None, 0, 0, 0))(given.params, state, x, y)
    assert segment.trace_count == 1


# -- randomness ---------------------------------------------------------------------------------


def noisy_step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(nn.functional.dropout(x_t, 0.5) @ params["w"] + h)
    return nn.functional.dropout(torch.ones(h.shape, dtype=h.dtype), 0.5), h


def noisy() -> tuple[Any, tuple[Tree, ...]]:
    draw = Draw(0)
    segment = make_train_segment(noisy_step, mse, backend="eager")
    x = draw(5, D).expand(N, 5, D)
    return segment, ({"w": draw(D, H)}, draw(H).expand(N, H), x, draw(5, H).expand(N, 5, H))


def test_randomness_different() -> None:
    segment, arguments = noisy()
    found = vmap(segment, in_dims=(None, 0, 0, 0), randomness="different")(*arguments)
    noise = found.out  # [N, K, H] of 0 and 2
    assert set(noise.unique().tolist()) == {0.0, 2.0}
    assert not any(torch.equal(noise[0], noise[i]) for i in range(1, N))
    assert not any(torch.equal(noise[:, 0], noise[:, t]) for t in range(1, 5))
    assert not torch.equal(found.state[0], found.state[1])


def test_randomness_same() -> None:
    segment, arguments = noisy()
    found = vmap(segment, in_dims=(None, 0, 0, 0), randomness="same")(*arguments)
    assert all(torch.equal(found.out[0], found.out[i]) for i in range(1, N))
    assert not any(torch.equal(found.out[:, 0], found.out[:, t]) for t in range(1, 5))
    assert_close(found.state, found.state[:1].expand(N, H).contiguous())


def test_randomness_error_is_the_default() -> None:
    segment, arguments = noisy()
    with pytest.raises(RuntimeError, match="random"):
        vmap(segment, in_dims=(None, 0, 0, 0))(*arguments)


def test_another_transform_is_refused(segments: Segments) -> None:
    params, state, x, y = problem("elman").data(3)
    segment = segments("elman", "eager")
    with pytest.raises(RuntimeError) as raised:
        torch.func.functionalize(lambda x: segment(params, state, x, y).loss)(x)
    assert str(raised.value) == (
        "a segment runs under torch.func.vmap, but not under functionalize."
    )


@pytest.mark.parametrize("evaluates", [False, True])
def test_forward_mode_is_refused(evaluates: bool, segments: Segments) -> None:
    """The loss had no tangent, without a word, in a call that was recalled too."""
    params, state, x, y = problem("elman").data(3)
    segment = segments("elman", "eager")
    call = segment.evaluate if evaluates else segment
    call(params, state, x, y)
    with pytest.raises(RuntimeError, match=r"not differentiable: .* outside of .*linearize"):
        torch.func.linearize(lambda x: call(params, state, x, y).loss, x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="not differentiable"):
        call(params, state, forward_ad.make_dual(x, x), y)
    call(params, state, x, y)
