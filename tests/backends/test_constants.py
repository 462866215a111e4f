"""Frequencies and window functions, made of operations that Inductor has code for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ftbptt.backends.constants import CONSTANTS

FREQUENCIES = [torch.fft.fftfreq, torch.fft.rfftfreq]
WINDOWS = [
    torch.hann_window,
    torch.hamming_window,
    torch.blackman_window,
    torch.bartlett_window,
    torch.kaiser_window,
]


def assert_made_of_others(make: Callable[[], Tensor]) -> None:
    program = make_fx(make, decomposition_table=CONSTANTS, tracing_mode="fake")()
    assert not [node for node in program.graph.nodes if node.target in CONSTANTS]
    torch.testing.assert_close(program(), make())


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("n", [7, 8])
@pytest.mark.parametrize("frequencies", FREQUENCIES)
def test_frequencies(frequencies: Callable[..., Tensor], n: int, dtype: torch.dtype | None) -> None:
    assert_made_of_others(lambda: frequencies(n, 0.3, dtype=dtype))


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 8])
@pytest.mark.parametrize("periodic", [(), (True,), (False,)])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(
    window: Callable[..., Tensor], periodic: Any, n: int, dtype: torch.dtype | None
) -> None:
    assert_made_of_others(lambda: window(n, *periodic, dtype=dtype))


@pytest.mark.parametrize("given", [(0.6,), (0.6, 0.3)])
def test_coefficients(given: tuple[float, ...]) -> None:
    assert_made_of_others(lambda: torch.hamming_window(7, True, *given))
    assert_made_of_others(lambda: torch.kaiser_window(7, False, beta=10 * given[0]))
