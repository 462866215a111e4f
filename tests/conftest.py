"""Seeds, one TrainSegment per question for the whole session, and a watch on torch's globals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .cells import problem


def _globals() -> dict[str, Any]:
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _same_globals(_threads: None) -> Iterator[None]:
    """A seed before each test; after it, torch is as it was."""
    torch.manual_seed(0)
    before = _globals()
    yield
    assert _globals() == before


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
