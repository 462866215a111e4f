"""Products of a compiled program on a CPU, shared out between threads.

Each thread computes its rows (or columns) of the result alone. MKL shares a product itself, but
cuts it for its caches as if the threads had them in common: the gradient of a weight, a sum over
many steps and rows, gains 1.6 times from a second thread, and 2 times so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .._compat import calls_in_cpp
from ..compiler.graphs import aten, value_of
from ..kernels.toolchain import INCLUDE

_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define("product(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.needs_exact_strides,))


def _empty(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


# Compiled programs call it in C++; what calls it here has no threads to share it.
_library.impl("product", torch.mm, "CPU")
torch.library.register_fake("ftbptt::product", _empty, lib=_library)
_SHIM = (INCLUDE / "product.h").read_text()


def share_products(program: fx.GraphModule) -> None:
    """Replaces the products of a program on a CPU: those of types that MKL multiplies."""
    for node in program.graph.find_nodes(op="call_function", target=aten.mm.default):
        value = value_of(node)
        if value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64):
            node.target = torch.ops.ftbptt.product.default
    program.recompile()


def products_in_cpp() -> Any:
    """A context in which compiled programs call the shared products in C++."""
    return calls_in_cpp(torch.ops.ftbptt.product.default, _SHIM)
