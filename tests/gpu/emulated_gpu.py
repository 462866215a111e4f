"""A GPU's programs on a CPU: all that would run there, in Triton's interpreter.

The compiler is told that the data are on a GPU, so that it makes what it would make there: its own
kernels, Inductor's, and the calls around both. They then run on tensors of the CPU, which stand
for those of the GPU: Triton's kernels in its interpreter, library calls as the CPU's own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kernels import interpreter

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Of an H200, as far as Inductor asks.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    total_memory=141 << 30, L2_cache_size=50 << 20, gcnArchName=None,
)  # fmt: skip


@contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, segments are compiled for a GPU and run on the CPU."""
    interpreter.use(monkeypatch)
    _pretend_to_have_a_gpu(monkeypatch)
    _interpret_inductor(monkeypatch)
    _compile_for_it(monkeypatch)
    # Numbers of threads that a mask leaves out.
    with np.errstate(all="ignore"), _OnCpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyTorch was compiled without cuDNN")
        yield


class _OnCpu(TorchFunctionMode):
    """Tensors that are made, or moved, while a program runs, are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if is_traced:
            return func(*args, **(kwargs or {}))
        return func(*map(_on_cpu, args), **{k: _on_cpu(arg) for k, arg in (kwargs or {}).items()})


def _on_cpu(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) and argument == GPU else argument


def _pretend_to_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor and the code that it generates ask torch of the GPU."""
    from torch._dynamo.device_interface import CudaInterface

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    answers = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "set_device": lambda device: None,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    for name, answer in answers.items():
        for owner in (torch.cuda, CudaInterface):  # which has copies of torch's functions
            monkeypatch.setattr(owner, name, staticmethod(answer), raising=False)
    for owner, name, value in (
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext()),
        (torch.version, "cuda", "12.8"),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (torch._C._dynamo.guards, "_empty_strided_cuda", empty),
    ):
        monkeypatch.setattr(owner, name, value, raising=False)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target))


class _Libdevice:
    """NVIDIA's functions, which Inductor's kernels call and the interpreter does not know."""

    def __getattr__(self, name: str) -> Any:
        function = interpreter.IN_NUMPY.get(name) or getattr(np, name)
        return interpreter.on_tensors(function)


def _interpret_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import triton_helpers

    monkeypatch.setattr(triton_helpers, "libdevice", _Libdevice())
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)


def _compile_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftbptt.backends import cudagraph
    from ftbptt.compiler.signature import Leaf
    from ftbptt.segment.programs import Programs

    init, built = Leaf.__init__, Programs._built

    def on_gpu(leaf: Leaf, shape: Any, dtype: Any, device: Any, *others: Any) -> None:
        init(leaf, shape, dtype, GPU, *others)

    def built_for_gpu(self: Programs, function: Any, args: Any, first: int, last: int) -> Any:
        examples = [SimpleNamespace(shape=a.shape, dtype=a.dtype, device=GPU) for a in args]
        return built(self, function, examples, first, last)

    class StepOnCpu(cudagraph.CompiledStep):  # within an operator no mode is active
        def __init__(self, *args: Any) -> None:
            with _OnCpu():
                super().__init__(*args)

        def __call__(self, memory: Sequence[Tensor]) -> None:
            with _OnCpu():
                super().__call__(memory)

    monkeypatch.setattr(cudagraph, "CompiledStep", StepOnCpu)
    monkeypatch.setattr(Leaf, "__init__", on_gpu)
    monkeypatch.setattr(Programs, "_built", built_for_gpu)
