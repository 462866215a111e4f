"""Whole programs of a GPU, against the oracle. Run by ``test_gpu_programs``, on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.cuda.amp import common
from torch.utils._pytree import tree_map

from ftbptt import make_train_segment, reference_segment
from ftbptt.kernels.gpu import kernel as triton_kernel
from ftbptt.kernels.gpu import placement
from ftbptt.segment import capture

from ..cells import CELLS, NOT_BFLOAT16, WITH_ROWS, problem
from ..oracle import assert_close, check, check_low_precision
from ..segment.test_capture import Captures
from ..segment.test_parity import flags
from . import emulated_gpu

BACKENDS = ("fused", "cudagraph")


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    """An emulated GPU, with the stand-in for CUDA graphs."""
    found = Captures()
    monkeypatch.setattr(capture, "_capture", found.capture)
    with emulated_gpu.emulated(monkeypatch):
        yield found


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cells(name: str, backend: str, captures: Captures) -> None:
    given = problem(name)
    segment = make_train_segment(
        given.step, given.loss, backend=backend, time_dim=given.time_dim or None
    )
    for steps in (3, 1, 3, 3):
        check(segment, given, steps)
    assert (captures.made, captures.replayed) == (1, 2)


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_and_recompute(name: str, backend: str) -> None:
    given = problem(name)
    segment = make_train_segment(
        given.step, given.loss, backend=backend, time_dim=given.time_dim or None, recompute=True
    )
    reset = flags(5, given.rows, seed=1).movedim(0, given.time_dim)
    check(segment, given, 5, reset=reset)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name in NOT_BFLOAT16:
        pytest.skip("torch has no such complex numbers")
    given = problem(name, dtype)
    segment = make_train_segment(
        given.step, given.loss, backend="fused", time_dim=given.time_dim or None
    )
    check_low_precision(segment, given, 5)


@pytest.mark.parametrize("models", [False, True], ids=["sequences", "models"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap(backend: str, models: bool) -> None:
    given = problem("elman_one_sequence")
    own = [tree_map(lambda leaf, s=s: s * leaf, given.data(5)) for s in (1.0, 0.5, -1.0)]
    if not models:
        own = [(given.params, *others) for _, *others in own]
    expected = [reference_segment(given.step, given.loss, *arguments) for arguments in own]
    params, *others = tree_map(lambda *leaves: torch.stack(leaves), *own)
    in_dims = (0 if models else None, 0, 0, 0)
    segment = make_train_segment(given.step, given.loss, backend=backend)
    found = torch.func.vmap(segment, in_dims)(params if models else given.params, *others)
    assert_close(tuple(found), tree_map(lambda *leaves: torch.stack(leaves), *map(tuple, expected)))


@pytest.mark.parametrize(
    "options", [{"window": 3}, {"taps": True}, {"context": 2}], ids=["window", "taps", "context"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options(backend: str, options: dict[str, object]) -> None:
    given = problem("lstm_readout")
    made, wanted = (
        make_train_segment(given.step, given.loss, backend=name, **options)
        for name in (backend, "eager")
    )
    assert_close(tuple(made(*given.data(7))), tuple(wanted(*given.data(7))))


@pytest.mark.parametrize("name", ["lstm_readout", "layer_norm_lstm"])
def test_split_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no multiprocessor could hold the weights of these small cells."""
    monkeypatch.setattr(triton_kernel, "_SHARED_BYTES_OF_ROWS", triton_kernel._SHARED_BYTES)
    monkeypatch.setattr(placement, "_LEAST_COLUMNS", 2)
    given = problem(name)
    segment = make_train_segment(given.step, given.loss, backend="fused")
    assert "its weights split over" in str(segment.explain(*given.data(3)))
    for steps in (3, 1, 3, 3):
        check(segment, given, steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask(backend: str) -> None:
    """Replayed with other masks than were captured."""
    given = problem("gru_batch_first")
    segment = make_train_segment(
        given.step, given.loss, backend=backend, time_dim=given.time_dim or None
    )
    for seed in (1, 2, 3):
        mask = flags(5, given.rows, seed=seed, true=0.7).movedim(0, given.time_dim)
        check(segment, given, 5, mask=mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluate(backend: str) -> None:
    given = problem("lstm_readout")
    segment = make_train_segment(given.step, given.loss, backend=backend)
    wanted = reference_segment(given.step, given.loss, *given.data(5)).loss
    for _ in range(3):
        assert_close(segment.evaluate(*given.data(5)).loss, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_differs_from_call_to_call(backend: str) -> None:
    def step(params: dict[str, Tensor], x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.nn.functional.dropout(torch.tanh(x_t + params["w"] * h))
        return h, h

    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend=backend)
    x = torch.ones(5, 4, 8)
    outs = [segment({"w": torch.ones(())}, x[0], x, x).out for _ in range(4)]
    kept = torch.stack([out != 0 for out in outs]).flatten(1).double()
    assert len({tuple(one) for one in kept.tolist()}) == 4
    assert 0.4 < kept.mean() < 0.6


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: False)
    given = problem("lstm_readout", torch.float32)
    segment = make_train_segment(given.step, given.loss, backend=backend)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            found = segment(*given.data(7))
    exact = reference_segment(given.step, given.loss, *problem("lstm_readout").data(7))
    assert 0 < (found.loss - exact.loss).abs() < 0.02
