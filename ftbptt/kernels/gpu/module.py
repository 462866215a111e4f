"""The source of a Triton kernel -> a module on disk, and launches of its kernel.

Triton compiles a kernel when it is first launched, for the dtypes and sizes of that launch, and
caches the result.
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

from ..._compat.building import compile_cache_dir

# Rows of a tile: at least what a matrix unit takes; more if there are enough rows to occupy every
# multiprocessor and a step's tiles fit in the registers of eight warps.
_LEAST_ROWS, _MOST_ROWS, _WARPS = 16, 64, 8
_TILE_BYTES = 8 << 10
_TILE_BYTES_EXACT = 4 << 10  # products without a matrix unit need more registers
# Elementwise loops, with one thread per row (one element).
_ELEMENTWISE_ROWS, _ELEMENTWISE_WARPS = 128, 4
# Affine steps are composed, many at once, if the rows would leave most of a multiprocessor's 2,048
# threads idle, so that it would wait for memory at every step. A memory access covers at least 32
# bytes, so a tile has several neighbouring rows.
_ROWS_TO_FILL_A_PROCESSOR, _NUMBERS_OF_A_TILE = 512, 2048
_LEAST_ROWS_AT_ONCE, _MOST_ROWS_AT_ONCE = 8, 32


def write(source: str) -> Path:
    """write : source of a module -> its path; the file is replaced atomically"""
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    path = Path(compile_cache_dir()) / "ftbptt" / "triton" / f"kernel_{key}.py"
    if not path.exists() or path.read_text() != source:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not in a NamedTemporaryFile, which nobody else who uses the folder could read.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as folder:
            new = Path(folder) / path.name
            new.write_text(source)
            os.replace(new, path)
    return path


@cache
def load(path: str) -> Any:
    """load : path of a module -> the module"""
    # Triton keeps what it compiles where Inductor does, which says so to it in the process that
    # compiles its own kernels. Its default is in the user's home, which a container may lack.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(compile_cache_dir(), "triton"))
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton resolves the globals of a kernel there
    spec.loader.exec_module(module)
    return module


def launch(
    path: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], numbers: Sequence[int]
) -> None:
    """launch : path of a module x its tensors and numbers -> None; fills the outputs"""
    module, device = load(path), outputs[0].device
    steps, axes = numbers[0], numbers[1 : 1 + module.AXES]
    total, groups = math.prod(axes), math.prod(axes[axis] for axis in module.GROUPED)
    if not total:
        return
    workspace = [
        torch.empty((steps + 1 if each_step else 1) * total * size,
                    dtype=getattr(torch, dtype), device=device)
        for dtype, size, each_step in module.WORKSPACE
    ]  # fmt: skip
    function, rows, options = _choose(module, steps, total, groups, device)
    if module.EXACT or module.PARTS > 1:
        is_exact = options.get("PRECISION") == "ieee"
        inputs, numbers = _with_weights_laid_out(
            module, function.arg_names, inputs, numbers, is_exact
        )
    tiles = -(-total // groups // rows) * groups
    if module.PARTS > 1:
        arrivals = torch.zeros(tiles * module.COUNTER, dtype=torch.int32, device=device)
        workspace.append(arrivals)
    with torch.cuda.device_of(outputs[0]):
        # A grid of one axis: the second and third axes are limited to 65,535 programs.
        function[(tiles * module.PARTS,)](
            *inputs, *outputs, *workspace, *numbers,
            ROWS=rows,
            num_stages=1,  # pipelining would read values of later steps before they are written
            enable_fp_fusion=True,  # a * b + c as one operation; no longer a default in Triton 3.10
            **options,
        )  # fmt: skip


def _with_weights_laid_out(
    module: Any,
    names: Sequence[str],
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    is_exact: bool,
) -> tuple[list[Tensor], list[int]]:
    """Weights as their products read them from shared memory without bank conflicts, and strides.

    A matrix unit takes columns. Without one (``is_exact``, in float32) threads read one row of a
    weight at a time, each another column of it.
    """
    inputs, numbers = list(inputs), list(numbers)
    weights = [i for i, name in enumerate(names) if name.startswith("weight")]
    strides = len(numbers) - 3 * len(weights)
    for place, i in enumerate(weights):
        weight = inputs[i]
        if weight.dtype is torch.float64 or 0 in weight.stride():  # a copy could be far larger
            continue
        if is_exact and weight.dtype is torch.float32:
            weight = weight.contiguous()
        elif module.PARTS > 1:
            weight = weight.mT.contiguous().mT
        after = strides + 3 * (place + 1)
        numbers[after - weight.dim() : after] = weight.stride()
        inputs[i] = weight
    return inputs, numbers


def _choose(
    module: Any, steps: int, total: int, groups: int, device: torch.device
) -> tuple[Any, int, dict[str, Any]]:
    """The module's function to launch, the rows of a tile, and further options."""
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    if module.PARTS > 1:
        rows, precision = options_of_split(module, total // groups, groups, processors, precision)
        options = {"PRECISION": precision, "num_warps": module.WARPS}
        # The programs wait for each other, so all must run at once.
        return module.run, rows, options | {"launch_cooperative_grid": True}
    exact = module.EXACT and precision == "ieee"
    rows, warps = options_for(total // groups, groups, module.ROW_BYTES, processors, exact)
    tile = steps_at_once(steps, total, processors)
    if tile is not None and hasattr(module, "run_composed"):
        return module.run_composed, tile[1], {"STEPS": tile[0], "num_warps": warps}
    return module.run, rows, {"PRECISION": precision, "num_warps": warps}


def options_of_split(
    module: Any, rows: int, groups: int, processors: int, precision: str
) -> tuple[int, str]:
    """(rows of a tile that several programs share, precision of its products)

    Without a matrix unit, the fewest rows with which all programs run at once. So it is in TF32
    too where these are so few that it takes no longer.
    """
    size = module.EXACT_ROWS
    while -(-rows // size) * groups * module.PARTS > processors and size < module.TILE_ROWS:
        size *= 2
    if precision == "ieee" or size == module.EXACT_ROWS < module.TILE_ROWS:
        return size, "ieee"
    return module.TILE_ROWS, precision


def options_for(
    rows: int, groups: int, row_bytes: int, processors: int, exact: bool
) -> tuple[int, int]:
    """(rows of a tile, warps of a program)

    ``rows``: of each of ``groups``. ``row_bytes``: of the widest tile. ``processors``: the
    multiprocessors of the GPU. ``exact``: whether products run without a matrix unit. Of the tile
    sizes for which the GPU needs the fewest waves of programs, the smallest.
    """
    if row_bytes <= 16:
        return _ELEMENTWISE_ROWS, _ELEMENTWISE_WARPS
    tile_bytes = _TILE_BYTES_EXACT if exact else _TILE_BYTES
    sizes = [_LEAST_ROWS]
    while 2 * sizes[-1] <= min(_MOST_ROWS, tile_bytes // row_bytes):
        sizes.append(2 * sizes[-1])

    def waves(size: int) -> int:
        return -(-(-(-rows // size) * groups) // processors)

    return min(sizes, key=waves), _WARPS


def steps_at_once(steps: int, rows: int, processors: int) -> tuple[int, int] | None:
    """(steps, rows) of a tile of composed steps; None where the loop over steps is faster."""
    if rows > _ROWS_TO_FILL_A_PROCESSOR * processors:
        return None
    tile_rows = _LEAST_ROWS_AT_ONCE
    while tile_rows < _MOST_ROWS_AT_ONCE and rows // (2 * tile_rows) >= processors:
        tile_rows *= 2
    tile_steps = _NUMBERS_OF_A_TILE // tile_rows
    return (tile_steps, tile_rows) if steps >= tile_steps else None
