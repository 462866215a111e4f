"""Triton's interpreter, in which a GPU's kernels run on a CPU, operation by operation in numpy.

It knows Triton's own operations. Of the others, NVIDIA's mathematical functions (libdevice), it is
given numpy's here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import programs_at_once

IN_NUMPY: dict[str, Callable[..., Any]] = {
    "rint": np.rint, "pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x), "atan": np.arctan,
    "atan2": np.arctan2, "acos": np.arccos, "asin": np.arcsin, "fmod": np.fmod,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
    **{name: getattr(np, name) for name in
       ("log1p", "expm1", "tan", "sinh", "cosh", "tanh", "trunc")},
}  # fmt: skip


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, ``backend="fused"`` on a CPU makes a GPU's kernels and interprets them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and tested in test_gpu")
    assert os.environ["TRITON_INTERPRET"] == "1", "tests/__init__.py sets it"
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from ftbptt.backends import fused
    from ftbptt.kernels.gpu import module as triton_module

    from . import without_assembly

    load, dot = triton_module.load, InterpreterBuilder.create_dot

    def load_for_numpy(path: str) -> Any:
        module = load(path)
        functions = {name: on_tensors(function) for name, function in IN_NUMPY.items()}
        module.libdevice = SimpleNamespace(**functions)
        module.arrived = without_assembly.arrived
        return module

    def wide_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, _wide(a), _wide(b), *others)

    narrow = InterpreterBuilder.create_fp_trunc

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        """To the nearest bfloat16 that is even, as a GPU does; it would cut bits off."""
        if kind.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return narrow(self, source, kind)
        bits = source.data.view(np.uint32)
        nearest = np.where(np.isnan(source.data), bits, bits + 0x7FFF + ((bits >> 16) & 1))
        return TensorHandle((nearest >> 16).astype(np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", rounded)
    monkeypatch.setattr(triton_module, "load", load_for_numpy)
    programs_at_once.use(monkeypatch)
    monkeypatch.setitem(fused.LANGUAGES, "cpu", fused.LANGUAGES["cuda"])


def _wide(handle: Any) -> Any:
    """bfloat16 as float32: numpy has none, and multiplies the bits as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return TensorHandle(data, tl.float32)


def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numpy's as one of the interpreter's tensors."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def run(first: Any, *others: Any) -> Any:
        numbers = [arg.handle.data for arg in (first, *others)]
        data = function(*np.broadcast_arrays(*numbers)).astype(numbers[0].dtype)
        kind = first.type.scalar
        return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(data.shape)))

    return run
