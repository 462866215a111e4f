"""Every cell with as many rows as inputs, units, outputs, models and sequences.

Elsewhere all sizes differ, so that no axis can pass for another; here any axis could be taken for
another, and the shapes would fit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_all_cells() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
               "tests/kernels/test_fused.py", "tests/kernels/test_fused_vmap.py",
               "-k", "test_kernels or test_ensemble or test_shared_parameters"]  # fmt: skip
    own = os.environ | {"EQUAL_SIZES": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "[100%]" in done.stdout
