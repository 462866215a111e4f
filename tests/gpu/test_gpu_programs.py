"""What would run on a GPU, Inductor's kernels and all, run in an emulation of one.

It is a process of its own, since torch has to find the stub of CUDA when it is loaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ftbptt._compat.building import cpp_command

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA, see test_gpu"),
    pytest.mark.skipif(sys.platform != "linux", reason="the stub is preloaded"),
]
HERE = Path(__file__).parent
LIBRARIES = [str(Path(torch.__file__).parent / "lib" / f"lib{n}.so") for n in ("torch_cpu", "c10")]


def passes(folder: Path, *options: str) -> None:
    """Runs the tests of ``gpu_programs`` with the stub."""
    stub = folder / "stub.so"
    command = cpp_command([str(HERE / "gpu_stub.cpp"), *LIBRARIES], str(stub), [])
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    own = os.environ | {"LD_PRELOAD": f"{LIBRARIES[0]}:{stub}", "TRITON_INTERPRET": "1"}
    tests = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider",
             "--show-capture=no", "--tb=short", str(HERE / "gpu_programs.py")]  # fmt: skip
    done = subprocess.run([*tests, *options], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout


def test_some_cells(tmp_path: Path) -> None:
    cells = "lstm_readout or min_gru"
    others = "test_low_precision or test_reset_and_recompute or test_split_weights"
    passes(tmp_path, "-k", f"(test_cells and ({cells})) or (({others}) and lstm_readout)")


@pytest.mark.slow
def test_all(tmp_path: Path) -> None:
    passes(tmp_path)
