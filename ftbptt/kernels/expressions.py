"""Elementwise operations of a graph -> expressions in a few primitives, for any target language.

A printer (``cpu.nest``, ``gpu.expressions``) needs one spelling per primitive. Operations that
are compositions of primitives (``sigmoid_backward``, ``rsub``, ...) are expanded here, once for
all languages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler.graphs import Node, aten


@dataclass(frozen=True)
class Literal:
    """A constant."""

    value: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Apply:
    """A primitive applied to expressions. ``dtype``: that of the result."""

    name: str
    args: tuple[Any, ...]
    dtype: torch.dtype


# A Literal, an Apply, or a leaf: whatever the caller of ``expression`` makes of a tensor, with an
# attribute ``dtype``.
Expression = Any

# By the name of the operation in aten, that of the function here.
_ARITHMETIC = {name: name for name in (
    "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "pow", "exp", "exp2",
    "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan",
    "sinh", "cosh", "atan", "atan2", "tanh", "sigmoid", "erf", "erfc", "floor", "ceil",
    "round", "trunc", "fmod", "sign", "relu", "acos", "asin",
)} | dict.fromkeys(("_conj", "conj_physical", "_conj_physical"), "conj")  # fmt: skip
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_BITWISE = {"bitwise_and": "bit_and", "bitwise_or": "bit_or", "bitwise_xor": "bit_xor"}
_LOGICAL = {"logical_and": "bit_and", "logical_or": "bit_or", "logical_xor": "bit_xor"}


class Unsupported(Exception):
    """A node that kernels do not support; the message names the node and the reason."""


def refuse(node: Node, why: str) -> Unsupported:
    """The error to raise: ``operation (node): why``."""
    name = getattr(node.target, "__name__", node.target) if node.op == "call_function" else node.op
    return Unsupported(f"{name} ({node.name}): {why}")


def dtypes(expr: Expression) -> Iterator[torch.dtype]:
    """Those of the expression and of all its parts."""
    yield expr.dtype
    if isinstance(expr, Apply):
        for arg in expr.args:
            yield from dtypes(arg)


def is_elementwise(node: Node) -> bool:
    return node.op == "call_function" and _overload_name(node) in _TABLE


def is_constant(node: Node) -> bool:
    """Whether the node is a tensor filled with one number, such as ``full`` or ``zeros_like``."""
    return node.op == "call_function" and node.target in _CONSTANTS


def constant(node: Node) -> Literal:
    dtype = node.meta["val"].dtype
    value = _CONSTANTS[node.target](node)
    if isinstance(value, (int, float, bool, complex)):
        return _rounded(Literal(value, dtype))
    raise refuse(node, "its value is not a number")


_CONSTANTS: dict[Any, Callable[[Node], Any]] = {
    aten.full.default: lambda n: n.args[1],
    aten.full_like.default: lambda n: n.args[1],
    aten.scalar_tensor.default: lambda n: n.args[0],
    aten.zeros_like.default: lambda n: 0,
    aten.ones_like.default: lambda n: 1,
    aten.zeros.default: lambda n: 0,
    aten.ones.default: lambda n: 1,
}


def cast(x: Expression, dtype: torch.dtype) -> Expression:
    """The expression converted to ``dtype``, if it has a different one."""
    if x.dtype == dtype:
        return x
    if isinstance(x, Literal) and dtype != torch.bool:
        return Literal(x.value, dtype)
    return Apply("cast", (x,), dtype)


def _rounded(x: Expression) -> Expression:
    """A 16-bit constant rounded to its dtype, since kernels compute 16-bit dtypes in float32."""
    if isinstance(x, Literal) and x.dtype in (torch.bfloat16, torch.float16):
        return Literal(torch.tensor(x.value, dtype=x.dtype).item(), x.dtype)
    return x


def expression(node: Node, leaf: Callable[[Node], Expression]) -> Expression:
    """expression : elementwise node x (operand node -> leaf) -> the node's value as an expression

    Raises Unsupported.
    """
    kind = _TABLE.get(_overload_name(node))
    if kind is None:
        raise refuse(node, "kernels do not support this operation")
    out = node.meta["val"].dtype
    complex_inputs = any(arg.meta["val"].dtype.is_complex for arg in node.all_input_nodes)
    supports_complex = out.is_complex and kind in (_arithmetic, _copied, _where)
    if (out.is_complex or complex_inputs) and not supports_complex:
        raise refuse(node, "kernels do not support this operation on complex numbers")

    def operand(arg: Any) -> Expression:
        if isinstance(arg, (bool, int, float, complex)):
            return Literal(arg, _DTYPES[type(arg)])
        return leaf(arg) if isinstance(arg, torch.fx.Node) else arg

    return kind(node, out, [operand(arg) for arg in node.args], dict(node.kwargs))


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _overload_name(node: Node) -> str:
    """``add`` for ``aten.add.Tensor``; empty for targets outside of aten and prims."""
    if getattr(node.target, "namespace", None) not in ("aten", "prims"):
        return ""
    name: str = node.target.overloadpacket.__name__
    return name


def _common(node: Node) -> torch.dtype:
    """The dtype in which the operands of a comparison are compared."""
    operands = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args[:2]]
    return torch.result_type(*operands)


def _arithmetic(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = _ARITHMETIC[_overload_name(node)]
    if out == torch.bool:
        raise refuse(node, "arithmetic on bool")
    if len(args) > 2:
        raise refuse(node, "kernels do not support it with these arguments")
    if kwargs.get("rounding_mode") is not None:
        raise refuse(node, "division with rounding")
    operands = [cast(a, out) for a in args]
    if name == "fmod":  # elsewhere the number itself is closer to what torch computes
        operands = [_rounded(operand) for operand in operands]
    alpha = kwargs.get("alpha", 1)
    if alpha != 1:
        operands[1] = Apply("mul", (operands[1], Literal(alpha, out)), out)
    return Apply(name, tuple(operands), out)


def _compared(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    common = _common(node)
    if common == torch.bool:
        raise refuse(node, "a comparison of bools")
    operands = tuple(_rounded(cast(a, common)) for a in args)
    return Apply(_overload_name(node), operands, out)


def _logical(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = _LOGICAL[_overload_name(node)]
    return Apply(name, tuple(cast(a, torch.bool) for a in args), out)


def _bitwise(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return Apply(_BITWISE[_overload_name(node)], tuple(cast(a, out) for a in args), out)


def _not(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if _overload_name(node) == "bitwise_not" and out != torch.bool:
        raise refuse(node, "bitwise_not of integers")
    return Apply("bit_not", (cast(args[0], torch.bool),), out)


def _where(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return Apply("where", (args[0], cast(args[1], out), cast(args[2], out)), out)


_ROUNDED = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}


def _copied(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A copy or cast. A cast to 16 bits rounds even if its result is never stored in memory."""
    x = args[0]
    if out not in _ROUNDED or x.dtype in (out, torch.bool) or isinstance(x, Literal):
        return _rounded(cast(x, out))
    return Apply(_ROUNDED[out], (cast(x, out),), out)


