"""The fused backend under torch.func.vmap: ensembles, sequences, nested, on several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import vmap

from ftbptt import SegmentOutput, make_train_segment, reference_segment

from ..cells import CELLS, problem, slow_but
from ..cells.problems import B, Draw, mse
from ..oracle import assert_close
from ..segment.test_vmap import check_ensemble, check_shared, with_rows
from ..sequences import N, looped, sequences, stacked

pytestmark = pytest.mark.usefixtures("kernels")
SetThreads = Callable[[int], None]
QUICK = ["lstm_readout", "counter_and_flag", "elman_one_sequence"]


def fused(name: str, **options: Any) -> Any:
    given = problem(name)
    options = {"backend": "fused", "time_dim": given.time_dim or None} | options
    return make_train_segment(given.step, given.loss, **options)


@pytest.mark.parametrize("name", slow_but(QUICK, CELLS))
def test_shared_parameters(name: str) -> None:
    for steps in (3, 1):
        check_shared(fused(name), name, steps)


@pytest.mark.parametrize("name", slow_but(QUICK, CELLS))
def test_ensemble(name: str, threads: SetThreads) -> None:
    segment = fused(name)
    for count, steps in ((1, 3), (2, 1), (3, 3), (5, 2)):  # models: fewer than threads, and more
        threads(count)
        check_ensemble(segment, name, steps)
    assert segment.trace_count == 1


@pytest.mark.parametrize("name", slow_but(["lstm_cell", "lstm_readout"], CELLS))
def test_as_many_models_as_rows(name: str) -> None:
    """Weights of the models could be taken for those of the rows."""
    check_ensemble(fused(name), name, 3, count=B)


@pytest.mark.parametrize("dim", [1, -1])
def test_other_axes(dim: int) -> None:
    given, calls = problem("lstm_readout"), sequences("lstm_readout", 5)
    x, y = (stacked([call[i] for call in calls], dim=dim) for i in (2, 3))
    state = stacked([call[1] for call in calls], dim=1)
    dims = SegmentOutput(0, 1, 0, 1)
    mapped = vmap(fused("lstm_readout"), in_dims=(None, 1, dim, dim), out_dims=dims)
    found = mapped(given.params, state, x, y)
    expected = looped(given, [(given.params, *call[1:]) for call in calls])
    assert_close(found.out.movedim(1, 0), expected.out)
    assert_close(found.grads, expected.grads)


@pytest.mark.parametrize("which", [1, 2])
def test_only_one_argument_is_mapped(which: int) -> None:
    given, calls = problem("lstm_readout"), sequences("lstm_readout", 5)
    own = [tuple(c[i] if i == which else calls[0][i] for i in range(4)) for c in calls]
    arguments = list(calls[0])
    arguments[which] = stacked([call[which] for call in calls])
    dims = tuple(0 if i == which else None for i in range(4))
    assert_close(vmap(fused("lstm_readout"), in_dims=dims)(*arguments), looped(given, own))


def test_only_one_parameter_is_mapped() -> None:
    given = problem("elman")
    calls = [
        ({**given.params, "b": problem("elman", seed=seed).params["b"]}, *given.data(5)[1:])
        for seed in range(N)
    ]
    params = {**given.params, "b": stacked([call[0]["b"] for call in calls])}
    dims = {name: 0 if name == "b" else None for name in params}
    mapped = vmap(fused("elman"), in_dims=(dims, None, None, None))
    assert_close(mapped(params, *given.data(5)[1:]), looped(given, calls))


def test_nested(threads: SetThreads) -> None:
    """An ensemble of models, each over its own sequences."""
    given = problem("gru_cell")
    models = [problem("gru_cell", seed=seed).params for seed in range(2)]
    calls = sequences("gru_cell", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    rows = [looped(given, [(params, *call[1:]) for call in calls]) for params in models]
    segment = fused("gru_cell")
    for count in (1, 3):
        threads(count)
        inner = vmap(segment, in_dims=(None, 0, 0, 0))
        found = vmap(inner, in_dims=(0, None, None, None))(stacked(models), state, x, y)
        assert_close(found, stacked(rows))
        # The models inside: their weights are behind the axis of the sequences.
        inner = vmap(segment, in_dims=(0, None, None, None))
        found = vmap(inner, in_dims=(None, 0, 0, 0))(stacked(models), state, x, y)
        turned = [looped(given, [(params, *call[1:]) for params in models]) for call in calls]
        assert_close(found, stacked(turned))


def test_reset_and_mask() -> None:
    given, calls = problem("lstm_cell"), sequences("lstm_cell", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    own = [(given.params, *call[1:]) for call in calls]
    reset, mask = torch.rand(N, 5, 3) < 0.4, torch.rand(N, 5, 3) < 0.6
    mask[1] = False  # nothing valid in a sequence
    segment = with_rows(fused("lstm_cell"))
    found = vmap(segment, in_dims=(None, 0, 0, 0, 0, 0))(given.params, state, x, y, reset, mask)
    assert_close(found, looped(given, own, reset=list(reset), mask=list(mask)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_cell", "layer_norm_lstm"])
def test_compiled(name: str) -> None:
    """The whole program through Inductor, where ``kernels`` does not reach."""
    given = problem(name)
    segment = make_train_segment(given.step, given.loss, backend="fused")
    check_ensemble(segment, name, 7)
    check_shared(segment, name, 7)
    traced, compiled = segment.trace_count, segment.compile_count
    for steps in (1, 2):
        check_ensemble(segment, name, steps)
        check_shared(segment, name, steps)
    assert (segment.trace_count, segment.compile_count) == (traced, compiled)


@pytest.mark.parametrize(
    ("models", "rows", "blocks", "slots"),
    [(2, 3, 2, 1), (2, 2, 2, 1), (3, 2, 2, 1), (2, 2, 2, 2), (2, 1, 3, 2)],
)
def test_block_diagonal_weights_of_each_model(
    models: int, rows: int, blocks: int, slots: int
) -> None:
    """A product with a batch of weights, each of which is for several rows or slots."""
    size = 4

    def step(params: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        parts = h.view(*h.shape[:-1], blocks, size)
        mixed = torch.einsum("...gk,gkn->...gn", parts, params["w"]).reshape(h.shape)
        h = torch.tanh(mixed + x)
        return h, h

    draw, shape = Draw(0), (rows, slots, blocks * size) if slots > 1 else (rows, blocks * size)
    weights = {"w": draw(models, blocks, size, size)}
    state, x, y = draw(models, *shape), draw(models, 3, *shape), draw(models, 3, *shape)
    found = vmap(make_train_segment(step, mse, backend="fused"))(weights, state, x, y)
    calls = [
        reference_segment(step, mse, {"w": weights["w"][i]}, state[i], x[i], y[i])
        for i in range(models)
    ]
    assert_close(found, stacked(calls))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_heads_whose_slots_mix(rows: int) -> None:
    """The vectors of a row are not side by side, which a kernel cannot have."""

    def step(params: Any, x: torch.Tensor, m: torch.Tensor) -> Any:
        heads = torch.einsum("btgk,gkn->btgn", m.view(rows, 3, 2, 4), params["w"])
        m = torch.tanh(heads.reshape(rows, 3, 8) + m.mean(1, keepdim=True) + x)
        return m, m

    draw = Draw(0)
    given = {"w": draw(2, 4, 4)}, draw(rows, 3, 8), draw(3, rows, 3, 8), draw(3, rows, 3, 8)
    found = make_train_segment(step, mse, backend="fused")(*given)
    assert_close(found, reference_segment(step, mse, *given))
