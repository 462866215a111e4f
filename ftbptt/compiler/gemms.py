"""Which operations are GEMMs, convolutions and their gradients among them, and their work."""

from __future__ import annotations

import math

from .graphs import Node, aten, value_of
from .time_axis.convolution import input_gradient, weight_gradient

GEMMS = {aten.mm.default, aten.bmm.default, aten.convolution.default}
_GRADIENTS = {input_gradient, weight_gradient}  # of (grad, x, weight, ...)

# What a product of two matrices of a row can have at most of rows, of columns or of terms: kernels
# compute it without the blocking of a GEMM.
MOST_VECTORS = 16


def is_gemm(node: Node) -> bool:
    return node.target in GEMMS or node.target in _GRADIENTS


def gemm_text(node: Node, how_often: str) -> str:
    """The shapes that are multiplied: ``@`` is a product of matrices, ``*`` a convolution."""
    a, b = node.args[0], node.args[2 if node.target is input_gradient else 1]
    sign = "@" if node.target in (aten.mm.default, aten.bmm.default) else "*"
    return f"{list(value_of(a).shape)} {sign} {list(value_of(b).shape)} {how_often}"


def gemm_flops(node: Node) -> int:
    """The FLOPs of a GEMM at one step, two per multiply-add; 0 for other nodes."""
    if not is_gemm(node):
        return 0
    if node.target in (aten.mm.default, aten.bmm.default):
        a, b = map(value_of, node.args[:2])
        return 2 * a.numel() * b.shape[-1]
    # A convolution's gradients multiply the same numbers as the convolution.
    grad, x, weight = node.args[:3] if node.target in _GRADIENTS else (node, *node.args[:2])
    transposed = node.args[6]
    # One filter for each output, or for each input if transposed.
    positions = x if transposed else grad
    # Of the shape: weight[0] is an operation, which a trace that is under way would hold.
    return 2 * value_of(positions).numel() * math.prod(value_of(weight).shape[1:])
