"""Elementwise operations of a graph -> expressions in a few primitives, for any target language.

A printer (``cpu.nest``, ``gpu.expressions``) needs one spelling per primitive. Operations that
are compositions of primitives (``sigmoid_backward``, ``rsub``, ...) are expanded here, once for
all languages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..compiler.graphs import Node, aten, value_of


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
    "add", "sub", "mul", "div", "neg", "maximum", "minimum", "pow", "exp", "exp2",
    "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan",
    "sinh", "cosh", "atan", "atan2", "tanh", "sigmoid", "erf", "erfc", "floor", "ceil",
    "round", "trunc", "fmod", "sign", "relu", "acos", "asin",
)} | dict.fromkeys(("_conj", "conj_physical", "_conj_physical"), "conj")  # fmt: skip
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_BITWISE = {"bitwise_and": "bit_and", "bitwise_or": "bit_or", "bitwise_xor": "bit_xor"}
_LOGICAL = {"logical_and": "bit_and", "logical_or": "bit_or", "logical_xor": "bit_xor"}


# Reductions that kernels have, by the operation.
REDUCTIONS = {
    aten.sum.dim_IntList: "sum", aten.sum.default: "sum", aten.amax.default: "maximum",
    aten.amin.default: "minimum", aten.prod.dim_int: "product",
}  # fmt: skip


def reduced_axes(node: Node) -> list[int]:
    """The axes that a reduction goes over: those that it names, or all."""
    dims = node.args[1] if len(node.args) > 1 else None
    count = value_of(node.args[0]).dim()
    named = [dims] if isinstance(dims, int) else dims or []
    if count == 0:  # of a single number, whose axis 0 or -1 may be named
        return []
    return [dim % count for dim in named] or list(range(count))


class Unsupported(Exception):
    """A node that kernels do not support; the message names the node and the reason."""


def refuse(node: Node, why: str) -> Unsupported:
    """The error to raise: ``operation (node): why``."""
    name = getattr(node.target, "__name__", node.target) if node.op == "call_function" else node.op
    return Unsupported(f"{name} ({node.name}): {why}")


def parts(expr: Expression) -> Iterator[Expression]:
    """The expression, and all that it is made of."""
    yield expr
    if isinstance(expr, Apply):
        for arg in expr.args:
            yield from parts(arg)


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
    """A constant as its dtype has it: kernels compute 16-bit dtypes in float32, and what reads it
    may be of a wider dtype."""
    if isinstance(x, Literal):
        number = torch.tensor(x.value, dtype=_DTYPES[type(x.value)])
        return Literal(number.to(x.dtype).item(), x.dtype)
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
    of_complex = (_arithmetic, _copied, _where, _of_parts)
    supports_complex = kind in of_complex if out.is_complex else kind is _part
    if (out.is_complex or complex_inputs) and not supports_complex:
        raise refuse(node, "kernels do not support this operation on complex numbers")

    def operand(arg: Any) -> Expression:
        if isinstance(arg, (bool, int, float, complex)):
            return Literal(arg, _DTYPES[type(arg)])
        return leaf(arg) if isinstance(arg, torch.fx.Node) else arg

    args = [operand(arg) for arg in node.args]
    return kind(_Operation(node, _overload_name(node), out, args, dict(node.kwargs)))


class _Operation(NamedTuple):
    """An operation to be expressed. ``dtype``: that of the result; ``args``: with expressions."""

    node: Node
    name: str
    dtype: torch.dtype
    args: list[Any]
    kwargs: dict[str, Any]


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


def _arithmetic(op: _Operation) -> Expression:
    name = _ARITHMETIC[op.name]
    if op.dtype == torch.bool:
        raise refuse(op.node, "arithmetic on bool")
    if len(op.args) > 2:
        raise refuse(op.node, "kernels do not support it with these arguments")
    if op.kwargs.get("rounding_mode") is not None:
        raise refuse(op.node, "division with rounding")
    operands = [cast(a, op.dtype) for a in op.args]
    if name == "fmod":  # elsewhere the number itself is closer to what torch computes
        operands = [_rounded(operand) for operand in operands]
    alpha = op.kwargs.get("alpha", 1)
    if alpha != 1:
        operands[1] = Apply("mul", (operands[1], Literal(alpha, op.dtype)), op.dtype)
    return Apply(name, tuple(operands), op.dtype)


def _part(op: _Operation) -> Expression:
    """A real number of a complex one; of a real one, its size."""
    x = op.args[0]
    return Apply(op.name, (x if x.dtype.is_complex else cast(x, op.dtype),), op.dtype)


def _of_parts(op: _Operation) -> Expression:
    parts = (cast(part, op.dtype.to_real()) for part in op.args)
    return Apply("complex", tuple(parts), op.dtype)


def _compared(op: _Operation) -> Expression:
    common = _common(op.node)
    if common == torch.bool:
        raise refuse(op.node, "a comparison of bools")
    operands = tuple(_rounded(cast(a, common)) for a in op.args)
    return Apply(op.name, operands, op.dtype)


def _logical(op: _Operation) -> Expression:
    name = _LOGICAL[op.name]
    return Apply(name, tuple(cast(a, torch.bool) for a in op.args), op.dtype)


def _bitwise(op: _Operation) -> Expression:
    return Apply(_BITWISE[op.name], tuple(cast(a, op.dtype) for a in op.args), op.dtype)


def _not(op: _Operation) -> Expression:
    if op.name == "bitwise_not" and op.dtype != torch.bool:
        raise refuse(op.node, "bitwise_not of integers")
    return Apply("bit_not", (cast(op.args[0], torch.bool),), op.dtype)


def _where(op: _Operation) -> Expression:
    return Apply(
        "where", (op.args[0], cast(op.args[1], op.dtype), cast(op.args[2], op.dtype)), op.dtype
    )


_ROUNDED = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}


def _copied(op: _Operation) -> Expression:
    """A copy or cast. A cast to 16 bits rounds even if its result is never stored in memory."""
    x = op.args[0]
    if op.dtype not in _ROUNDED or x.dtype in (op.dtype, torch.bool) or isinstance(x, Literal):
        return _rounded(cast(x, op.dtype))
    return Apply(_ROUNDED[op.dtype], (cast(x, op.dtype),), op.dtype)


def _clamped(op: _Operation) -> Expression:
    low = op.args[1] if len(op.args) > 1 else op.kwargs.get("min")
    high = op.args[2] if len(op.args) > 2 else op.kwargs.get("max")
    if op.name == "clamp_max":
        low, high = None, low if low is not None else high
    value = cast(op.args[0], op.dtype)
    for bound, kind in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            if isinstance(bound, (int, float)):
                bound = Literal(bound, op.dtype)
            value = Apply(kind, (value, cast(bound, op.dtype)), op.dtype)
    return value


def _sigmoid_backward(op: _Operation) -> Expression:
    grad, y = (cast(a, op.dtype) for a in op.args)
    complement = Apply("sub", (Literal(1, op.dtype), y), op.dtype)
    return Apply("mul", (grad, Apply("mul", (complement, y), op.dtype)), op.dtype)


def _tanh_backward(op: _Operation) -> Expression:
    grad, y = (cast(a, op.dtype) for a in op.args)
    square = Apply("mul", (y, y), op.dtype)
    return Apply("mul", (grad, Apply("sub", (Literal(1, op.dtype), square), op.dtype)), op.dtype)


def _threshold_backward(op: _Operation) -> Expression:
    grad, x = (cast(a, op.dtype) for a in op.args[:2])
    below = Apply("le", (x, cast(op.args[2], op.dtype)), torch.bool)
    return Apply("where", (below, Literal(0, op.dtype), grad), op.dtype)


def _reversed_sub(op: _Operation) -> Expression:
    if len(op.args) > 2 or op.kwargs:
        raise refuse(op.node, "alpha is not 1")
    a, b = (cast(x, op.dtype) for x in op.args)
    return Apply("sub", (b, a), op.dtype)


def _remainder(op: _Operation) -> Expression:
    """With the sign of the divisor, where ``fmod`` has that of the dividend."""
    a, b = (_rounded(cast(x, op.dtype)) for x in op.args)
    rest, zero = Apply("fmod", (a, b), op.dtype), Literal(0, op.dtype)
    signs = (Apply("lt", (x, zero), torch.bool) for x in (rest, b))
    differs = Apply("bit_xor", tuple(signs), torch.bool)
    moved = Apply("bit_and", (Apply("ne", (rest, zero), torch.bool), differs), torch.bool)
    return Apply("where", (moved, Apply("add", (rest, b), op.dtype), rest), op.dtype)


def _test(op: _Operation) -> Expression:
    if not op.args[0].dtype.is_floating_point:
        raise refuse(op.node, "its operand is not floating point")
    if op.name == "isnan":
        return Apply("ne", (op.args[0], op.args[0]), op.dtype)
    infinite = Literal(float("inf"), op.args[0].dtype)
    return Apply("eq", (Apply("abs", (op.args[0],), op.args[0].dtype), infinite), op.dtype)


def _unary_float(op: _Operation) -> Expression:
    if len(op.args) > 1 or op.kwargs:
        raise refuse(op.node, "kernels do not support it with these arguments")
    if op.dtype == torch.bool or (op.name in _ROUNDINGS and not op.dtype.is_floating_point):
        return cast(op.args[0], op.dtype)
    return Apply(_ARITHMETIC[op.name], (cast(op.args[0], op.dtype),), op.dtype)


# On integers these are the identity, and on flags so is ``sign``.
_ROUNDINGS = {"floor", "ceil", "trunc", "round"}
_REAL_FUNCTIONS = {
    "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh",
    "cosh", "atan", "tanh", "sigmoid", "erf", "erfc", "acos", "asin", "floor", "ceil", "trunc",
    "relu", "round", "sign",
}  # fmt: skip
_TABLE: dict[str, Callable[[_Operation], Expression]] = {
    **{name: _unary_float if name in _REAL_FUNCTIONS else _arithmetic for name in _ARITHMETIC},
    **dict.fromkeys(COMPARISONS, _compared),
    **dict.fromkeys(_LOGICAL, _logical),
    **dict.fromkeys(_BITWISE, _bitwise),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("clone", "_to_copy", "convert_element_type", "contiguous"), _copied),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    **dict.fromkeys(("isnan", "isinf"), _test),
    **dict.fromkeys(("abs", "real", "imag"), _part),
    "complex": _of_parts,
    "where": _where,
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "threshold_backward": _threshold_backward,
    "rsub": _reversed_sub,
    "remainder": _remainder,
}
