"""Seeds, one TrainSegment per question for the whole session, and a watch on torch's globals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from .cells import problem
from .distributed.ranks import Ranks
from .kernels import interpreter

if not torch.cuda.is_available():
    collect_ignore = ["gpu/test_gpu.py", "gpu/test_nccl.py"]


def _globals() -> dict[str, Any]:
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
        "garbage collection": gc.isenabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    torch.set_num_threads(2)
    gc.freeze()  # what is imported is not looked through at each collection: a tenth of the time


@pytest.fixture(autouse=True)
def _same_globals(_threads: None) -> Iterator[None]:
    """A seed before each test; after it, torch is as it was."""
    torch.manual_seed(0)
    before = _globals()
    yield
    assert _globals() == before


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of a kernel are NaN before it runs, so that what it leaves unwritten shows."""
    from ftbptt.backends import fused

    unfilled = fused._outputs

    def outputs(*given: Any) -> list[Tensor]:
        made = unfilled(*given)
        for tensor in made:
            tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 77)
        return made

    monkeypatch.setattr(fused, "_outputs", outputs)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """``backend="fused"`` runs its kernels, and all around them operation by operation.

    So nothing but kernels is compiled, and those are kept on disk.
    """
    from ftbptt import backends

    around = replace(backends.FUSED, build=backends.EAGER.build)
    monkeypatch.setitem(backends._BY_NAME, "fused", around)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, kernels: None) -> Iterator[None]:
    """As ``kernels``, with those of a GPU, interpreted."""
    interpreter.use(monkeypatch)
    with np.errstate(all="ignore"):  # what is behind the end of a row is computed as well
        yield


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cells run as large ones: in chunks of 16 steps, and not as one program."""
    from ftbptt.segment import execute

    monkeypatch.setattr(execute, "_UNCUT_BYTES", 0)
    monkeypatch.setattr(execute, "_passing_bytes", lambda loop: execute._CHUNK_BYTES // 16)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What would be compiled runs operation by operation, but for a test that wants the kernels."""
    if "kernels" not in request.fixturenames:
        from ftbptt import backends

        monkeypatch.setitem(backends._BY_NAME, "fused", backends.EAGER)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each chunk that ran as a segment."""
    from ftbptt import TrainSegment

    found: list[int] = []
    call = TrainSegment.__call__

    def counting(self: Any, params: Any, state: Any, x: Any, y: Any, **rest: Any) -> Any:
        found.append(len(x))
        return call(self, params, state, x, y, **rest)

    monkeypatch.setattr(TrainSegment, "__call__", counting)
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """``threads(n)`` sets torch's number of threads, for the test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def segments() -> Callable[..., Any]:
    """``segments(cell, backend, dtype, **options) -> TrainSegment``: each is made once a session.

    So a compile is paid once, and a test sees whether another call traces or compiles anew.
    """
    import ftbptt

    made: dict[Any, Any] = {}

    def make(name: str, backend: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        key = (name, backend, dtype, tuple(sorted(options.items())))
        if key not in made:
            given = problem(name, dtype)
            options.setdefault("time_dim", given.time_dim or None)
            made[key] = ftbptt.make_train_segment(
                given.step, given.loss, backend=backend, **options
            )
        return made[key]

    return make


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
