"""On a GPU: the table of cells through its backends, and what CUDA graphs must not do.

``make test-gpu``; elsewhere skipped. A segment is run, captured and replayed: three calls each.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bench.cells import LayerNormLSTM
from ftbptt import as_step, make_train_segment

from ..cells import CELLS, NOT_BFLOAT16, WITH_ROWS, problem
from ..cells.problems import D, Draw, Problem, mse
from ..oracle import assert_close, check, check_low_precision, reference
from ..segment.test_parity import flags

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BACKENDS = ("cudagraph", "fused")
_LONGEST_TEST = 600.0  # seconds, most of which is compilation


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A kernel that waits for another for ever cannot be interrupted: the process ends."""
    faulthandler.dump_traceback_later(_LONGEST_TEST, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def on_gpu(name: str, dtype: torch.dtype = torch.float64) -> Problem:
    return problem(name, dtype).on("cuda")


def lstm(rows: int, units: int, dtype: torch.dtype) -> Problem:
    draw = Draw(0)
    module = draw.module(lambda: torch.nn.LSTMCell(D, units))
    state = draw(rows, units), draw(rows, units)
    x, y = draw.sequence(rows, D), draw.sequence(rows, units)
    params = dict(module.named_parameters())
    return Problem(as_step(module), params, state, x, y, mse, rows).to(dtype).on("cuda")


class NormLSTM(LayerNormLSTM):
    def forward(self, x_t: Tensor, state: Any) -> Any:
        h, c = super().forward(x_t, state)
        return h, (h, c)


def layer_norm(rows: int, units: int, dtype: torch.dtype) -> Problem:
    """Whose programs also wait for each other to normalize."""
    draw = Draw(0)
    module = draw.module(lambda: NormLSTM(D, units))
    state = draw(rows, units), draw(rows, units)
    x, y = draw.sequence(rows, D), draw.sequence(rows, units)
    params = dict(module.named_parameters())
    return Problem(as_step(module), params, state, x, y, mse, rows).to(dtype).on("cuda")


def make(given: Problem, backend: str, **options: Any) -> Any:
    return make_train_segment(
        given.step, given.loss, backend=backend, time_dim=given.time_dim or None, **options
    )


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cells(name: str, backend: str) -> None:
    given = on_gpu(name)
    segment = make(given, backend)
    for steps in (7, 7, 7, 1, 2, 63, 1, 7):
        check(segment, given, steps)
    assert segment.trace_count == 1


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name in NOT_BFLOAT16:
        pytest.skip("torch has no such complex numbers")
    given = on_gpu(name, dtype)
    segment = make(given, "fused")
    for _ in range(3):
        check_low_precision(segment, given, 7)


@pytest.mark.parametrize("rows", [5, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_split_weights(dtype: torch.dtype, rows: int) -> None:
    """Programs that wait for each other: many times, in turns with others, and replayed.

    No multiprocessor can hold the weights.
    """
    given = lstm(rows, 200, dtype)
    segment = make(given, "fused")
    assert "its weights split over" in str(segment.explain(*given.data(63)))
    for steps in (63, 63, 63, 1, 200, 63):
        check_low_precision(segment, given, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_split_reductions_and_resets(dtype: torch.dtype) -> None:
    """Few steps: its gradients are chaotic over many."""
    given = layer_norm(37, 200, dtype)
    segment = make(given, "fused")
    assert "its weights split over" in str(segment.explain(*given.data(5)))
    for seed in (1, 2, 3):
        check_low_precision(segment, given, 5)
        check_low_precision(segment, given, 5, reset=flags(5, 37, seed=seed).cuda())


@pytest.fixture(params=["float32", "tf32", "bfloat16"])
def low_precision(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The dtype; ``tf32`` is float32 with products of that precision."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield torch.bfloat16 if request.param == "bfloat16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = before


def test_split_weights_of_many_rows(low_precision: torch.dtype) -> None:
    """Tiles of 32 rows, with a matrix unit; else there is no kernel."""
    given = lstm(500, 200, low_precision)
    segment = make(given, "fused")
    if torch.cuda.get_device_properties().multi_processor_count == 132:
        has_kernel = low_precision != torch.float32 or torch.backends.cuda.matmul.allow_tf32
        assert ("its weights split over" in str(segment.explain(*given.data(7)))) == has_kernel
    for steps in (7, 7, 7, 63):
        check_low_precision(segment, given, steps)


@pytest.mark.parametrize(("rows", "units"), [(4001, 7), (9001, 7), (9001, 32), (3001, 64)])
def test_many_rows(low_precision: torch.dtype, rows: int, units: int) -> None:
    """Tiles of 32 and 64 rows, whose products are those of a group of warps."""
    given = lstm(rows, units, low_precision)
    segment = make(given, "fused")
    for steps in (7, 7, 7, 1):
        check_low_precision(segment, given, steps)


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_and_recompute(name: str, backend: str) -> None:
    given = on_gpu(name)
    segment = make(given, backend, recompute=True)
    for seed in (1, 2, 3):  # replayed with other flags than were captured
        reset = flags(7, given.rows, seed=seed)
        reset = reset.movedim(0, given.time_dim).cuda()
        check(segment, given, 7, reset=reset)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_what_it_is_given(backend: str) -> None:
    """Inputs that the caller changed, in place or for others; results that it keeps."""
    given = on_gpu("lstm_readout")
    segment = make(given, backend)
    params, state, x, y = given.data(7)
    for _ in range(2):
        segment(params, state, x, y)
    kept = segment(params, state, x, y)
    before = tree_map(Tensor.clone, tuple(kept))
    for scale in (0.5, -1.0):
        x.mul_(scale)
        wanted = make(given, "eager")(params, state, x, y)
        assert_close(segment(params, state, x, y), wanted)
    assert_close(tuple(kept), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_segments_in_turns(backend: str) -> None:
    """They share a pool of memory."""
    names = ("lstm_readout", "layer_norm_lstm", "gru_3_layers")
    made = {name: (on_gpu(name), make(on_gpu(name), backend)) for name in names}
    for steps in (7, 7, 3, 3, 7, 3):
        for given, segment in made.values():
            check(segment, given, steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_differs_from_replay_to_replay(backend: str) -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.5)).cuda()

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = module(torch.tanh(x_t + params["w"] * h))
        return h, h

    params = {"w": torch.ones((), device="cuda")}
    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(), backend=backend)
    x = torch.randn(5, 4, 8, device="cuda")
    outs = [segment(params, torch.zeros(4, 8, device="cuda"), x, x).out for _ in range(4)]
    kept = torch.stack([out == 0 for out in outs])
    assert all(not torch.equal(a, b) for a, b in pairwise(kept))
    assert 0.3 < kept.float().mean() < 0.7


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap(backend: str) -> None:
    given = on_gpu("elman_one_sequence")
    params, state, x, y = given.data(5)
    many = [torch.stack([leaf, 0.5 * leaf, -leaf]) for leaf in (state, x, y)]
    in_dims = (None, 0, 0, 0)
    segment = torch.func.vmap(make(given, backend), in_dims=in_dims)
    wanted = torch.func.vmap(make(given, "eager"), in_dims=in_dims)(params, *many)
    for _ in range(3):
        assert_close(tuple(segment(params, *many)), tuple(wanted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str) -> None:
    given = on_gpu("lstm_readout", torch.float32)
    segment = make(given, backend)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            found = segment(*given.data(7))
    exact = reference(given.to(torch.float64), 7)
    torch.testing.assert_close(found.loss.double(), exact.loss, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow(backend: str) -> None:
    given = on_gpu("lstm_readout")
    segment = make(given, backend)
    data = {steps: given.data(steps) for steps in (7, 3)}
    for _ in range(3):
        for own in data.values():
            segment(*own)
    gc.collect()  # what other tests have left must not be given back in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(1000):
        segment(*data[7 if i % 3 else 3])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_sanitizer() -> None:
    """compute-sanitizer finds nothing in kernels of odd shapes."""
    if not (tool := shutil.which("compute-sanitizer")):
        pytest.skip("no compute-sanitizer")
    done = subprocess.run(
        [tool, "--error-exitcode", "9", "--report-api-errors", "no",
         "--target-processes", "application-only", sys.executable, "-m", "tests.gpu.on_gpu"],
        env={
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # each tensor has its own bounds
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers, which would be watched as well
        },
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "0 errors" in done.stdout
