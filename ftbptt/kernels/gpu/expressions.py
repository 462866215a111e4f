"""The primitives of ``expressions`` in Triton: its operators, and NVIDIA's libdevice."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..expressions import Apply, Unsupported
from ..rowloop import compute_dtype

TYPES = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16", torch.bool: "tl.int1", torch.int64: "tl.int64",
    torch.int32: "tl.int32", torch.int16: "tl.int16", torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
}  # fmt: skip
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "bit_and": "&", "bit_or": "|", "bit_xor": "^",
}  # fmt: skip
_IN_TRITON = {"abs", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "erf", "floor", "ceil"}
_IN_LIBDEVICE = {
    "pow": "pow", "log1p": "log1p", "expm1": "expm1", "rsqrt": "rsqrt", "tan": "tan",
    "sinh": "sinh", "cosh": "cosh", "atan": "atan", "atan2": "atan2", "tanh": "tanh",
    "erfc": "erfc", "round": "rint", "trunc": "trunc", "fmod": "fmod", "acos": "acos",
    "asin": "asin",
}  # fmt: skip


def type_of(dtype: torch.dtype) -> str:
    if dtype not in TYPES:
        raise Unsupported(f"GPU kernels do not support {dtype}")
    return TYPES[dtype]


def literal(value: Any, dtype: torch.dtype) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        value = f'float("{value}")'
    elif dtype.is_floating_point or dtype == torch.bool:
        value = (float if dtype.is_floating_point else bool)(value)
    else:  # as torch wraps it: Triton takes no number out of the range of its type
        least, count = torch.iinfo(dtype).min, 1 << torch.iinfo(dtype).bits
        value = (int(value) - least) % count + least
    return f"tl.full((1, 1), {value}, {type_of(dtype)})"


def apply(expr: Apply, args: list[str]) -> str:
    name = expr.name
    if name in _INFIX:
        return f"({args[0]} {_INFIX[name]} {args[1]})"
    if name in _IN_TRITON:
        return f"tl.{name}({args[0]})"
    if name == "fmod" and not expr.dtype.is_floating_point:
        return f"({args[0]} % {args[1]})"
    if name == "pow" and not expr.dtype.is_floating_point:
        raise Unsupported("GPU kernels do not support powers of integers")
    if name in _IN_LIBDEVICE:
        return f"libdevice.{_IN_LIBDEVICE[name]}({', '.join(args)})"
    if name in ("maximum", "minimum"):
        return f"tl.{name}({args[0]}, {args[1]}, propagate_nan=tl.PropagateNan.ALL)"
    x, zero = args[0], literal(0, compute_dtype(expr.dtype))
    composed = {
        # Triton's own subtracts from zero, which makes no negative zero, whose angle is another.
        "neg": f"({x} * -1.0)" if expr.dtype.is_floating_point else f"(-{x})",
        "reciprocal": f"({literal(1, compute_dtype(expr.dtype))} / {x})",
        "sigmoid": f"tl.sigmoid({x})",
        "relu": f"tl.where({x} < 0, {zero}, {x})",
        "sign": f"(({x} > 0).to({type_of(compute_dtype(expr.dtype))}) - ({x} < 0))",
        "bit_not": f"({x} == 0)",
        "round_bfloat16": f"{x}.to(tl.bfloat16).to(tl.float32)",
        "round_float16": f"{x}.to(tl.float16).to(tl.float32)",
    }
    if name == "where":
        return f"tl.where({', '.join(args)})"
    if name not in composed:
        raise Unsupported(f"GPU kernels do not support {name}")
    return composed[name]
