"""``compare_to_reference``: accepts correct results, detects wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import TrainSegment, compare_to_reference, make_train_segment, reference_segment
from ftbptt.debug import eager_loop

from ..cells import REPRESENTATIVE, problem
from ..cells.problems import mse, named

Tree = Any
K, B = 5, 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_table_agrees(name: str, dtype: torch.dtype) -> None:
    case = problem(name, dtype)
    segment = make_train_segment(
        case.step, case.loss, backend="eager", time_dim=case.time_dim or None
    )
    comparison = compare_to_reference(segment, *case.data(K))
    assert comparison.agrees, str(comparison)
    assert {"loss", "out", "state", "grads"} <= {
        leaf.path.split("[")[0] for leaf in comparison.leaves
    }
    for leaf in comparison.leaves:
        if leaf.path.startswith("grads") and dtype == torch.float32 and leaf.scale > 1e-2:
            assert 0 < leaf.off < 1e-5


def recurrence(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x_t * params["w"] + h @ params["u"])
    return h, h


def arguments(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    params = {"w": torch.randn(4), "u": torch.randn(4, 4) / 2, "h0": torch.randn(4)}
    x, y = torch.randn(K, B, 4), torch.randn(K, B, 4)
    params = {name: value.to(dtype) for name, value in params.items()}
    return params, torch.randn(B, 4).to(dtype), x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("in_dims", [None, (None, 0, 1, 1), (None, None, 1, None)])
@pytest.mark.parametrize("start", ["given", "none", "learned"])
def test_flags_and_starts(in_dims: Any, start: str) -> None:
    """Resets, padding, ``in_dims`` and every kind of initial state."""
    params, state, x, y = arguments()
    initial = (lambda params: params["h0"]) if start == "learned" else torch.ones(4)
    if in_dims is None and start == "learned":
        initial = lambda params: params["h0"].expand(B, 4)  # noqa: E731
    segment = make_train_segment(
        recurrence, lambda out, y: (out - y).square().mean(-1), backend="eager",
        in_dims=in_dims, initial_state=initial,
    )  # fmt: skip
    if in_dims is not None and in_dims[1] is None:
        state = state[0]
    if in_dims is not None and in_dims[3] is None:
        y = y[:, 0]
    generator = torch.Generator().manual_seed(1)
    reset, mask = (torch.rand(K, B, generator=generator) < 0.3 for _ in range(2))
    if start != "given":
        state = None if in_dims is not None or start == "learned" else state
    comparison = compare_to_reference(segment, params, state, x, y, reset=reset, mask=mask)
    assert comparison.agrees, str(comparison)


class Wrong(TrainSegment):
    """A segment with a gradient that is slightly off."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        result = super().__call__(*args, **flags)
        result.grads["u"][1, 2] += 1e-3
        return result


def wrong() -> Wrong:
    correct = make_train_segment(recurrence, mse, backend="eager")
    return Wrong(correct.recipe, "eager")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrong_gradient_is_detected(dtype: torch.dtype) -> None:
    comparison = compare_to_reference(wrong(), *arguments(dtype))
    assert not comparison.agrees
    assert [leaf.path for leaf in comparison.leaves if not leaf.agrees] == ["grads['u']"]
    lines = str(comparison).splitlines()
    assert lines[0].endswith("1 leaf differs from the eager loop in float64")
    (line,) = [line for line in lines if line.endswith("differs")]
    assert line.split()[:2] == ["grads['u']", "4x4"]


def test_the_comparison_prints_as_a_table() -> None:
    segment = make_train_segment(recurrence, mse, backend="eager")
    text = str(compare_to_reference(segment, *arguments(torch.float64)))
    assert text.splitlines()[0] == (
        "TrainSegment(recurrence, backend='eager'), 5 steps: agrees with the eager loop in float64"
    )
    assert text.splitlines()[1].split() == ["leaf", "shape", "size", "off", "by", "eager", "loop"]
    assert "loss" in text
    assert "scalar" in text


def test_nan_in_both_results_agrees() -> None:
    params, state, x, y = arguments()
    x[2, 0, 1] = float("nan")
    segment = make_train_segment(recurrence, mse, backend="eager")
    comparison = compare_to_reference(segment, params, state, x, y)
    assert comparison.agrees, str(comparison)


