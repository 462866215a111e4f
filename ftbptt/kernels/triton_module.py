"""The source of a kernel in Triton -> a module on disk, and a call of it.

Triton compiles a kernel when it is first called, for the dtypes and sizes it finds, and keeps the
result itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat import compile_cache_dir

# A tile has as many rows as a matrix unit takes at least, or more where there are enough of them
# for every multiprocessor and a step's tiles stay in the registers of eight warps.
_LEAST_ROWS, _MOST_ROWS, _WARPS = 16, 64, 8
_TILE_BYTES = 8 << 10
_TILE_BYTES_EXACT = 4 << 10  # products without a matrix unit need more registers
# Elementwise loops: a thread for each number.
_ROWS_OF_ONE_NUMBER, _WARPS_OF_ONE_NUMBER = 128, 4
# Steps that compose are taken many at once where the rows leave most of a multiprocessor's 2,048
# threads without one, so that it would wait for memory at every step. A row of a tile is read
# together with its neighbours, in pieces of 32 bytes at least.
_ROWS_TO_FILL_A_PROCESSOR, _NUMBERS_OF_A_TILE = 512, 2048
_LEAST_ROWS_AT_ONCE, _MOST_ROWS_AT_ONCE = 8, 32


def write(source: str) -> Path:
    """write : source of a module -> where it is, whole or not at all"""
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    path = Path(compile_cache_dir()) / "ftbptt" / "triton" / f"kernel_{key}.py"
    if not path.exists() or path.read_text() != source:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            file.write(source)
        os.replace(file.name, path)
    return path


@cache
def load(path: str) -> Any:
    """load : path of a module -> the module"""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Triton looks for what a kernel names
    spec.loader.exec_module(module)
    return module


def launch(
    path: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], numbers: Sequence[int]
) -> None:
    """launch : a module, its tensors and numbers -> nothing; fills the outputs"""
    module, device = load(path), outputs[0].device
    steps, axes = numbers[0], numbers[1 : 1 + module.AXES]
    total, groups = math.prod(axes), math.prod(axes[: module.GROUPED])
    if not total:
        return
    own = [
        torch.empty((steps + 1 if each_step else 1) * total * size,
                    dtype=getattr(torch, dtype), device=device)
        for dtype, size, each_step in module.OWN
    ]  # fmt: skip
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    exact = module.EXACT and precision == "ieee"
    rows, warps = options_for(total // groups, groups, module.ROW_BYTES, processors, exact)
    function = module.run
    options: dict[str, Any] = {"PRECISION": precision}
    at_once = steps_at_once(steps, total, processors)
    if at_once is not None and hasattr(module, "run_composed"):
        rows, options = at_once[1], {"STEPS": at_once[0]}
        function = module.run_composed
    with torch.cuda.device_of(outputs[0]):
        # One axis: the others of a grid have room for 65,535 programs only.
        function[(-(-total // groups // rows) * groups,)](
            *inputs, *outputs, *own, *numbers,
            ROWS=rows,
            num_warps=warps,
            num_stages=1,  # more would read the steps ahead that this one has not written yet
            **options,
        )  # fmt: skip


def options_for(
    rows: int, groups: int, row_bytes: int, processors: int, exact: bool
) -> tuple[int, int]:
    """The rows of a tile and the warps of a program, for so many rows in each group and so many
    multiprocessors. ``exact``: of products that no matrix unit does.

    The smallest tile of those for which the multiprocessors take the fewest turns.
    """
    if row_bytes <= 16:
        return _ROWS_OF_ONE_NUMBER, _WARPS_OF_ONE_NUMBER
    room = _TILE_BYTES_EXACT if exact else _TILE_BYTES
    sizes = [_LEAST_ROWS]
    while 2 * sizes[-1] <= min(_MOST_ROWS, room // row_bytes):
        sizes.append(2 * sizes[-1])

    def turns(size: int) -> int:
        return -(-(-(-rows // size) * groups) // processors)

    return min(sizes, key=turns), _WARPS


def steps_at_once(steps: int, rows: int, processors: int) -> tuple[int, int] | None:
    """The steps and rows of a tile where steps that compose are better taken so."""
    if rows > _ROWS_TO_FILL_A_PROCESSOR * processors:
        return None
    own = _LEAST_ROWS_AT_ONCE
    while own < _MOST_ROWS_AT_ONCE and rows // (2 * own) >= processors:
        own *= 2
    most = _NUMBERS_OF_A_TILE // own
    return (most, own) if steps >= most else None
