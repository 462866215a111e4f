"""Tensors that are made of numbers alone, for which Inductor (2.13) has no code.

Its calls to torch's own do not compile in C++. They become operations that it has code for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.signal import windows

from ..compiler.graphs import aten


def _rfftfreq(n: int, d: float = 1.0, **options: Any) -> Tensor:
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    return torch.arange(n // 2 + 1, dtype=dtype, **options) * (1 / (n * d))


def _fftfreq(n: int, d: float = 1.0, **options: Any) -> Tensor:
    """From 0 up, and then the negative frequencies."""
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    counts = torch.arange(n, dtype=dtype, **options)
    return torch.where(counts < (n + 1) // 2, counts, counts - n) * (1 / (n * d))


def _cosine_window(*default: float) -> Callable[..., Tensor]:
    def window(n: int, periodic: bool = True, *given: float, **options: Any) -> Tensor:
        coefficients = [*given, *default[len(given) :]]
        return windows.general_cosine(n, a=coefficients, sym=not periodic, **_used(options))

    return window


def _bartlett_window(n: int, periodic: bool = True, **options: Any) -> Tensor:
    return windows.bartlett(n, sym=not periodic, **_used(options))


def _kaiser_window(n: int, periodic: bool = True, beta: float = 12.0, **options: Any) -> Tensor:
    return windows.kaiser(n, beta=beta, sym=not periodic, **_used(options))


def _used(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.get(name) for name in ("dtype", "device")}


CONSTANTS: dict[Any, Callable[..., Tensor]] = {
    getattr(operation, overload): made
    for operation, made in {
        aten.fft_fftfreq: _fftfreq,
        aten.fft_rfftfreq: _rfftfreq,
        aten.hann_window: _cosine_window(0.5, 0.5),
        aten.hamming_window: _cosine_window(0.54, 0.46),
        aten.blackman_window: _cosine_window(0.42, 0.5, 0.08),
        aten.bartlett_window: _bartlett_window,
        aten.kaiser_window: _kaiser_window,
    }.items()
    for overload in operation.overloads()
    if "out" not in overload
}
