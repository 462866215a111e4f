"""Kernels compiled for an H200 (sm_90), on any machine.

``python -m tests.kernels.compile_triton [CELL[:DTYPE][:resets][:split]...]`` prints, as JSON, the
shared memory, registers and spilled bytes of each.

Triton brings its own assembler and needs no GPU to compile. It is a process of its own because a
kernel is either interpreted or compiled.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.cells import LayerNormLSTM
from ftbptt import make_train_segment
from ftbptt.compiler.blocks import ScanBlock
from ftbptt.compiler.distribute import distribute
from ftbptt.kernels.expressions import Unsupported
from ftbptt.kernels.gpu import kernel as triton_kernel
from ftbptt.kernels.gpu.kernel import print_triton
from ftbptt.kernels.gpu.module import load, options_for, options_of_split, steps_at_once, write
from ftbptt.kernels.lower import make_row_loop
from ftbptt.kernels.rowloop import RowLoop

from ..cells import problem

TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.bool: "i1", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8",
}  # fmt: skip
HELD = triton_kernel._SHARED_BYTES_OF_ROWS
triton_kernel._MOST_MEETINGS = 1000  # what is slow is compiled as well
# Units, dtype, precision, rows.
CASES = {
    "lstm-64-fp32": (64, torch.float32, "ieee", 32),
    "lstm-64-tf32": (64, torch.float32, "tf32", 32),
    "lstm-50-fp32": (50, torch.float32, "ieee", 32),
    "lstm-128-bf16": (128, torch.bfloat16, "ieee", 32),
    "lstm-31-fp64": (31, torch.float64, "ieee", 32),
    # Their weights are split over multiprocessors.
    "lstm-256-fp32": (256, torch.float32, "ieee", 32),
    "lstm-256-fp32-16-rows": (256, torch.float32, "ieee", 16),
    "lstm-256-tf32": (256, torch.float32, "tf32", 32),
    "lstm-500-bf16": (500, torch.bfloat16, "ieee", 32),
    # As wide and as many rows as a program of theirs takes, then tiles of 32 rows.
    "lstm-256-fp32-256-rows": (256, torch.float32, "ieee", 256),
    "lstm-256-tf32-256-rows": (256, torch.float32, "tf32", 256),
    "lstm-512-bf16-128-rows": (512, torch.bfloat16, "ieee", 128),
    "lstm-128-tf32-512-rows": (128, torch.float32, "tf32", 512),
    "lstm-256-bf16-250-rows": (256, torch.bfloat16, "ieee", 250),
    "lstm-256-tf32-512-rows": (256, torch.float32, "tf32", 512),
    "lstm-512-tf32-128-rows": (512, torch.float32, "tf32", 128),
    "lstm-512-bf16-256-rows": (512, torch.bfloat16, "ieee", 256),
    "lstm-1024-bf16-64-rows": (1024, torch.bfloat16, "ieee", 64),
    # Whose programs reduce over 1,024 columns as well.
    "norm-256-tf32": (256, torch.float32, "tf32", 64),
    "norm-256-bf16": (256, torch.bfloat16, "ieee", 64),
}


class NormLSTM(LayerNormLSTM):
    def forward(self, x_t: Tensor, state: Any) -> Any:
        h, c = super().forward(x_t, state)
        return h, (h, c)


def of_lstm(kind: Any, hidden: int, dtype: torch.dtype, rows: int) -> list[tuple[str, ScanBlock]]:
    """The loops of a segment, forward and reverse."""
    cell = kind(24, hidden).to(dtype)
    state = (torch.zeros(rows, hidden, dtype=dtype),) * 2
    x, y = torch.zeros(3, rows, 24, dtype=dtype), torch.zeros(3, rows, hidden, dtype=dtype)
    segment = make_train_segment(cell, lambda out, y: (out - y).square().mean(), backend="eager")
    return loops(segment.plan(dict(cell.named_parameters()), state, x, y)[0])


def of_cell(name: str, dtype: torch.dtype, resets: bool) -> list[tuple[str, ScanBlock]]:
    given = problem(name, dtype)
    segment = make_train_segment(
        given.step, given.loss, backend="eager", time_dim=given.time_dim or None,
        recompute=resets,
    )  # fmt: skip
    reset = None
    if resets:
        shape = (3,) if given.rows is None else (3, given.rows)
        reset = torch.zeros(shape, dtype=torch.bool)
        reset = reset.movedim(0, given.time_dim) if reset.dim() > 1 else reset
    return loops(segment.plan(*given.data(3), reset=reset)[0])


def loops(plan: Any) -> list[tuple[str, ScanBlock]]:
    phases = (
        ("forward", distribute(plan.loops.forward)),
        ("reverse", distribute(plan.loops.reverse)),
    )
    blocks = [(phase, block) for phase, loop in phases for block in loop.blocks]
    return [(phase, block) for phase, block in blocks if isinstance(block, ScanBlock)]


def compiled(block: ScanBlock, precision: str) -> dict[str, dict[str, int]]:
    """The kernels of a block by their names, with the tiles that they would be called with."""
    torch.backends.cuda.matmul.fp32_precision = precision  # by which tiles are chosen
    loop = make_row_loop(block, on_gpu=True)
    module = load(str(write(print_triton(loop))))
    if module.PARTS > 1:
        rows, precision = options_of_split(module, loop.rows.total, 1, 132, precision)
        warps = module.WARPS
    else:
        exact = module.EXACT and precision == "ieee"
        rows, warps = options_for(1 << 20, 1, module.ROW_BYTES, 132, exact)
    options = {"ROWS": rows, "PRECISION": precision}
    found = {"run": compiled_function(module, "run", loop, options, warps)}
    if hasattr(module, "run_composed"):
        tile = steps_at_once(1 << 20, 1 << 10, 132)
        assert tile is not None
        options = {"STEPS": tile[0], "ROWS": tile[1]}
        found["run_composed"] = compiled_function(module, "run_composed", loop, options, warps)
    return found


def compiled_function(
    module: Any, name: str, loop: RowLoop, options: dict[str, Any], warps: int
) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, name)
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    # Of 16, as Triton finds in addresses and sizes when it is called.
    multiples: dict[Any, Any] = {}
    memory = {
        **{f"invariant{i}": m.dtype for i, m in loop.invariants.items()},
        **{f"weight{i}": dtype for i, dtype in loop.weight_dtypes.items()},
        **{f"sequence{i}": m.dtype for i, m in loop.sequences.items()},
        **{f"{kind}{i}": m.dtype for kind in ("start", "final", "history")
           for i, m in enumerate(loop.carries)},
        **{f"emit{i}": m.dtype for i, m in enumerate(loop.emits)},
        **{f"scratch{i}": getattr(torch, dtype)
           for i, (dtype, _, each) in enumerate(module.WORKSPACE) if not each},
    }  # fmt: skip
    is_exact = options.get("PRECISION") == "ieee" and torch.float32 in loop.weight_dtypes.values()
    # As a Linear's weight is laid out, or as it is copied.
    by_row = is_exact or (loop.reverse and module.PARTS == 1)
    contiguous = "n_stride" if by_row else "k_stride"
    for i, name in enumerate(function.arg_names):
        if name in memory:
            signature[name] = f"*{TYPES[memory[name]]}"
            multiples[(i,)] = [["tt.divisibility", 16]]
        elif name == "arrivals":
            signature[name] = "*i32"
        elif name in options:
            signature[name] = "constexpr"
            constants[(i,)] = options[name]
        elif name.startswith(contiguous):
            signature[name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[name] = "i32"
            if name.startswith(("step", "k_", "n_", "group_")) and name != "steps":
                multiples[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, multiples)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1}
    )
    return {"rows": options["ROWS"], "shared": made.metadata.shared, **usage(made.asm["ptx"])}


def usage(ptx: str) -> dict[str, int]:
    """What the assembler says of a kernel."""
    from triton.backends.nvidia.compiler import get_ptxas  # it has several, for several versions

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [get_ptxas(90).path, "-v", "-arch=sm_90a", source, "-o", f"{folder}/kernel.cubin"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    return {"registers": int(registers), "spilled": sum(map(int, spilled))}


def main(names: list[str]) -> None:
    """Of these cells of the table, their weights split or not; without any, of the cases."""
    found = {}
    for name in names or CASES:
        if name in CASES:
            hidden, dtype, precision, rows = CASES[name]
            kind = NormLSTM if name.startswith("norm") else nn.LSTMCell
            own = of_lstm(kind, hidden, dtype, rows)
        else:
            cell, *options = name.split(":")
            (numbers,) = {"float64", "bfloat16"} & {*options} or ["float32"]
            precision, dtype = "tf32", getattr(torch, numbers)
            own = of_cell(cell, dtype, "resets" in options)
            # That no weights fit into one program, though they would.
            held = triton_kernel._SHARED_BYTES if "split" in options else HELD
            triton_kernel._SHARED_BYTES_OF_ROWS = held
        for i, (phase, block) in enumerate(own):
            with contextlib.suppress(Unsupported):
                for function, kernel in compiled(block, precision).items():
                    found[f"{name}-{phase}-{i}-{function}"] = kernel
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
