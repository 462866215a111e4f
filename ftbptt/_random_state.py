"""The states of the global random number generators: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The state of every global generator: Python's, torch's and, once imported, NumPy's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), **random_state_outside_torch()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def random_state_outside_torch() -> dict[str, Any]:
    """The same of Python's and, once imported, NumPy's."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, numbers, gauss]}
    if "numpy" in sys.modules:  # otherwise nothing has drawn from it
        import numpy

        # As a dict: the legacy tuple exists for the default bit generator only.
        state["numpy"] = _with_tensors(numpy.random.get_state(legacy=False))
    return state


def _with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a bit generator of NumPy, its arrays as [dtype, bytes as a tensor].

    Bytes, since torch has no full support of unsigned integers.
    """
    import numpy

    plain: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            plain[name] = _with_tensors(value)
        elif isinstance(value, numpy.ndarray):
            plain[name] = [value.dtype.str, torch.from_numpy(value.view(numpy.uint8))]
        else:
            plain[name] = value
    return plain


def _with_arrays(plain: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`_with_tensors`."""
    state: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            state[name] = _with_arrays(value)
        elif isinstance(value, list):
            dtype, content = value
            state[name] = content.numpy().view(dtype)
        else:
            state[name] = value
    return state


def same_random_state(a: Any, b: Any) -> bool:
    """Whether two random states, or parts of them, are equal: nothing was drawn in between."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_random_state(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_random_state, a, b))
    return bool(a == b)


def seed_random_state(seed: int) -> None:
    """Seeds what :func:`random_state` returns, and nothing else.

    ``torch.manual_seed`` would also seed CUDA where it is not initialized yet, once it is.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if "numpy" in sys.modules:
        import numpy

        with suppress(TypeError, ValueError):  # a bit generator of the caller's that takes no seed
            numpy.random.seed([seed % 2**32, seed >> 32])


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what :func:`random_state` returned.

    Raises ValueError if NumPy's global generator is of another kind now.
    """
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        saved: list[Tensor] = state["cuda"]
        torch.cuda.set_rng_state_all(saved[: torch.cuda.device_count()])
    if "numpy" in state:
        import numpy

        try:
            numpy.random.set_state(_with_arrays(state["numpy"]))
        except ValueError as error:
            name = state["numpy"]["bit_generator"]
            raise ValueError(
                f"checkpoint: NumPy's global generator was a {name}, but is another now ({error}). "
                f"Call numpy.random.set_bit_generator(numpy.random.{name}()) before resuming."
            ) from error
