"""Kernels compiled for an H200, without one: they fit a multiprocessor, and no type is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from .cells import CELLS

SHARED = 227 << 10  # bytes that one program can have
SPILLED = 512  # bytes written to memory for want of registers, in the whole kernel


def compiled(*names: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_triton", *names]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_they_fit() -> None:
    found = compiled()
    assert len(found) == 10
    found |= compiled("min_gru")
    assert sum(name.endswith("run_composed") for name in found) == 2
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED, (name, kernel)
        assert kernel["spilled"] <= SPILLED, (name, kernel)


@pytest.mark.slow
def test_every_cell() -> None:
    """The interpreter has no types: what changes its own from step to step is found here."""
    found = compiled(*CELLS)
    assert len({name.split("-")[0] for name in found}) > 0.8 * len(CELLS)
    assert all(kernel["shared"] <= SHARED for kernel in found.values())
