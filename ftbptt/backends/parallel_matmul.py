"""Matrix products of a compiled program on a CPU, split between threads.

Each thread computes its share of the rows (or columns) of the result, with single-threaded calls.
MKL's own threading blocks a product as if the threads shared their caches: on the gradient of a
weight, a sum over many steps and rows, a second thread makes it 1.6 times faster, and this split
makes it 2 times faster.

MKL, torch's library, uses AVX-512 on Intel processors only. On others that have it our own product
is twice as fast (``matmul.h``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .._compat.inductor import calls_in_cpp
from ..compiler.graphs import aten, value_of
from ..kernels.cpu.build import start
from ..kernels.cpu.toolchain import INCLUDE, is_intel

_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define(
    "product(Tensor a, Tensor b, str library) -> Tensor", tags=(torch.Tag.needs_exact_strides,)
)


def _empty(a: Tensor, b: Tensor, library: str) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _product(a: Tensor, b: Tensor, library: str) -> Tensor:
    """The operator's implementation outside of compiled programs, which use ``product.h``."""
    return a @ b


_library.impl("product", _product, "CPU")
torch.library.register_fake("ftbptt::product", _empty, lib=_library)
_SHIM = "\n".join((INCLUDE / name).read_text() for name in ("load.h", "product.h"))
_C_TYPES = {torch.float32: "float", torch.float64: "double"}


def multiplies_itself() -> bool:
    """Whether products are computed by our own library on this processor."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_intel()


def share_products(program: fx.GraphModule) -> None:
    """Replaces products on a CPU by the split product, for the dtypes that MKL multiplies."""
    own = multiplies_itself()
    for target in (aten.mm.default, aten.bmm.default) if own else (aten.mm.default,):
        for node in program.graph.find_nodes(op="call_function", target=target):
            value = value_of(node)
            if value.device.type == "cpu" and value.dtype in _C_TYPES:
                library = str(start(_source(_C_TYPES[value.dtype]))) if own else ""
                node.target = torch.ops.ftbptt.product.default
                node.args = (*node.args, library)
    program.recompile()


def products_in_cpp() -> Any:
    """A context in which programs are compiled to call the split product in C++."""
    return calls_in_cpp(torch.ops.ftbptt.product.default, _SHIM)


def _source(c_type: str) -> str:
    return f'#include "matmul.h"\nFTBPTT_MATMUL({c_type})\n'