def _clamped(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = _overload_name(node)
    low = args[1] if len(args) > 1 else kwargs.get("min")
    high = args[2] if len(args) > 2 else kwargs.get("max")
    if name == "clamp_max":
        low, high = None, low if low is not None else high
    value = cast(args[0], out)
    for bound, kind in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            if isinstance(bound, (int, float)):
                bound = Literal(bound, out)
            value = Apply(kind, (value, cast(bound, out)), out)
    return value


def _sigmoid_backward(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    grad, y = (cast(a, out) for a in args)
    complement = Apply("sub", (Literal(1, out), y), out)
    return Apply("mul", (grad, Apply("mul", (complement, y), out)), out)


def _tanh_backward(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    grad, y = (cast(a, out) for a in args)
    square = Apply("mul", (y, y), out)
    return Apply("mul", (grad, Apply("sub", (Literal(1, out), square), out)), out)


def _threshold_backward(
    node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    grad, x = (cast(a, out) for a in args[:2])
    below = Apply("le", (x, cast(args[2], out)), torch.bool)
    return Apply("where", (below, Literal(0, out), grad), out)


def _reversed_sub(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) > 2 or kwargs:
        raise refuse(node, "alpha is not 1")
    a, b = (cast(x, out) for x in args)
    return Apply("sub", (b, a), out)


def _remainder(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """With the sign of the divisor, where ``fmod`` has that of the dividend."""
    a, b = (_rounded(cast(x, out)) for x in args)
    rest, zero = Apply("fmod", (a, b), out), Literal(0, out)
    signs = (Apply("lt", (x, zero), torch.bool) for x in (rest, b))
    differs = Apply("bit_xor", tuple(signs), torch.bool)
    moved = Apply("bit_and", (Apply("ne", (rest, zero), torch.bool), differs), torch.bool)
    return Apply("where", (moved, Apply("add", (rest, b), out), rest), out)


def _test(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = _overload_name(node)
    if not args[0].dtype.is_floating_point:
        raise refuse(node, "its operand is not floating point")
    if name == "isnan":
        return Apply("ne", (args[0], args[0]), out)
    infinite = Literal(float("inf"), args[0].dtype)
    return Apply("eq", (Apply("abs", (args[0],), args[0].dtype), infinite), out)


def _unary_float(node: Node, out: torch.dtype, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = _overload_name(node)
    if len(args) > 1 or kwargs:
        raise refuse(node, "kernels do not support it with these arguments")
    if out == torch.bool or (name in _ROUNDINGS and not out.is_floating_point):
        return cast(args[0], out)
    return Apply(_ARITHMETIC[name], (cast(args[0], out),), out)


# On integers these are the identity, and on flags so is ``sign``.
_ROUNDINGS = {"floor", "ceil", "trunc", "round"}
_REAL_FUNCTIONS = {
    "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh",
    "cosh", "atan", "tanh", "sigmoid", "erf", "erfc", "acos", "asin", "floor", "ceil", "trunc",
    "relu", "round", "sign",
}  # fmt: skip
# Operation -> the function (node, dtype of the result, operands, kwargs) -> expression.
_TABLE: dict[str, Callable[[Node, torch.dtype, list[Any], dict[str, Any]], Any]] = {
    **{name: _unary_float if name in _REAL_FUNCTIONS else _arithmetic for name in _ARITHMETIC},
    **dict.fromkeys(_COMPARISONS, _compared),
    **dict.fromkeys(_LOGICAL, _logical),
    **dict.fromkeys(_BITWISE, _bitwise),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("clone", "_to_copy", "convert_element_type", "contiguous"), _copied),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    **dict.fromkeys(("isnan", "isinf"), _test),
    "where": _where,
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "threshold_backward": _threshold_backward,
    "rsub": _reversed_sub,
    "remainder": _remainder,
}