def test_a_state_of_integers() -> None:
    """They have a size, as other leaves do."""

    def counting(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        out, h = recurrence(params, x_t, state[0])
        return out, (h, state[1] + 3)

    params, h, x, y = arguments()
    segment = make_train_segment(counting, mse, backend="eager")
    state = h, torch.zeros(4, dtype=torch.int64)
    comparison = compare_to_reference(segment, params, state, x, y)
    (counts,) = (leaf for leaf in comparison.leaves if leaf.path == "state[1]")
    assert (counts.scale, counts.off, counts.agrees) == (3.0 * len(x), 0.0, True)
    assert "nan" not in str(comparison)


@pytest.mark.parametrize("in_dims", [None, (None, 0, 1, 1)])
def test_a_buffer_of_integers_among_the_parameters(in_dims: Any) -> None:
    params, state, x, y = arguments()
    params = {**params, "count": torch.tensor(2)}
    segment = make_train_segment(recurrence, mse, backend="eager", in_dims=in_dims)
    result = compare_to_reference(segment, params, state, x, y)
    assert result.agrees
    assert "grads['count']" in [leaf.path for leaf in result.leaves]


def test_a_complex_buffer() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(4, 4)
            self.register_buffer("rotation", torch.randn(4, 4, dtype=torch.complex64) / 4)

        def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = h @ self.rotation + self.into(x_t)
            return h.real, h

    _, h, x, y = arguments()
    module = Rotated()
    segment = make_train_segment(module, mse, backend="eager")
    assert compare_to_reference(segment, named(module), h.to(torch.complex64), x, y).agrees
    assert module.rotation.dtype == torch.complex64


def test_no_target() -> None:
    """A loss that reads ``out`` alone."""
    params, state, x, _ = arguments()
    segment = make_train_segment(recurrence, lambda out, _: out.square().mean(), backend="eager")
    comparison = compare_to_reference(segment, params, state, x, None)
    assert comparison.agrees, str(comparison)


# -- bad input ------------------------------------------------------------------------------------


def test_random_numbers_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw from a GPU's generator leaves that of the CPU unchanged."""
    draws = 0

    def drawing(*args: Any, **options: Any) -> Any:
        nonlocal draws
        draws += 1
        return reference_segment(*args, **options)

    monkeypatch.setattr(eager_loop, "reference_segment", drawing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor(draws)])
    segment = make_train_segment(recurrence, mse, backend="eager")
    with pytest.raises(ValueError, match=r"step: draws random numbers"):
        compare_to_reference(segment, *arguments())


def test_random_numbers() -> None:
    module = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    segment = make_train_segment(module, mse, backend="eager")
    _, _, x, y = arguments()
    with pytest.raises(ValueError, match=r"step: draws random numbers.*call module.eval\(\)"):
        compare_to_reference(segment, named(module), None, x, y)


@pytest.mark.parametrize("options", [{"taps": True}, {"window": 3}])
def test_segments_without_a_plain_loop(options: dict[str, Any]) -> None:
    segment = make_train_segment(nn.GRUCell(4, 4), mse, **options)
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"train_segment: was made with {name}="):
        compare_to_reference(segment, *arguments())


def test_a_loss_with_a_fixed_dtype() -> None:
    weight = torch.ones(4, 4)
    segment = make_train_segment(recurrence, lambda out, y: mse(out @ weight, y), backend="eager")
    with pytest.raises(RuntimeError) as caught:
        compare_to_reference(segment, *arguments())
    note = caught.value.__notes__[-1]
    assert "must follow the dtype of its inputs: .to(x.dtype)" in note
    assert note.endswith("with reference_segment(step, loss, ...) in the dtype of the data.")


def test_a_step_that_fixes_float32() -> None:
    """As a surrogate of snnTorch, whose spikes are ``(x > 0).float()``."""

    def spiking(params: Any, x_t: Any, h: Any) -> Any:
        spikes = (h > 0).float()
        return spikes @ params["w"], torch.tanh(h + x_t @ params["w"])

    segment = make_train_segment(spiking, mse, backend="eager")
    data = {"w": torch.ones(4, 4)}, torch.zeros(3, 4), torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    with pytest.raises(RuntimeError) as caught:
        compare_to_reference(segment, *data)
    assert "a layer of a library fixes float32 inside" in caught.value.__notes__[-1]
    expected = reference_segment(spiking, mse, *data)
    torch.testing.assert_close(tuple(segment(*data)), tuple(expected))


def test_no_train_segment() -> None:
    with pytest.raises(TypeError, match="train_segment: expected what make_train_segment returns"):
        compare_to_reference(mse, *arguments())  # type: ignore[arg-type]


def test_a_recurrent_layer_with_a_parametrization() -> None:
    """It holds tensors that have a history, which a deep copy refuses."""
    layer = torch.nn.utils.parametrizations.weight_norm(nn.GRU(2, 3), "weight_hh_l0")
    segment = make_train_segment(layer, mse, backend="eager")
    given = named(layer), torch.zeros(1, B, 3), torch.randn(K, B, 2), torch.zeros(K, B, 3)
    assert compare_to_reference(segment, *given).agrees
