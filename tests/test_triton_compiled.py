"""Kernels compiled for an H200, without one: they fit a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED = 227 << 10  # bytes that one program can have
SPILLED = 512  # bytes written to memory for want of registers, in the whole kernel


def test_they_fit() -> None:
    pytest.importorskip("triton")
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_triton"], env=own, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 10
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED, (name, kernel)
        assert kernel["spilled"] <= SPILLED, (name, kernel)
