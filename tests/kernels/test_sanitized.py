"""Generated code under the address and undefined-behaviour sanitizers, on buffers of exact size.

The calls of a kernel are recorded, and done again by a program of its own that has the kernel in
it. Fresh memory is NaN there, also a kernel's scratch. The numbers must be the same.
"""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ftbptt import make_train_segment
from ftbptt._compat.building import cpp_command
from ftbptt.backends import fused
from ftbptt.kernels.cpu.toolchain import INCLUDE

from ..cells import problem
from ..sequences import sequences, stacked
from .scans import Scan, assert_same, random, share_all_products
from .test_complex import numbers, rotated
from .test_expressions import FLOAT, close, scan_over, values
from .test_fused_operations import JOINS, REDUCTIONS
from .test_fused_shapes import data_for, gated, grouped

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]

# Reads the call from a file: sizes of the buffers in bytes (inputs, outputs), the numbers, inputs.
MAIN = """
#include <cstdio>
int main(int, char** files) {
  std::FILE* const file = std::fopen(files[1], "rb");
  int64_t counts[3];  // inputs, outputs, numbers
  const auto read = [&](void* to, size_t size) {
    if (size != 0 && std::fread(to, size, 1, file) != 1) std::abort();
  };
  read(counts, sizeof(counts));
  const int64_t inputs = counts[0], buffers = inputs + counts[1];
  std::vector<int64_t> sizes(buffers), numbers(counts[2]);
  read(sizes.data(), buffers * sizeof(int64_t));
  read(numbers.data(), numbers.size() * sizeof(int64_t));
  std::vector<void*> memory(buffers);
  for (int64_t i = 0; i < buffers; ++i) memory[i] = std::malloc(sizes[i]);
  for (int64_t i = 0; i < inputs; ++i) read(memory[i], sizes[i]);
  run(memory.data(), numbers.data());
  std::FILE* const out = std::fopen(files[2], "wb");
  for (int64_t i = inputs; i < buffers; ++i) std::fwrite(memory[i], 1, sizes[i], out);
  for (void* buffer : memory) std::free(buffer);
  std::fclose(out);
  std::fclose(file);
}
"""


INSTRUCTIONS = {"avx2": ["-DCPU_CAPABILITY_AVX2", "-mavx2", "-mfma", "-mf16c"], "none": []}


@dataclass
class KernelCall:
    """One call of a kernel: the tensors it is given, and those it fills."""

    library: str
    inputs: list[Tensor]
    numbers: list[int]
    outputs: list[Tensor]


class Recorder:
    """Keeps the sources of kernels, and all calls of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources: dict[str, str] = {}
        self.calls: list[KernelCall] = []
        outputs_of, cpu = fused._outputs, fused.LANGUAGES["cpu"]

        def outputs(inputs: Any, library: str, numbers: Any, *spec: Any) -> list[Tensor]:
            made = outputs_of(inputs, library, numbers, *spec)
            self.calls.append(KernelCall(library, list(inputs), list(numbers), made))
            return made

        def library(source: str) -> Path:
            path = cpu.make_ready(source)
            self.sources[str(path)] = source
            return path

        monkeypatch.setattr(fused, "_outputs", outputs)
        monkeypatch.setitem(fused.LANGUAGES, "cpu", replace(cpu, make_ready=library))


@pytest.fixture
def recorder(kernels: None, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def check(recorder: Recorder, folder: Path) -> None:
    """Does every recorded call again, sanitized, with one thread and with three."""
    assert recorder.calls
    programs: dict[str, Path] = {}
    for call in recorder.calls:
        if call.library not in programs:
            place = folder / f"program{len(programs)}"
            programs[call.library] = build(recorder.sources[call.library], place)
        for threads in (1, 3):
            found = again(call, programs[call.library], threads)
            for a, b in zip(found, call.outputs, strict=True):  # other flags: rounded differently
                exact = not (a.is_floating_point() or a.is_complex())
                assert_same([a], [b], 0 if exact else 64 * torch.finfo(a.dtype).eps)


def build(source: str, program: Path, instructions: str | None = None) -> Path:
    """The kernel and ``MAIN`` as one program, with Inductor's flags but for these.

    ``instructions``: those of another machine, by their name in ``INSTRUCTIONS``, not our own.
    """
    path = program.with_suffix(".cpp")
    path.write_text("#include <vector>\n" + source + MAIN)
    command = cpp_command([str(path)], str(program), [str(INCLUDE)])
    words = [w for w in shlex.split(command) if w not in ("-shared", "-O3", "-ltorch_python")]
    words[words.index("-o") + 1] = str(program)
    if instructions is not None:
        words = [w for w in words if not w.startswith("-m") and "CPU_CAPABILITY" not in w]
        words = [w for i, w in enumerate(words) if w != "-D" or not words[i + 1].startswith("-")]
        words += INSTRUCTIONS[instructions]
    libraries = Path(torch.__file__).parent / "lib"
    words += [
        "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
        "-lc10", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    built = subprocess.run(words, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


def again(call: KernelCall, program: Path, threads: int) -> list[Tensor]:
    inputs = [bytes_of(tensor) for tensor in call.inputs]
    sizes = [*map(len, inputs), *(t.numel() * t.element_size() for t in call.outputs)]
    numbers = [len(inputs), len(call.outputs), len(call.numbers), *sizes, *call.numbers]
    given, result = program.with_suffix(".in"), program.with_suffix(".out")
    given.write_bytes(struct.pack(f"{len(numbers)}q", *numbers) + b"".join(inputs))
    options = "malloc_fill_byte=255:max_malloc_fill_size=1073741824:detect_leaks=0"
    environment = {**os.environ, "ASAN_OPTIONS": options, "OMP_NUM_THREADS": str(threads)}
    ran = subprocess.run(
        [program, given, result], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[:3000]
    content, found = result.read_bytes(), []
    for output in call.outputs:
        size = output.numel() * output.element_size()
        flat = torch.frombuffer(bytearray(content[:size]), dtype=output.dtype) if size else output
        found.append(flat.reshape(output.shape))
        content = content[size:]
    return found


def bytes_of(tensor: Tensor) -> bytes:
    """The memory from the tensor's first element to its last, whatever its strides."""
    if tensor.numel() == 0:
        return b""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((reach,), (1,)).contiguous()
    return flat.view(torch.uint8).numpy().tobytes() if reach else b""


