"""Matrix products of a compiled program on a CPU, split between threads.

Each thread computes its share of the rows (or columns) of the result, with single-threaded calls.
MKL's own threading blocks a product as if the threads shared their caches: on the gradient of a
weight, a sum over many steps and rows, a second thread makes it 1.6 times faster, and this split
makes it 2 times faster.
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


# Compiled programs call the operator in C++ (product.h). Calls from Python are not split.
_library.impl("product", torch.mm, "CPU")
torch.library.register_fake("ftbptt::product", _empty, lib=_library)
_SHIM = (INCLUDE / "product.h").read_text()


def share_products(program: fx.GraphModule) -> None:
    """Replaces ``mm`` on a CPU by the split product, for the dtypes that MKL multiplies."""
    for node in program.graph.find_nodes(op="call_function", target=aten.mm.default):
        value = value_of(node)
        if value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64):
            node.target = torch.ops.ftbptt.product.default
    program.recompile()


def products_in_cpp() -> Any:
    """A context in which programs are compiled to call the split product in C++."""
    return calls_in_cpp(torch.ops.ftbptt.product.default, _SHIM)