needs_sanitizer = pytest.mark.skipif(shutil.which("g++") is None, reason="for g++ only")


@needs_sanitizer
def test_one_number_too_many_is_found(recorder: Recorder, tmp_path: Path) -> None:
    Scan(gated, *data_for(2, (3,), 3)).fused()
    (call,) = recorder.calls
    program = build(recorder.sources[call.library], tmp_path / "program")
    again(call, program, 1)
    call.outputs[-1] = call.outputs[-1].reshape(-1)[:-1]
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        again(call, program, 1)


@needs_sanitizer
@pytest.mark.parametrize("units", [1, 3, 17, 33])
def test_odd_sizes(units: int, recorder: Recorder, tmp_path: Path) -> None:
    for rows in (1, 2, 5, 67):
        Scan(gated, *data_for(3, (rows,), units)).check()
    check(recorder, tmp_path)


@needs_sanitizer
def test_layouts(recorder: Recorder, tmp_path: Path) -> None:
    (u, v, bias), x, carried = data_for(3, (6,), 5)
    scan = Scan(gated, [u, v, bias], x, carried)
    scan.fused([u.T, v[:, :1].expand(-1, 5), bias], x, carried)
    scan.fused([random(20, 20)[::2, 1::2], v.T.contiguous().T, bias], x, carried)
    check(recorder, tmp_path)


@needs_sanitizer
@pytest.mark.parametrize("operations", [REDUCTIONS, JOINS], ids=["reduce", "join"])
def test_operations(
    operations: dict[str, Callable[[Tensor], Tensor]], recorder: Recorder, tmp_path: Path
) -> None:
    def step(_: Any, x: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        h = torch.tanh(carried[0] + x[0])
        return [h], [operation(h) for operation in operations.values()]

    Scan(step, [], [random(2, 5, 3, 4, 5)], [random(5, 3, 4, 5, seed=1)]).fused()
    check(recorder, tmp_path)


@needs_sanitizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shared_products(
    dtype: torch.dtype, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_all_products(monkeypatch)
    for rows in (1, 5, 67):
        given = ([t.to(dtype) for t in own] for own in data_for(3, (rows,), 17))
        Scan(gated, *given).fused()
    check(recorder, tmp_path)


@needs_sanitizer
def test_models(recorder: Recorder, tmp_path: Path) -> None:
    for models, rows in ((2, 3), (3, 67)):
        given = [random(models, 7, 7)], [random(3, models, rows, 7)], [random(models, rows, 7)]
        Scan(grouped, *given).fused()
    check(recorder, tmp_path)


@needs_sanitizer
def test_complex_numbers(recorder: Recorder, tmp_path: Path) -> None:
    for dtype, rows in ((torch.complex64, 3), (torch.complex128, 67)):
        given = numbers(9, 9), numbers(3, rows, 9), numbers(rows, 9)
        Scan(rotated, *([t.to(dtype)] for t in given)).fused()
    check(recorder, tmp_path)


@needs_sanitizer
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lstm_readout", torch.float32), ("layer_norm_lstm", torch.bfloat16),
     ("counter_and_flag", torch.float64), ("lru_complex", torch.float32),
     ("ring_buffer", torch.float16)],
)  # fmt: skip
def test_cells(name: str, dtype: torch.dtype, recorder: Recorder, tmp_path: Path) -> None:
    given = problem(name, dtype)
    segment = make_train_segment(given.step, given.loss, backend="fused")
    for steps in (1, 5):
        segment(*given.data(steps))
    check(recorder, tmp_path)


@needs_sanitizer
def test_an_ensemble(recorder: Recorder, tmp_path: Path) -> None:
    calls = sequences("lstm_cell", 3)
    given = problem("lstm_cell")
    segment = make_train_segment(given.step, given.loss, backend="fused")
    vmap(segment)(*(stacked([call[i] for call in calls]) for i in range(4)))
    check(recorder, tmp_path)


@needs_sanitizer
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_machines_with_other_vectors(instructions: str, recorder: Recorder, tmp_path: Path) -> None:
    """Every primitive, and products, in vectors of 4 and 8 numbers as on other machines."""
    operations = {**FLOAT, "pow": lambda x, y: x.abs().clamp(0.1, 10) ** y.clamp(-10, 10)}
    scan_over(operations, *values(torch.float32, 33)).fused()
    Scan(gated, *data_for(3, (7,), 17)).fused()
    arithmetic, products = (
        (call, build(recorder.sources[call.library], tmp_path / f"program{i}", instructions))
        for i, call in enumerate(recorder.calls)
    )
    assert_same(again(*products, 2), products[0].outputs, 1e-12)
    found, wanted = again(*arithmetic, 1), arithmetic[0].outputs
    pairs = zip(operations, found[2:], wanted[2:], strict=True)
    assert [name for name, a, b in pairs if not close(a, b, ulps=8).all()] == []
